"""Pack runs of 1, 2 and 4 GPUs on a machine with four, with the fake trainer and a simulated driver."""

from __future__ import annotations

import itertools
import os
import re
import subprocess

import pytest

import kmatrix.simulate.library as simulate
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.packing import Limits
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.runs import Status
from kmatrix.report.numbers import RunNumbers
from kmatrix.report.summary import Overlap, overlap_lines, overlaps
from kmatrix.runner.loop import drive
from kmatrix.status.state import JobPhase
from running import PYTHON, ROOT, engine, processes_of
from skips import require_program
from waiting import wait_until

BOX = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def spans(plans):
    """Return run name -> start, end, and the GPUs that its trainer saw."""
    found = {}
    for one in plans:
        (attempt,) = read_json(one.dir.status)["attempts"]
        seen = re.search(r"gpus '([^']*)'", one.dir.output_log.read_text()).group(1)
        assert attempt["gpus"] == [gpu for gpu in seen.split(",") if gpu]
        found[one.name] = (attempt["started"], attempt["ended"], set(attempt["gpus"]))
    return found


def overlapping(spans):
    return [(a, b) for a, b in itertools.combinations(spans.values(), 2) if a[0] < b[1] and b[0] < a[1]]


def test_runs_of_1_2_and_4_gpus_are_packed_on_disjoint_gpus(matrix, plan):
    widths = {"a": 4, "b": 2, "c": 2, "d": 1, "e": 1, "f": 1, "g": 1}
    plans = [plan(name, ranks=w, cuda=True, expected_s=10.0 * w) for name, w in widths.items()]
    outcome = drive(matrix, plans, engine(gpus=BOX, limits=Limits()), poll_s=0.02)
    assert outcome.counts == {"finished": 7}
    found = spans(plans)
    assert {name: len(gpus) for name, (_, _, gpus) in found.items()} == widths
    assert all(not a[2] & b[2] for a, b in overlapping(found))
    assert found["b"][2] | found["c"][2] == set(BOX)


def test_the_journal_records_the_gpus_of_a_run(matrix, plan):
    drive(matrix, [plan("a", cuda=True)], engine(gpus=BOX[2:]), poll_s=0.02)
    (line,) = [line for line in read_jsonl(matrix.journal) if line["event"] == "run started"]
    assert line["gpus"] == ["GPU-2"]


