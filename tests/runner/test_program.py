"""Real processes: kill -9 of each kind, stop, Ctrl+C, two runners. The trainer waits for nothing but its own steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kmatrix.cli.watch.status import watch
from kmatrix.engines.place import Here
from kmatrix.records.attempts import read_all
from kmatrix.records.files import write_json
from kmatrix.records.paths import ROOT
from kmatrix.runner import background, requests
from kmatrix.runner.controller import exit_status
from kmatrix.runner.program import Program, finish
from kmatrix.sources import sha256_of_copy
from kmatrix.status.look import look
from kmatrix.status.wanted import wanted
from waiting import wait_until

pytestmark = pytest.mark.process
STEPS, HELD = 20, 8  # of a run; the step at which a test holds it
LOSS = float(pow(31, STEPS, 1000003))
TRAINER, PROGRAM, RUNNER = "gpt2.train", "kmatrix run", "kmatrix runner"


class Matrix:
    """A matrix of the toy trainer."""

    def __init__(self, path: Path, *, runs: int = 2, ranks: int = 1, **train: Any) -> None:
        self.path, self.names = path, [f"run_{number}" for number in range(runs)]
        (path / "control").mkdir(parents=True)
        (path / "code/gpt2").mkdir(parents=True)
        (path / "code/gpt2/__init__.py").touch()
        (path / "config.txt").touch()
        shutil.copy(ROOT / "tests/support/toy_trainer.py", path / "code/gpt2/train.py")
        common = {"device": "cpu", "num_gpus": ranks, "batch_size": 8, "max_iters": STEPS, "cpu_threads": 1, **train}
        symbols = {"PARALLEL_JOBS": str(runs)}
        plan = [{"name": name, "run_id": f"id-{name}", "train": {}} for name in self.names]
        write_json(path / "matrix.json", {"name": "m", "common": {"train": common, "symbols": symbols}, "runs": plan})

    def hold(self) -> None:
        """Hold the trainers at a step, until `go`."""
        for name in self.names:
            (self.path / name).mkdir()
            (self.path / name / f"hold.{HELD}").touch()

    def wait(self) -> None:
        """Wait until all runs are held."""
        wait_until(lambda: all(self.steps(name)[-1:] == [HELD] for name in self.names))

    def go(self) -> None:
        for name in self.names:
            (self.path / name / f"hold.{HELD}").unlink()

    def steps(self, name: str) -> list[int]:
        try:
            lines = (self.path / name / "metrics.jsonl").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line)["step"] for line in lines]

    def go_on(self, **asked: Any) -> int:
        """Continue, and watch to the end; return the exit status."""
        requests.go_on(look(self.path), **asked)
        background.start(self.path)
        wait_until(lambda: not self.processes(RUNNER))
        return exit_status(watch(self.path), wanted)

    def start(self) -> None:
        requests.go_on(look(self.path))
        background.start(self.path)

    def start_held(self) -> None:
        """Start the matrix, and wait until all its trainers are held."""
        self.hold()
        self.start()
        self.wait()

    def stop(self) -> None:
        """Stop the matrix, let its trainers go, and wait until all have ended."""
        background.stop(self.path)
        wait_until(self.is_asked)
        self.go()
        wait_until(lambda: not self.processes())

    def states(self) -> set[str]:
        return {str(state.status) for state in look(self.path).states.values()}

    def is_asked(self) -> bool:
        """Return whether all runs were asked to stop."""
        return all(state.attempts[-1].stop for state in look(self.path).states.values())

    def losses(self) -> list[float]:
        return [json.loads((self.path / name / "result.json").read_bytes())["final_val_loss"] for name in self.names]

    def processes(self, what: str = "") -> list[psutil.Process]:
        lines = ((one, " ".join(one.info["cmdline"] or ())) for one in psutil.process_iter(["cmdline"]))
        return [one for one, line in lines if what in line and str(self.path) in line]


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "lib"))
    made = list[Matrix]()

    def make(**options: Any) -> Matrix:
        made.append(Matrix(tmp_path / "m", **options))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            process.kill()


def test_a_matrix_runs_in_the_background_once(matrix: Any) -> None:
    one = matrix()
    assert one.go_on() == 0
    assert one.losses() == [LOSS, LOSS]
    assert one.go_on() == 0
    assert [len(read_all(one.path / name)) for name in one.names] == [1, 1]


@pytest.mark.parametrize(
    ("victim", "ranks"), [(RUNNER, 1), (RUNNER, 2), (f"{PROGRAM} ", 1), (f"{PROGRAM} ", 2), (TRAINER, 1), (TRAINER, 2)]
)
def test_kill_9_of_anything_and_continue(matrix: Any, victim: str, ranks: int) -> None:
    one = matrix(runs=2 // ranks, ranks=ranks)  # on two cores
    one.start_held()
    for process in one.processes(victim):
        process.kill()
    if victim == RUNNER:
        wait_until(one.is_asked)
        one.go()
        wait_until(lambda: not one.processes())
        assert one.states() == {"stopped"}  # each run has saved a checkpoint
        assert all(state.attempts[-1].end.step >= HELD for state in look(one.path).states.values())
    else:
        one.go()
    wait_until(lambda: not one.processes(RUNNER))
    assert one.go_on() == 0
    assert set(one.losses()) == {LOSS}
    assert not one.processes()


def test_a_stop_trains_no_step_twice(matrix: Any) -> None:
    one = matrix()
    one.start_held()
    one.stop()
    assert one.states() == {"stopped"}
    assert one.go_on() == 0
    assert [one.steps(name) for name in one.names] == [list(range(1, STEPS + 1))] * 2


def test_a_copy_by_hard_links_leaves_the_original_as_it_was(matrix: Any) -> None:
    one = matrix(runs=1)
    one.start_held()
    one.stop()
    original, one.path = one.path / "run_0", one.path.with_name("m_copy")
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    shutil.copytree(original.parent, one.path, copy_function=os.link)
    assert one.go_on() == 0
    assert one.steps("run_0")[-1] == STEPS
    assert {path: path.read_bytes() for path in before} == before


def test_ctrl_c_stops_and_a_closed_terminal_does_not(matrix: Any) -> None:
    one = matrix()
    one.start_held()

    def watcher() -> subprocess.Popen[bytes]:
        code = "import sys; from pathlib import Path; from kmatrix.cli.watch.status import watch; "
        code += "print('watches', flush=True); watch(Path(sys.argv[1]), is_ours=True)"
        process = subprocess.Popen([sys.executable, "-c", code, str(one.path)], stdout=subprocess.PIPE, bufsize=0)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    closed = watcher()
    closed.kill()
    closed.wait()
    assert one.states() == {"running"}
    second = watcher()
    wait_until(lambda: psutil.Process(second.pid).num_ctx_switches().voluntary > 20)  # it has its handlers
    second.send_signal(signal.SIGINT)
    wait_until(one.is_asked)
    one.go()
    assert second.wait(30) == 0
    assert one.states() == {"stopped"}


def test_a_second_runner_is_refused(matrix: Any) -> None:
    one = matrix()
    one.hold()
    one.start()
    words = [sys.executable, "-m", "kmatrix", "runner", str(one.path)]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 2
    assert len(one.processes(RUNNER)) == 1


def test_out_of_memory_halves_the_micro_batch_in_the_same_process(matrix: Any) -> None:
    one = matrix(runs=1, fits=2)
    assert one.go_on() == 0
    found = read_all(one.path / "run_0")
    assert [attempt.micro_batch for attempt in found] == [None, 4, 2]
    assert len({attempt.pid for attempt in found}) == 1


def test_nan_waits_for_a_person_once(matrix: Any) -> None:
    one = matrix(runs=1, diverges=3)
    assert one.go_on() == 1
    assert look(one.path).states["run_0"].reason == "loss is nan"
    assert (one.go_on(), len(read_all(one.path / "run_0"))) == (1, 1)
    assert (one.go_on(retry_failed=True), len(read_all(one.path / "run_0"))) == (1, 2)


def test_a_program_that_cannot_begin_is_tried_once(matrix: Any) -> None:
    one = matrix(runs=1)
    (one.path / "run_0").touch()  # not a folder
    assert one.go_on() == 130
    assert (one.path / "jobs/run_0.log").stat().st_size


def test_packed_runs_train_together_and_a_notice_saves_all(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs see a machine: a job that several believe to have would be queued again by each."""
    one = matrix()
    (one.path / "jobs/0001").mkdir(parents=True)
    (one.path / "jobs/0001/runs").write_text("other\nrun_0 run_1\n")
    monkeypatch.setenv("KMATRIX_JOB", "km-1-0001")
    words = [sys.executable, "-m", "kmatrix", "run", "--jobs", str(one.path / "jobs/0001"), "1"]
    one.hold()
    with subprocess.Popen(words) as program:
        one.wait()
        program.send_signal(signal.SIGUSR1)
        wait_until(one.is_asked)
        one.go()
    assert (program.returncode, one.states()) == (143, {"stopped"})
    attempts = [state.attempts[-1] for state in look(one.path).states.values()]
    assert [(attempt.job, attempt.end.kind) for attempt in attempts] == [("", "time limit")] * 2

    assert subprocess.run(words, check=False).returncode == 0
    assert one.losses() == [LOSS, LOSS]


