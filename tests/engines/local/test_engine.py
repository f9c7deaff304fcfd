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
from kmatrix.records.states import AttemptRecord
from kmatrix.report.numbers import RunNumbers
from kmatrix.report.summary import Overlap, overlap_lines, overlaps
from kmatrix.runner.loop import drive
from kmatrix.status.state import JobPhase
from once import session_folder
from running import PYTHON, ROOT, engine, processes_naming
from skips import require_program
from waiting import wait_until

GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def spans(plans):
    """Return run name -> start, end, and the GPUs that its trainer saw."""
    found = {}
    for run in plans:
        (attempt,) = read_json(run.dir.status)["attempts"]
        gpus = re.search(r"gpus '([^']*)'", run.dir.output_log.read_text()).group(1)
        assert attempt["gpus"] == [gpu for gpu in gpus.split(",") if gpu]
        found[run.name] = (attempt["started"], attempt["ended"], set(attempt["gpus"]))
    return found


def overlapping(spans):
    return [(a, b) for a, b in itertools.combinations(spans.values(), 2) if a[0] < b[1] and b[0] < a[1]]


@pytest.mark.process
def test_runs_of_1_2_and_4_gpus_are_packed_on_disjoint_gpus(matrix, plan):
    widths = {"a": 4, "b": 2, "c": 2, "d": 1, "e": 1}
    plans = [plan(name, ranks=w, cuda=True, expected_s=10.0 * w) for name, w in widths.items()]
    outcome = drive(matrix, plans, engine(gpus=GPUS, limits=Limits()), poll_s=0.02)
    assert outcome.counts == {"finished": 5}
    found = spans(plans)
    assert {name: len(gpus) for name, (_, _, gpus) in found.items()} == widths
    assert all(not a[2] & b[2] for a, b in overlapping(found))
    assert found["b"][2] | found["c"][2] == set(GPUS)


@pytest.mark.process
def test_the_journal_records_the_gpus_of_a_run(matrix, plan):
    drive(matrix, [plan("a", cuda=True)], engine(gpus=GPUS[2:]), poll_s=0.02)
    (line,) = [line for line in read_jsonl(matrix.journal) if line["event"] == "run started"]
    assert line["gpus"] == ["GPU-2"]


UUIDS = "from kmatrix.gpu.nvml.detect import detect; print(*(gpu.uuid for gpu in detect().gpus))"


@pytest.fixture(scope="module")
def simulated_driver(tmp_path_factory):
    """The environment in which NVML has four simulated GPUs, and their UUIDs."""
    require_program("gcc")
    library = simulate.build(session_folder(tmp_path_factory))
    environ = simulate.environment(library, simulate.SCENARIOS / "calm.scn", 4)
    output = subprocess.check_output([PYTHON, "-c", UUIDS], env={**os.environ, **environ}, cwd=ROOT / "lib", text=True)
    return environ, tuple(output.split())


@pytest.mark.nightly
def test_each_recorder_sees_only_the_gpus_of_its_own_run(matrix, plan, simulated_driver):
    environment, uuids = simulated_driver
    plans = []
    for name, width in {"a": 4, "b": 2, "c": 1, "d": 1}.items():
        plans.append(plan(name, ranks=width, cuda=True, expected_s=float(width)))
        run = read_json(plans[-1].dir.run_json)
        write_json(plans[-1].dir.run_json, run | {"train": run["train"] | {"max_iters": 80}})
    recorder = RecorderLauncher(python=PYTHON, root=ROOT, hz=20, environment=environment)
    local_engine = engine(gpus=uuids, limits=Limits(), recorders=recorder)
    assert drive(matrix, plans, local_engine, poll_s=0.02).counts == {"finished": 4}
    for planned in plans:
        (attempt,) = read_json(planned.dir.status)["attempts"]
        recorded = read_json(planned.dir.gpu_summary)["gpus"]
        assert [gpu["uuid"] for gpu in recorded] == attempt["gpus"]
        assert len(recorded) == planned.ranks
    assert processes_naming(matrix) == []


def running(local_engine):
    return {name for name, state in local_engine.poll().items() if state.phase is JobPhase.RUNNING}


@pytest.fixture
def make_engine():
    made = []

    def make(**known):
        made.append(engine(gpus=GPUS, **known))
        return made[-1]

    yield make
    for local_engine in made:
        local_engine.cancel(now=True)


@pytest.mark.process
def test_the_limit_of_concurrent_runs_is_respected(plan, make_engine):
    local_engine = make_engine(limits=Limits(jobs=3))
    local_engine.submit([plan(name, "hang", cuda=True) for name in "abcde"])
    assert running(local_engine) == {"a", "b", "c"}


