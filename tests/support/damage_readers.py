"""Everything that reads records: the commands, and the programs that they start, called in this process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kmatrix.experiment.add as adding
import kmatrix.experiment.make as making
import kmatrix.experiment.plan as planning
from damage import DamagedMatrix, Reader
from kmatrix.cli import machine, models, pages, results, trackers
from kmatrix.cli.control import stop
from kmatrix.cli.running import reproduce, resume, start
from kmatrix.errors import KmatrixError
from kmatrix.gpu.devices import Device, DeviceLimits
from kmatrix.gpu.recorder.loop import Recorder
from kmatrix.gputop.command import run as gputop
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.track import sidecar
from programs import CommandResult
from programs import run as command
from track_factory import MemoryTracker
from version_0_1 import FINISHED, STOPPED

PAGE = f"trackio/.page-{os.getuid()}.json"
MODEL = "model/config.json"
# The settings of the matrix, without trackers; its finished runs are candidates for reuse.
SETTINGS = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=16", "BLOCK_SIZE=32", "BATCH_SIZE=4"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=16", "CPU_THREADS=1", "DATASET=folder", "DATA_PATH=notes", "NUM_GPUS=1"),
    *("MAX_ITERS=60", "EVAL_INTERVAL=20", "CHECKPOINT_INTERVAL=20", "KEEP_CHECKPOINTS=1", "LOG_INTERVAL=1"),
    *("SAMPLE_INTERVAL=60", "TOKENIZER=byte", "VAL_PERCENT=5", "GPU_MONITOR=n", "DATA_DIR={checkout}/data"),
    *("RESULTS_DIR={checkout}", "KCONFIG_CONFIG={checkout}/.config"),
)
RUN = "RUN={matrix}/" + FINISHED


def _checked(call: Callable[[DamagedMatrix], int]) -> Callable[[DamagedMatrix], CommandResult]:
    """Return a program with its output, the status 2 for an error of ours, and 70 with a traceback for another."""

    def called(damaged: DamagedMatrix) -> CommandResult:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = call(damaged)
            except KmatrixError as error:
                print(f"error: {error}", file=sys.stderr)
                status = 2
            except Exception:
                traceback.print_exc()
                status = 70
        return CommandResult(status, out.getvalue(), err.getvalue())

    return called


class _ReadyError(Exception):
    """A trainer has read all records: its next step would be the first of the training."""


def _ready(*_: object) -> None:
    raise _ReadyError


@_checked
def _train(damaged: DamagedMatrix) -> int:
    """Set a trainer up that resumes the stopped run, from its run.json to the first step."""
    import torch

    import gpt2.checkpoint.manager as saving
    from gpt2.log import RunLog
    from gpt2.train import train
    from kmatrix.records.files import read_json

    run_dir, threads = RunDir(damaged.matrix / STOPPED), torch.get_num_threads()
    record = read_json(run_dir.run_json)
    stop: Any = SimpleNamespace(requested=False, acknowledge=lambda: None)
    watchdog: Any = SimpleNamespace(begin=lambda **_: None, work=lambda *_: None, at=lambda *_: None, spent_before=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.CheckpointManager, "forecast", _ready)
        try:
            train(record, RunLog(run_dir, str(record.get("run_id")), 3, main=True), stop, watchdog, resume="auto")
        except _ReadyError:
            return 0
        finally:
            torch.set_num_threads(threads)
    raise AssertionError("the trainer began to train")


@_checked
def prepare(damaged: DamagedMatrix) -> int:
    """Prepare the dataset of the runs."""
    from gpt2.prepare.__main__ import main

    words = [
        "folder",
        f"--data-dir={damaged.checkout}/data",
        "--data-path=notes",
        "--tokenizer=byte",
        "--val-percent=5",
    ]
    return main([*words, "--tokens=7680", "--block-size=32"])


@_checked
def _import_model(damaged: DamagedMatrix) -> int:
    from gpt2.inference.export import main

    try:
        return main([str((damaged.checkout / MODEL).parent), f"--output={damaged.checkout}/imported.pt"]) or 0
    except SystemExit as ended:
        return int(ended.code or 0)


@_checked
def _upload(damaged: DamagedMatrix) -> int:
    """Upload the stopped run to a tracker in memory."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run_dir = RunDir(damaged.matrix / STOPPED)
        return sidecar.feed(run_dir, ("memory",), limit_s=60.0, make=lambda name: MemoryTracker)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Source:
    """The device of the finished run, for a recorder."""

    device_type, energy_source = "cpu", None
    devices = (Device(gpu_index=0, gpu_name="CPU rank 0", uuid="cpu-rank-0", rank=0),)

    def limits(self, device: int) -> DeviceLimits:
        return DeviceLimits()


@_checked
def _record(damaged: DamagedMatrix) -> int:
    """Continue the recordings of an earlier attempt."""
    run_dir = RunDir(damaged.matrix / FINISHED)
    run_dir.gpu_samples.unlink()  # of other devices, so that the summary would not be read
    source: Any = _Source()
    Recorder(source, run_dir, hz=20, parent=None, root=None)
    return 0


@_checked
def _replay(damaged: DamagedMatrix) -> int:
    return gputop(["--replay", str(damaged.matrix / FINISHED), "--once"])


@_checked
def _write_stats(damaged: DamagedMatrix) -> int:
    stats = f"{damaged.checkout}/stats.json"
    return gputop(["--run", str(damaged.matrix / FINISHED), f"--stats-file={stats}", "--json"])


