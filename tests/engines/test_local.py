"""The local machine: which run starts on which GPUs, and what happens to runs and GPUs that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.clock import clock
from kmatrix.engines.local import BUSY_S, Local
from kmatrix.engines.ports import Shape
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End, boot_id
from waiting import wait_until

GPUS = [Gpu(index=at, name="H100", uuid=f"GPU-{at}", memory_total=81920) for at in range(4)]
CPU = Shape(cpus=2)


class Process:
    """A program that ends when a test says so."""

    def __init__(self, words, *, env, stdout, **_):
        self.run, self.gpus, self.code, self.signals = Path(words[-1]).name, env["CUDA_VISIBLE_DEVICES"], None, []
        self.log, self.poll, self.send_signal = Path(stdout.name), lambda: self.code, self.signals.append


class Machine(Local):
    """A queue whose processes are objects."""

    def __init__(self, path, shapes, **known):
        self.started: list[Process] = []
        super().__init__(
            path=path, shape_of=lambda run: shapes.get(run, CPU), popen=self.start, **{"cores": 4, **known}
        )
        self.submit(list(shapes))

    def start(self, words, **options):
        self.started.append(Process(words, **options))
        return self.started[-1]

    def end(self, run, code=0):
        next(one for one in self.started if one.run == run).code = code

    def gpus_of(self):
        """Return run -> the numbers of its GPUs, of those that run now."""
        self.poll()
        return {one.run: one.gpus.replace("GPU-", "") for one in self.started if one.code is None}


@pytest.mark.parametrize(
    ("shapes", "known", "running"),
    [
        ({"a": Shape(gpus=1), "b": Shape(gpus=4)}, {}, {"b": "0,1,2,3"}),  # the widest first
        ({"a": Shape(gpus=1), "b": Shape(gpus=2), "c": Shape(gpus=1)}, {}, {"b": "0,1", "a": "2", "c": "3"}),
        ({"a": Shape(gpus=3, seconds=9), "b": Shape(gpus=3, seconds=10)}, {}, {"b": "0,1,2"}),  # then the longest
        ({"a": Shape(gpus=3), "b": Shape(gpus=2), "c": Shape(gpus=1)}, {}, {"a": "0,1,2", "c": "3"}),  # what fits
        ({"a": Shape(gpus=1, seconds=1), "b": Shape(gpus=4)}, {"parallel": 1}, {"a": "0"}),  # one: as in the matrix
        ({"a": Shape(gpus=1), "b": Shape(gpus=1), "c": Shape(gpus=1)}, {"parallel": 2}, {"a": "0", "b": "1"}),
        ({"a": CPU, "b": CPU}, {}, {"a": ""}),  # on the CPU one at a time
        ({"a": CPU, "b": CPU, "c": CPU}, {"parallel": 3}, {"a": "", "b": ""}),  # or as many as have cores
        ({"a": Shape(cpus=99)}, {}, {"a": ""}),
        ({"a": CPU, "b": Shape(gpus=1)}, {}, {"b": "0"}),  # never together
        ({"a": Shape(nodes=2, gpus=1), "b": Shape(nodes=2, gpus=1)}, {"hosts": 2}, {"a": "0"}),
        ({"a": Shape(gpus=2)}, {"distance": lambda *pair: sorted(pair) != ["GPU-1", "GPU-3"]}, {"a": "1,3"}),
    ],
)
def test_what_starts_at_first(tmp_path, shapes, known, running):
    assert Machine(tmp_path, shapes, gpus=GPUS, **known).gpus_of() == running


def test_a_run_on_the_cpu_waits_for_nobody_elses_gpus(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    said, used = [], {"GPU-0": "80 GiB used by python (pid 7)"}
    known = {"gpus": GPUS, "query": lambda _: dict(used), "say": said.append, "parallel": 2}
    machine = Machine(tmp_path, {"wide": Shape(gpus=4), "a": CPU, "b": CPU, "c": CPU}, **known)
    assert machine.gpus_of() == {"a": "", "b": ""}
    used.clear()
    machine.end("a")
    assert machine.gpus_of() == {"b": "", "c": ""}  # the driver is asked now and then
    now[0] += BUSY_S
    machine.submit(["d"])
    machine.end("c")
    assert machine.gpus_of() == {"b": ""}  # the GPUs are free, and the next run is the one on them
    machine.end("b")
    assert machine.gpus_of() == {"wide": "0,1,2,3"}
    assert said == ["GPU 0 is in use by others: 80 GiB used by python (pid 7)", "GPU 0 is available again"]


def test_a_lost_gpu_is_left_out_until_the_next_boot(tmp_path):
    def lost(run, gpu, boot):
        attempts.folder(tmp_path / run).mkdir(parents=True)
        end = End(kind="gpu lost", reason="Xid 79", lost=(gpu,))
        attempts.write(tmp_path / run, Attempt(number=1, boot=boot, end=end))

    lost("earlier", "GPU-0", boot_id() or "")
    lost("before", "GPU-1", "another boot")
    machine = Machine(tmp_path, {"a": Shape(gpus=3), "b": Shape(gpus=3)}, gpus=GPUS)
    assert machine.gpus_of() == {"a": "1,2,3"}
    lost("a", "GPU-2", boot_id() or "")
    machine.end("a", 143)
    assert (machine.gpus_of(), machine.poll()) == ({}, {})
    assert machine.broken["b"].startswith("it needs 3 GPUs, 2 can be used: GPU 0 is lost by earlier: Xid 79; GPU 2 is")


@pytest.mark.parametrize(
    ("code", "has_begun"), [(1, False), (2, False), (-9, False), (1, True), (-9, True), (0, False)]
)
def test_a_program_that_cannot_begin_is_tried_once(tmp_path, code, has_begun):
    machine = Machine(tmp_path, {"a": CPU})
    machine.poll()
    if has_begun:
        attempts.folder(tmp_path / "a").mkdir(parents=True)
        attempts.write(tmp_path / "a", Attempt(number=1))
    machine.started[0].log.write_text("Traceback\nImportError: torch\n", encoding="utf-8")
    machine.end("a", code)
    assert machine.poll() == {}
    machine.submit(["a"])
    is_broken = code != 0 and not has_begun
    assert machine.poll() == ({} if is_broken else {"a": True})
    assert machine.broken.get("a", "").endswith("before it began: Traceback; ImportError: torch") is is_broken


def test_what_waits_never_starts_after_a_cancel_and_what_runs_is_asked_once(tmp_path):
    machine = Machine(tmp_path, {"a": CPU, "b": CPU})
    machine.poll()
    for _ in range(2):
        machine.cancel(["a", "b"])
    assert (machine.poll(), machine.started[0].signals) == ({"a": True}, [signal.SIGTERM])


def test_a_shape_that_does_not_fit_the_machine_is_refused(tmp_path):
    shapes = [Shape(gpus=5), Shape(nodes=2), Shape(gpus=4), CPU]
    hints = [error.hint.partition(" with")[0] for error in Machine(tmp_path, {}, gpus=GPUS).check(shapes)]
    assert hints == ["pass NUM_GPUS=4", "pass HOSTS=a,b"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1), st.integers(0, 3), st.randoms())
def test_every_run_gets_its_turn_and_no_gpu_or_core_has_two(tmp_path_factory, sizes, parallel, random):
    shapes = {f"r{at}": Shape(gpus=gpus, cpus=cpus) for at, (gpus, cpus) in enumerate(sizes)}
    machine = Machine(tmp_path_factory.mktemp("m"), shapes, gpus=GPUS, parallel=parallel)
    while running := machine.gpus_of():
        used = [gpu for gpus in running.values() for gpu in gpus.split(",") if gpu]
        assert len(used) == len(set(used)) == sum(shapes[run].gpus for run in running)
        assert len({bool(shapes[run].gpus) for run in running}) == 1
        assert used or sum(min(4, shapes[run].cpus) for run in running) <= 4
        assert parallel == 0 or len(running) <= parallel
        machine.end(random.choice(sorted(running)))
    assert sorted(one.run for one in machine.started) == sorted(shapes)


SAVES = 'trap "touch $1/saved; exit 143" TERM; touch $1/ready; while :; do sleep 0.1; done'
HOLDER = """
import pathlib, sys, time
from kmatrix.engines import local, ports
program = ["sh", "-c", sys.argv[2], "sh"]
held = local.Local(path=pathlib.Path(sys.argv[1]), shape_of=lambda _: ports.Shape(), program=program)
held.submit(["a"])
held.poll()
time.sleep(600)
"""


@pytest.mark.process
def test_a_run_is_asked_to_save_when_the_process_of_its_queue_is_killed(tmp_path):
    (tmp_path / "a").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), SAVES]) as process:
        wait_until((tmp_path / "a/ready").exists)
        process.kill()
    wait_until((tmp_path / "a/saved").exists)