def test_ranks_run_the_code_of_the_matrix_unless_the_user_asks_for_the_checkout(matrix: Any) -> None:
    one = matrix(runs=1)
    assert one.go_on() == 0
    assert read_all(one.path / "run_0")[0].code == sha256_of_copy(one.path / "code")
    program = Program(path=one.path / "run_0", place=Here())
    assert [program.trainer(asked)[1].code for asked in ({}, {"CODE": "checkout"})] == [one.path / "code", ROOT]


@pytest.mark.parametrize(
    ("kind", "next_one", "is_done"),
    [("preempted", None, False), ("nan", None, True), ("nan", {}, False), ("stopped", {}, False)],
)
def test_a_follower_stays_while_node_0_begins_the_next_attempt(
    matrix: Any, kind: str, next_one: dict[str, Any] | None, is_done: bool
) -> None:
    run = matrix(runs=1).path / "run_0"
    write_json(run / "attempts/1.json", {"number": 1, "host": "n1", "end": {"kind": kind}})
    if next_one is not None:
        write_json(run / "attempts/2.json", {"number": 2, "host": "n1"})
    assert Program(path=run, place=Here(node=1)).is_done() is is_done


@pytest.mark.parametrize(("signals", "code"), [([], 0), (["SIGUSR1"], 0), (["SIGTERM"], 143)])
def test_a_lost_node_and_a_notice_start_the_job_again_and_sigterm_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[str], code: int
) -> None:
    def lead() -> Generator[None, None, int]:
        yield
        return 143

    monkeypatch.setattr("kmatrix.runner.program.Supervisor", lambda **_: SimpleNamespace(lead=lead))
    place = Here()
    monkeypatch.setattr(place, "again", lambda: 0)
    assert finish(Program(path=tmp_path, place=place, signals=signals).lead()) == code