def _while_served(name: str) -> Callable[[DamagedMatrix], CommandResult]:
    """Return a command that finds the page of Trackio served by another process."""

    def called(damaged: DamagedMatrix) -> CommandResult:
        with (damaged.checkout / PAGE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return command(name, f"RESULTS_DIR={damaged.checkout}", f"KCONFIG_CONFIG={damaged.checkout}/.config")

    return called


# What reads records.
READERS = {
    "status": Reader(),
    "estimate": Reader(("JSON=1",)),
    "summary": Reader(),
    "report": Reader(),
    "gallery": Reader(("MATRICES={matrix}", "RESULTS_DIR={checkout}"), target=False),
    "update-graphs": Reader(weight=2, changes=True),
    "compare": Reader(("BASE={matrix}/" + FINISHED, "NEW={matrix}/" + STOPPED), target=False),
    "list-checkpoints": Reader((RUN,)),
    "logs": Reader(("RUN=gpt2_a*",), sound=2),  # no output.log
    "stop": Reader(),
    "hold": Reader((RUN,), changes=True),
    "release": Reader((RUN,), changes=True),
    "tensorboard": Reader(),
    "track-sync": Reader(("PROJECT=other",)),
    "continue": Reader(("RETRY_FAILED=1",), changes=True),
    "test-rerun": Reader(changes=True, weight=12),
    "add": Reader(("OPTIMIZER=adam", "DATA_DIR={checkout}/data", "DATA_PATH=notes"), changes=True, weight=2),
    "reproduce": Reader(
        (RUN, "RESULTS_DIR={checkout}", "DATA_PATH=notes", "DATA_DIR={checkout}/data"),
        target=False,
        changes=True,
        weight=2,
    ),
    "test-matrix": Reader(("OPTIMIZER=adamw,muon", *SETTINGS), target=False, changes=True, weight=1),
    "train": Reader(("OPTIMIZER=adamw", *SETTINGS), target=False, changes=True, weight=1),
    "quickstart": Reader(("OPTIMIZER=adamw", *SETTINGS[:-1]), target=False, changes=True, weight=1),
    "plan": Reader(("OPTIMIZER=adamw", *SETTINGS), target=False, weight=1),
    "test-matrix-dry-run": Reader(("OPTIMIZER=adamw", *SETTINGS), target=False, weight=1),
    "prepare-data": Reader(("OPTIMIZER=adamw", *SETTINGS), target=False, weight=1),
    "sample": Reader(),
    "serve": Reader(),
    "export": Reader(("OUTPUT={checkout}/exported",)),
    "gputop": Reader((RUN,), target=False),
    "trackio-view": Reader(call=_while_served("trackio-view"), files=PAGE, weight=1),
    "import-model": Reader(call=_import_model, files=MODEL, changes=True, weight=4),
    "gputop --replay": Reader(call=_replay),
    "gputop --stats-file": Reader(call=_write_stats, changes=True),
    "trainer": Reader(call=_train, changes=True, weight=20),
    "data preparation": Reader(call=prepare, files="dataset", changes=True, weight=4),
    "tracker process": Reader(call=_upload, changes=True),
    "recorder": Reader(call=_record, changes=True),
}
# What reads .config, the machine or the network only.
NOT_READERS = frozenset(
    {
        *("menuconfig", "list-defconfigs", "defconfig", "olddefconfig", "savedefconfig", "diffconfig"),
        *("doctor", "wandb-test", "trackio-test", "gpu-exporter"),
    }
)


@contextlib.contextmanager
def without_work(damaged: DamagedMatrix) -> Iterator[None]:
    """Do not train, serve, wait, flush to disk, draw, or parse Kconfig again: none of them depends on the damage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    done = subprocess.CompletedProcess([], 1, "", "not compared")
    cached = functools.cache(results.open_tree)
    prepared = functools.cache(making.prepare_data)

    def without_program(python: Any, root: Any, data_dir: Any, runs: Any, shards: Any = None) -> Any:
        return prepared(python, root, data_dir, tuple(runs), None)

    def forget(matrix: MatrixDir) -> SimpleNamespace:
        return SimpleNamespace(pid=1) if matrix.path == damaged.matrix else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for module in (results, start, reproduce, adding, planning, machine, trackers):
            patch.setattr(module, "open_tree", cached)
        for module in (start, resume, reproduce):
            patch.setattr(module, "run_and_report", lambda matrix, plan, **options: 0)
        for module in (resume, reproduce):
            patch.setattr(module, "need_torch", lambda: None)
        patch.setattr(start, "ROOT", damaged.checkout)  # of the quickstart's .config
        patch.setattr(reproduce, "_weights", functools.partial(_without_process, reproduce._weights, done))
        patch.setattr(making, "need_torch", lambda: None)
        patch.setattr(making, "prepare_data", without_program)
        patch.setattr(models, "_run", lambda module, words: None)
        patch.setattr(stop, "holder", forget)
        patch.setattr(stop, "signal_runner", lambda matrix, owner: None)
        patch.setattr(trackers, "_sync_run", lambda run, names, project, *, online: 0)
        for name in ("need_trackers", "announce", "wait_for_signal"):
            patch.setattr(pages, name, lambda *_, **__: None)
        patch.setattr(trackers, "need_trackers", lambda names: None)
        patch.setattr(pages, "serve", lambda *_: SimpleNamespace(port=6006, url="http://localhost:6006/"))
        patch.setattr(pages, "known_projects", lambda folder: ["gpt2"])
        patch.setattr(sidecar, "POLL_S", 0.001)
        patch.setattr(FigureCanvasAgg, "print_png", _lay_out)
        yield


def _without_process(function: Callable[..., Any], done: object, *words: object) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: done)
        return function(*words)


def _lay_out(canvas: Any, *_: object, **__: object) -> None:
    """Compute everything in a figure, which fails for impossible values, without its pixels."""
    renderer = canvas.get_renderer()
    with renderer._draw_disabled():  # as Figure.draw_without_rendering, which calls print_png itself
        canvas.figure.draw(renderer)
