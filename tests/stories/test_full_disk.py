"""Fill a disk in the middle of a matrix, check the message and the files, free space and continue.

The disk is a small tmpfs in a mount namespace of its own, as root or as an unprivileged user.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from held_training import HeldTraining
from story import complete_lines, load_json, matrices, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

# Large enough for one finished run and the start of the next, small enough to be filled at once.
SIZE = 24 * 2**20  # bytes
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=20", "LOG_INTERVAL=1", "REUSE=n", "AUTO_GENERATE_GRAPHS=n"),
    *("OPTIMIZER=adamw,muon", "NUM_GPUS=1", "MAX_ITERS=40", "CHECKPOINT_INTERVAL=4", "DROPOUT=0.1"),
)


class Disk:
    """A small disk mounted in a namespace of its own. Raises OSError if the machine does not allow that."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        root = os.geteuid() == 0
        mount = f"mount -t tmpfs -o size={SIZE},mode=777 tmpfs '{path}' && echo mounted && exec sleep infinity"
        user = [] if root else ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", *user, "--mount", "--propagation", "private", "sh", "-c", mount],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._holder.stdout.readline() != "mounted\n":
            self._holder.wait()
            raise OSError("neither root nor a user namespace can mount a tmpfs here")
        self._enter = ["nsenter", "--target", str(self._holder.pid), "--mount"]
        self._enter += [] if root else ["--user", "--preserve-credentials"]
        self.place = path
        self.seen = Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")  # outside the namespace

    def command(self, root: Path, *arguments: str) -> list[str]:
        """Return the command line that runs a program inside the namespace."""
        return [*self._enter, f"--wd={root}", *arguments]

    def fill(self) -> Path:
        """Fill the disk with one file, or what has become free since, and return its path."""
        filler = self.seen / "ballast"
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while os.write(descriptor, bytes(4096)):
                pass
        except OSError:
            return filler
        finally:
            os.close(descriptor)
        raise AssertionError("a write of nothing")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def disk(tmp_path):
    try:
        found = Disk(tmp_path / "disk")
    except OSError as error:
        pytest.skip(str(error))
    yield found
    found.close()


def results_of(matrix: Path) -> dict[str, list]:
    """Return every loss of every run, after resumes, and the status of the run."""
    found = {}
    for run in matrix.glob("gpt2_*"):
        steps: dict[int, dict] = {}
        for line in complete_lines(run / "metrics.jsonl"):
            if line.get("resumed"):
                steps = {step: values for step, values in steps.items() if step <= line["step"]}
            values = steps.setdefault(line["step"], {})
            values |= {key: value for key, value in line.items() if key in ("train/loss", "val/loss", "grad/norm")}
        found[run.name] = [load_json(run / "result.json")["status"], *sorted(steps.items())]
    return found


def start_on(disk, clone, tmp_path, variables) -> tuple[subprocess.Popen, Path]:
    """Start a matrix on the disk; return the runner and the file of its output."""
    words = ["-m", "kmatrix", "test-matrix", *TINY, f"RESULTS_DIR={disk.place}"]
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        return subprocess.Popen(
            disk.command(clone.root, clone.python, *words),
            cwd=clone.root,
            env=clone.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        ), output


def test_a_full_disk_loses_no_finished_run_and_the_matrix_continues_once_there_is_space(clone, disk, tmp_path):
    """The disk is filled to the last byte while the second of two runs trains."""
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("test-matrix", *TINY, f"RESULTS_DIR={tmp_path / 'calm'}")
    undisturbed = results_of(only(matrices(tmp_path / "calm")))
    held = HeldTraining(tmp_path / "held", 'steps == 8 and "muon" in " ".join(sys.orig_argv)')

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return clone.run(*disk.command(clone.root, clone.python, "-m", "kmatrix", *arguments), **variables)

    runner, output = start_on(disk, clone, tmp_path, held.environment)
    try:
        wait_until(lambda: held.holds() or runner.poll() is not None, "the second run is behind a checkpoint")
        matrix = only(matrices(disk.seen))
        training = only(matrix.glob("gpt2_muon*"))
        first = only(matrix.glob("gpt2_*/result.json"))
        finished = first.read_bytes()
        filler = disk.fill()
        held.free()
        assert runner.wait() != 0
    finally:
        runner.kill()
        runner.wait()
    output_text = output.read_text()
    assert f"make continue TARGET={disk.place / matrix.name}" in output_text
    assert "is full: free some space" in output_text
    assert "Traceback" not in output_text
    wait_until(lambda: not any(processes_of(disk.place / matrix.name).values()), "a runner that has let go ends soon")

    assert first.read_bytes() == finished
    for path in matrix.rglob("*.json"):
        if not path.name.startswith("gpu_stats"):  # grows in place, so it is valid at any time unless the disk was full
            json.loads(path.read_text())
    status_output = run("status", f"TARGET={disk.place / matrix.name}")
    assert status_output.returncode == 0, status_output.stderr
    assert "1 finished" in status_output.stdout
    disk.fill()  # what the runner has deleted
    refused = run("continue", f"TARGET={disk.place / matrix.name}")
    assert refused.returncode == 2
    assert "No space left on device" in refused.stderr
    assert first.read_bytes() == finished
    there = set(disk.seen.iterdir())
    refused = run("test-matrix", *TINY, f"RESULTS_DIR={disk.place}")
    assert refused.returncode == 2
    assert re.search(r"error: a disk is full\n  why: No space left on device.*\n  hint: free ", refused.stderr)
    assert set(disk.seen.iterdir()) == there

    filler.unlink()
    completed = run("continue", f"TARGET={disk.place / matrix.name}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert first.read_bytes() == finished
    assert results_of(matrix) == undisturbed
    resumed = [line for line in complete_lines(training / "events.jsonl") if line["event"] == "resume"]
    assert resumed[0]["step"] >= 4