def test_pods_of_a_run_go_on_after_one_was_evicted_and_replaced(matrix: Any) -> None:
    """The leader stays: it gathers the nodes again, and its run continues at the step that was saved."""
    one = matrix(runs=1, ranks=2, num_nodes=2)
    (one.path / "jobs/0001").mkdir(parents=True)
    (one.path / "jobs/0001/runs").write_text("run_0\n")
    pods: list[subprocess.Popen[bytes]] = []

    def start_pod(index: int) -> subprocess.Popen[bytes]:
        about = {"KMATRIX_JOB": "km-1-0001", "KMATRIX_ADDRESS": "127.0.0.1", "KMATRIX_NODES": "2"}
        words = [sys.executable, "-m", "kmatrix", "run", "--jobs", str(one.path / "jobs/0001"), "0"]
        pods.append(subprocess.Popen(words, env={**os.environ, **about, "JOB_COMPLETION_INDEX": str(index)}))
        return pods[-1]

    one.hold()
    leader, evicted = start_pod(0), start_pod(1)
    one.wait()
    evicted.terminate()
    wait_until((one.path / "run_0/asked.1").exists)
    one.go()
    assert evicted.wait() == 143
    assert start_pod(1).wait() == leader.wait() == 0
    assert one.losses() == [LOSS]
    attempts = read_all(one.path / "run_0")
    assert [attempt.end.kind for attempt in attempts if attempt.end] == ["preempted", "finished"]
    assert one.steps("run_0") == list(range(1, STEPS + 1)), "no step was trained twice"