UUIDS = "from kmatrix.gpu.nvml.detect import detect; print(*(gpu.uuid for gpu in detect().gpus))"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The environment in which NVML has four simulated GPUs, and their UUIDs."""
    require_program("gcc")
    library = simulate.build(tmp_path_factory.mktemp("simulate"))
    seen = simulate.environment(library, simulate.SCENARIOS / "calm.scn", 4)
    output = subprocess.check_output([PYTHON, "-c", UUIDS], env={**os.environ, **seen}, cwd=ROOT / "lib", text=True)
    return seen, tuple(output.split())


def test_each_recorder_sees_only_the_gpus_of_its_own_run(matrix, plan, driver):
    environment, uuids = driver
    plans = []
    for name, width in {"a": 4, "b": 2, "c": 1, "d": 1}.items():
        plans.append(plan(name, ranks=width, cuda=True, expected_s=float(width)))
        run = read_json(plans[-1].dir.run_json)
        write_json(plans[-1].dir.run_json, run | {"train": run["train"] | {"max_iters": 80}})
    recorder = RecorderLauncher(python=PYTHON, root=ROOT, hz=20, environment=environment)
    box = engine(gpus=uuids, limits=Limits(), monitor=recorder)
    assert drive(matrix, plans, box, poll_s=0.02).counts == {"finished": 4}
    for one in plans:
        (attempt,) = read_json(one.dir.status)["attempts"]
        recorded = read_json(one.dir.gpu_summary)["gpus"]
        assert [gpu["uuid"] for gpu in recorded] == attempt["gpus"]
        assert len(recorded) == one.ranks
    assert processes_of(matrix) == []


def running(box):
    return {name for name, state in box.poll().items() if state.phase is JobPhase.RUNNING}


@pytest.fixture
def boxes():
    made = []

    def make(**known):
        made.append(engine(gpus=BOX, **known))
        return made[-1]

    yield make
    for box in made:
        box.cancel(now=True)


def test_the_limit_of_concurrent_runs_is_respected(plan, boxes):
    box = boxes(limits=Limits(jobs=3))
    box.submit([plan(name, "hang", cuda=True) for name in "abcde"])
    assert running(box) == {"a", "b", "c"}


def test_one_run_at_a_time_is_the_default(plan, boxes):
    box = boxes()
    box.submit([plan(name, "hang", cuda=True) for name in "ab"])
    assert running(box) == {"a"}


def test_a_group_of_exclusive_runs_ends_before_the_next_starts(plan, boxes):
    box = boxes(limits=Limits(exclusive=True))
    names = {"a": "hang", "b": "finish", "c": "hang", "d": "hang", "e": "finish"}
    box.submit([plan(name, behave, cuda=True) for name, behave in names.items()])
    assert running(box) == set("abcd")
    wait_until(lambda: box.poll()["b"].phase is JobPhase.ENDED)
    assert box.poll()["e"].phase is JobPhase.PENDING
    box.cancel({name: name for name in "acd"}, now=True)
    wait_until(lambda: box.poll()["e"].phase is JobPhase.ENDED)


def test_a_run_without_an_expected_time_is_started(plan, boxes):
    box = boxes(limits=Limits())
    box.submit([plan("a", cuda=True, expected_s=9.0), plan("b", ranks=4, cuda=True)])
    wait_until(lambda: all(state.phase is JobPhase.ENDED for state in box.poll().values()))


def test_runs_on_the_cpu_share_cores_only_with_jobs(plan):
    for most, together in ((0, {"a"}), (2, {"a", "b"}), (3, {"a", "b"})):
        box = engine(cores=2, limits=Limits(jobs=most))
        box.submit([plan(name, "hang") for name in "abc"])
        there = running(box)
        box.cancel(now=True)
        assert there == together


def test_a_run_with_more_threads_than_cores_runs_alone(plan):
    box = engine(cores=2, limits=Limits(jobs=2))
    box.submit([plan("a", "hang", ranks=2, cpu_threads=2), plan("b", "hang")])
    there = running(box)
    box.cancel(now=True)
    assert there == {"a"}


def test_runs_on_gpus_and_runs_on_the_cpu_never_overlap(plan, boxes):
    box = boxes(limits=Limits())
    box.submit([plan("a", cuda=True), plan("b"), plan("c", cuda=True)])
    assert running(box) == {"a", "c"}
    wait_until(lambda: all(state.phase is JobPhase.ENDED for state in box.poll().values()))


def test_a_retried_run_may_get_other_gpus(matrix, plan):
    one = plan("a", "oom6", ranks=2, cuda=True)
    drive(matrix, [plan("b", "hang", cuda=True, timeout_s=1.0), one], engine(gpus=BOX, limits=Limits()), poll_s=0.02)
    attempts = read_json(one.dir.status)["attempts"]
    assert [(len(set(attempt["gpus"])), attempt["status"]) for attempt in attempts] == [(2, "failed"), (2, "finished")]


# Shared time in the report


def trained(name, *spans):
    attempts = tuple({"attempt": i, "started": begin, "ended": end} for i, (begin, end) in enumerate(spans, 1))
    about = {"run_id": name, "axes": {}, "reason": "", "optimizer": "adamw", "model": "tiny", "device": "gpu"}
    return RunNumbers(name=name, status=Status.FINISHED, attempts=attempts, **about)


def test_a_run_that_overlapped_others_is_reported_with_the_share_of_its_time():
    runs = [
        trained("a", (0.0, 100.0)),
        trained("b", (0.0, 30.0)),
        trained("c", (20.0, 50.0)),
        trained("d", (100.0, 150.0)),
    ]
    assert overlaps(runs)[0] == Overlap("a", ("b", "c"), 0.5)
    assert [one.run for one in overlaps(runs)] == ["a", "b", "c"]
    assert overlap_lines(runs)[0] == "a  50% of its time in parallel with b, c"


def test_consecutive_runs_do_not_overlap_whatever_attempts_they_had():
    runs = [trained("a", (0.0, 10.0), (30.0, 40.0)), trained("b", (10.0, 30.0)), trained("c", (None, None))]
    assert overlap_lines(runs) == []


def test_many_overlapping_runs_are_counted_instead_of_named():
    runs = [trained(name, (0.0, 10.0)) for name in "abcdef"]
    assert overlap_lines(runs)[0] == "a  100% of its time in parallel with b, c, d and 2 more"
