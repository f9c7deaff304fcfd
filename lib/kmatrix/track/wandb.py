"""A run in W&B: online where W&B knows a key, else in files below the run's folder that `wandb sync` sends later."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite, isnan
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from kmatrix.records import Status, merged_metrics
from kmatrix.track.devices import means
from kmatrix.track.values import Alert, Devices, Identity, Point, Stored
from kmatrix.track.wandb_files import WandbFiles, Written, fatal_error

if TYPE_CHECKING:
    import wandb

INIT_S = 20.0  # for a server that does not answer; W&B waits for 90 s
FLUSH_S = 2.0  # until a row is in the file, so that a kill loses at most these; W&B waits for 15 s
CALM = {  # the environment of W&B's package and its service: no line of its own, and no word to anybody but the server
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
}
SUMMARY = {"val/loss": "min", "hellaswag/accuracy": "max", "hellaswag/accuracy_norm": "max"}  # else the last counts
NUMBER = re.compile(r"-?(0|[1-9]\d*)(?P<point>\.\d+)?(?P<power>[eE][+-]?\d+)?")  # not 007, not 1_000
AXES = ("tokens", "elapsed_s")  # what a chart can have below it besides the step


class Mirror:
    """A `Tracker` that writes one W&B run: each step is a row, and what the GPUs did since the row before stands in it.

    A row goes out with the next one, or at the end: until then W&B lets more be added to its step.
    """

    def __init__(self) -> None:
        self._identity: Identity | None = None
        self._run: wandb.Run | None = None
        self._before = Written()
        self._since: list[Devices] = []
        self._last: Point | None = None
        self._losses: dict[int, float] = {}
        self._stopped = False

    @property
    def name(self) -> str:
        return "wandb"

    def open(self, run: Identity) -> Stored:
        """Begin, or go on: what the server has counts where there is one, else what the run's own files have.

        Offline, a run that has files is begun again when there is something new to write: W&B makes a folder each time.
        Raises whatever W&B raises: no connection, a key that is none, a folder that cannot be written.
        """
        mode = _prepare(offline=run.config.get("WANDB_OFFLINE") == "y")
        if mode == "disabled":
            raise ConnectionError("WANDB_MODE=disabled: W&B is switched off in this environment")
        files = WandbFiles(run.dir.path, run.id)
        self._identity, self._run, self._before = run, None, files.read()
        self._since, self._last, self._stopped = [], None, False
        self._losses = {step: row["val/loss"] for step, row in self._before.steps.items() if "val/loss" in row}
        stored = Stored(steps=self._before.steps, devices_time=self._before.time, alerts=self._before.alerts)
        if mode != "offline":
            return replace(stored, steps=self._on_server(run, self._begun), link=self._begun.url)
        if not files.pieces:
            self._begin(run)
        return replace(stored, link=str(files.folder), how=f"{_program()} sync {shlex.quote(str(files.folder))}")

    def points(self, points: Sequence[Point]) -> None:
        """Hand rows over; the last one stays open for what the GPUs do until the next."""
        for point in points:
            self._row(point)
            if "val/loss" in point.values:
                self._losses[point.step] = point.values["val/loss"]

    def devices(self, devices: Sequence[Devices]) -> None:
        """Keep them for the next row."""
        self._since.extend(devices)

    def alert(self, alert: Alert) -> None:
        """Send an alert; online W&B mails it to those who asked for that."""
        self._begun.alert(title=alert.title, text=alert.text, level=alert.level.name)

    def close(self, status: Status) -> None:
        """End the run. Only a run that failed is marked failed; `status` in the summary tells one that was stopped.

        Raises OSError where W&B gave up sending, or wrote less than it was given: it says so nowhere but in its log.
        """
        if self._run is None and self._before.status == status:
            return  # nothing new
        run, self._run, files = self._begun, None, WandbFiles(self._known.dir.path, self._known.id)
        log = Path(run.settings.log_internal)
        if self._last is not None and self._since:
            run.log(self._values(self._last), step=self._last.step)
        run.summary.update({"status": str(status), **best(self._losses)})
        run.finish(exit_code=1 if status is Status.FAILED else 0)
        if refusal := fatal_error(log):
            raise ConnectionError(refusal)
        if run.offline:
            self._read_back(files)
        else:
            files.mark_synced()

    @property
    def _known(self) -> Identity:
        if self._identity is None:
            raise RuntimeError("open comes first")
        return self._identity

    @property
    def _begun(self) -> wandb.Run:
        if self._run is None:
            self._run = self._begin(self._known)
        return self._run

    def _begin(self, run: Identity) -> wandb.Run:
        import wandb

        self._run = wandb.init(
            project=run.project,
            entity=run.config.get("WANDB_ENTITY") or None,
            id=run.id,
            name=run.name,
            group=run.group,
            job_type=run.job_type,
            tags=run.tags,
            config=typed(run.config),
            dir=str(run.dir.path),
            resume="allow",
            settings=_settings(self._note_stop),
        )
        for key, summary in SUMMARY.items():
            self._run.define_metric(key, summary=summary)
        for axis in AXES:
            self._run.define_metric(axis)
        return self._run

    def _row(self, point: Point) -> None:
        if self._stopped:
            raise ConnectionError("W&B stopped sending: its server refused a row, or somebody pressed its stop button")
        self._begun.log(self._values(point), step=point.step)
        self._since, self._last = [], point

    def _values(self, point: Point) -> dict[str, float]:
        return {**means(self._since), **point.values, "_timestamp": point.time}

    def _on_server(self, run: Identity, begun: wandb.Run) -> dict[int, Mapping[str, float]]:
        """Return the steps that the server has: it takes none below the one at which it goes on."""
        known = self._before.steps
        there = {int(line["step"]) for line in merged_metrics(run.dir.metrics)} | set(known)
        return {step: known.get(step, {}) for step in there if step < begun.starting_step}

    def _read_back(self, files: WandbFiles) -> None:
        if self._last is not None and files.lacks(self._last.step):
            raise OSError(f"{files.folder} lacks step {self._last.step}: is the disk full, or not to be written to?")

    def _note_stop(self) -> None:
        """Note that W&B gave up, or that its stop button was pressed: no run ends by it; the next row fails."""
        self._stopped = True


def _prepare(*, offline: bool) -> str:
    """Make W&B's package ready, and return its mode: offline where nothing asks for another and W&B knows no key."""
    os.environ.update({**CALM, "WANDB_MODE": "offline"} if offline else CALM)
    os.environ.pop("WANDB_SERVICE", None)  # of a W&B program that started us: its service is not ours
    import wandb

    logging.raiseExceptions = False  # of W&B's own log, on a full disk: a traceback for each of its lines
    with suppress(Exception):  # what an attempt before left in this process: a service that died, a run half begun
        wandb.teardown()
    mode = os.environ.get("WANDB_MODE")
    if not mode and not wandb.login(prompt=False, verify=False):  # `wandb.setup` hangs where its service dies early
        wandb.teardown()
        os.environ["WANDB_MODE"] = mode = "offline"
    return "offline" if mode == "dryrun" else mode or "online"