@pytest.mark.process
def test_one_run_at_a_time_is_the_default(plan, make_engine):
    local_engine = make_engine()
    local_engine.submit([plan(name, "hang", cuda=True) for name in "ab"])
    assert running(local_engine) == {"a"}


@pytest.mark.process
def test_a_group_of_exclusive_runs_ends_before_the_next_starts(plan, make_engine):
    local_engine = make_engine(limits=Limits(exclusive=True))
    names = {"a": "hang", "b": "finish", "c": "hang", "d": "hang", "e": "finish"}
    local_engine.submit([plan(name, behave, cuda=True) for name, behave in names.items()])
    assert running(local_engine) == set("abcd")
    wait_until(lambda: local_engine.poll()["b"].phase is JobPhase.ENDED)
    assert local_engine.poll()["e"].phase is JobPhase.PENDING
    local_engine.cancel({name: name for name in "acd"}, now=True)
    wait_until(lambda: local_engine.poll()["e"].phase is JobPhase.ENDED)


@pytest.mark.process
def test_a_run_without_an_expected_time_is_started(plan, make_engine):
    local_engine = make_engine(limits=Limits())
    local_engine.submit([plan("a", cuda=True, expected_s=9.0), plan("b", ranks=4, cuda=True)])
    wait_until(lambda: all(state.phase is JobPhase.ENDED for state in local_engine.poll().values()))


@pytest.mark.process
def test_runs_on_the_cpu_share_cores_only_with_jobs(plan):
    for jobs, expected in ((0, {"a"}), (3, {"a", "b"})):
        local_engine = engine(cores=2, limits=Limits(jobs=jobs))
        local_engine.submit([plan(name, "hang") for name in "abc"])
        names = running(local_engine)
        local_engine.cancel(now=True)
        assert names == expected


@pytest.mark.process
def test_a_run_with_more_threads_than_cores_runs_alone(plan):
    local_engine = engine(cores=2, limits=Limits(jobs=2))
    local_engine.submit([plan("a", "hang", ranks=2, cpu_threads=2), plan("b", "hang")])
    names = running(local_engine)
    local_engine.cancel(now=True)
    assert names == {"a"}


@pytest.mark.process
def test_runs_on_gpus_and_runs_on_the_cpu_never_overlap(plan, make_engine):
    local_engine = make_engine(limits=Limits())
    local_engine.submit([plan("a", "hang", cuda=True), plan("b"), plan("c", "hang", cuda=True)])
    assert running(local_engine) == {"a", "c"}
    assert running(local_engine) == {"a", "c"}
    local_engine.cancel({name: name for name in "ac"}, now=True)
    wait_until(lambda: all(state.phase is JobPhase.ENDED for state in local_engine.poll().values()))


@pytest.mark.process
def test_a_retried_run_may_get_other_gpus(matrix, plan):
    run = plan("a", "oom6", ranks=2, cuda=True)
    drive(matrix, [plan("b", "hang", cuda=True, timeout_s=1.0), run], engine(gpus=GPUS, limits=Limits()), poll_s=0.02)
    attempts = read_json(run.dir.status)["attempts"]
    assert [(len(set(attempt["gpus"])), attempt["status"]) for attempt in attempts] == [(2, "failed"), (2, "finished")]


# Shared time in the report


def trained_run(name, *spans):
    attempts = tuple(AttemptRecord(attempt=i, started=begin, ended=end) for i, (begin, end) in enumerate(spans, 1))
    record = {"run_id": name, "axes": {}, "reason": "", "optimizer": "adamw", "model": "tiny", "device": "gpu"}
    return RunNumbers(name=name, status=Status.FINISHED, attempts=attempts, **record)


def test_a_run_that_overlapped_others_is_reported_with_the_share_of_its_time():
    runs = [
        trained_run("a", (0.0, 100.0)),
        trained_run("b", (0.0, 30.0)),
        trained_run("c", (20.0, 50.0)),
        trained_run("d", (100.0, 150.0)),
    ]
    assert overlaps(runs)[0] == Overlap("a", ("b", "c"), 0.5)
    assert [overlap.run for overlap in overlaps(runs)] == ["a", "b", "c"]
    assert overlap_lines(runs)[0] == "a  50% of its time in parallel with b, c"


def test_consecutive_runs_do_not_overlap_whatever_attempts_they_had():
    runs = [trained_run("a", (0.0, 10.0), (30.0, 40.0)), trained_run("b", (10.0, 30.0)), trained_run("c", (None, None))]
    assert overlap_lines(runs) == []


def test_many_overlapping_runs_are_counted_instead_of_named():
    runs = [trained_run(name, (0.0, 10.0)) for name in "abcdef"]
    assert overlap_lines(runs)[0] == "a  100% of its time in parallel with b, c, d and 2 more"