def _program() -> str:
    """Return how a shell finds W&B's program: by its name, or where this interpreter has it."""
    return "wandb" if which("wandb") else shlex.quote(str(Path(sys.executable).with_name("wandb")))


def _settings(stopped: Callable[[], None]) -> wandb.Settings:
    """Return settings by which W&B stores what it is given, and nothing that it finds on this machine.

    Its own record of the command line, the packages, the code and the git remote could hold what is nobody's business.
    """
    import wandb

    return wandb.Settings(
        init_timeout=INIT_S,
        silent=True,
        console="off",
        disable_code=True,
        save_code=False,
        disable_git=True,
        label_disable=True,
        stop_fn=stopped,
        stop_on_fatal_error=True,
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=FLUSH_S,
    )


def best(losses: Mapping[int, float]) -> dict[str, float]:
    """Return what a run's summary says of its validation losses, by step; nothing where there is none."""
    known = {step: loss for step, loss in losses.items() if not isnan(loss)}
    if not known:
        return {}
    step = min(known, key=known.__getitem__)
    return {"final_val_loss": losses[max(losses)], "best_val_loss": known[step], "best_val_step": step}


def typed(config: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return a configuration as W&B can sort and plot it: numbers as such. A run's id is none, whatever its digits."""
    return {name: _number(text) if name.isupper() else text for name, text in config.items()}


def _number(text: str) -> str | int | float:
    found = NUMBER.fullmatch(text)
    if not found or not isfinite(float(text)):
        return text
    return float(text) if found["point"] or found["power"] else int(text)
