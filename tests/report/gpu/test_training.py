"""Means, balance and energy per token are of the training; those of the whole run are next to them."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from gpu_factory import STARTED, write_phases
from kmatrix.gpu.devices import Device
from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records import attempts
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.formats.results_json import gpu_object
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.phases import read_phases
from kmatrix.report.gpu.read_gpu import TrainingTotals, add_timeline, read_gpu
from kmatrix.report.gpu.text import consolidated, cost_lines

DAY = 86_400.0
PHASES = (("set-up", 0.0, 20.0), ("evaluation", 50.0, 60.0))


def power_at(second):
    return 50.0 if second < 20 else 200.0 if 50 <= second < 60 else 100.0


def memory_at(second, gpu):
    return 100.0 if second < 20 else 400.0 + gpu * 20 + second % 7


def record_run(path, *, gpus=2, seconds=100, back_at=None, final=True, pauses=(), lead=0, clock=0.0):
    """Record GPUs at 1 Hz. back_at: the second at which the clock of the machine is set back by a day.

    pauses: seconds before each of which 4 s are not recorded, between two attempts.  lead: seconds recorded before 0.
    clock: seconds by which both clocks of this host are ahead.
    """
    run = RunDir(path)
    run.path.mkdir(parents=True, exist_ok=True)
    devices = [Device(gpu_index=i, gpu_name="A", uuid=f"GPU-{i}", rank=i, memory_total=1000.0) for i in range(gpus)]
    totals = RunTotals(devices, hz=1)
    header = [{"gpu_index": d.gpu_index, "gpu_name": d.gpu_name, "uuid": d.uuid, "rank": d.rank} for d in devices]
    file = SampleFile(run.gpu_samples, {"gpus": header, "hz": 1, "device_type": "nvidia", "simulated": False})
    joules = 0.0
    for second in range(-lead, seconds):
        if any(0 < pause - second <= 4 for pause in pauses):
            continue
        joules += power_at(second - 1) if second > -lead and second not in pauses else 0.0
        wall = STARTED + clock + second - (DAY if back_at is not None and second >= back_at else 0)
        values = []
        for gpu in range(gpus):
            known = {"memory_used": memory_at(second, gpu), "power": power_at(second), "energy_j": joules}
            values += [known.get(name, math.nan) for name in COLUMNS]
        totals.seconds += 1.0
        totals.add(500.0 + clock + second, wall, values)
        file.append(wall, 500.0 + clock + second, values)
    file.close()
    write_json(run.gpu_summary, totals.summary({"device_type": "nvidia", "energy_source": "counter"}, final=final))
    return run


def record_nodes(path, *, clock=DAY, lead=15, result=None, lines=True):
    """Record a run over two nodes that do the same. clock, lead: of node 1, as of record_run.  lines: of its phases."""
    run = record_run(path)
    record_run(path / "nodes" / "1", lead=lead, clock=clock)
    write_json(attempts.path_of(run.path, 1), {"number": 1, "host": "n1", "nodes": 2})
    write_json(run.path / "nodes" / "1.json", {"host": "n2", "attempt": 1})
    write_phases(run, *PHASES)
    write_json(run.result, {"ended": STARTED + (result or DAY)})
    for at, (name, begin, end) in enumerate(PHASES if lines else ()):
        shift = clock - (lead if at == 0 else 0)  # its set-up began earlier
        line = {"phase": name, "step": 0, "begin": STARTED + shift + begin, "end": STARTED + clock + end}
        append_jsonl(run.later_nodes()[1].phases, line)
    return run


@pytest.mark.parametrize("result", [90.0])
def test_the_training_on_several_nodes_is_the_sum_of_theirs_by_their_own_clocks(tmp_path, result):
    run = record_nodes(tmp_path / "run", result=result)
    one = record_run(tmp_path / "one")
    write_phases(one, *PHASES)
    write_json(one.result, {"ended": STARTED + (result or DAY)})
    expected = read_gpu(one, TrainingTotals(tokens=1000, seconds=90.0))

    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=90.0))

    assert [device.host for device in gpu.training.devices] == ["n1", "n1", "n2", "n2"]
    assert gpu.training.joules == pytest.approx(2 * expected.training.joules)
    assert gpu.training.total_mean == pytest.approx(2 * expected.training.total_mean)
    assert gpu.training.seconds == pytest.approx(expected.training.seconds, abs=1)
    assert gpu.training.joules_per_token == pytest.approx(2 * expected.training.joules_per_token)
    assert gpu.mean_power == pytest.approx(2 * expected.mean_power)
    assert gpu.balance("memory_used").cv == pytest.approx(expected.balance("memory_used").cv)
    assert gpu.phase_seconds("set-up") == expected.phase_seconds("set-up")  # of node 0
    assert gpu.phase_joules("evaluation") == pytest.approx(2 * expected.phase_joules("evaluation"))
    assert gpu.phase_joules("set-up") == pytest.approx(2 * expected.phase_joules("set-up") + 2 * 15 * 50.0)
    assert gpu_object(gpu)["training"]["joules"] == gpu.training.joules


def test_a_node_that_did_not_record_its_phases_leaves_the_training_unknown(tmp_path):
    run = record_nodes(tmp_path / "run", lines=False)
    gpu = add_timeline(run, read_gpu(run, TrainingTotals(tokens=1000)))
    assert gpu.training is None
    assert gpu.joules_per_token is not None
    assert {point.memory[2:] for point in gpu.timeline} == {(None, None)}
    assert gpu.phase_joules("set-up") is None


def trained(second):
    return not any(begin <= second < end for _, begin, end in PHASES)


def test_means_are_of_the_training_and_those_of_the_run_are_next_to_them(tmp_path):
    run = record_run(tmp_path / "run")
    write_phases(run, *PHASES)
    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=100.0))
    expected = [[memory_at(second, index) for second in range(100) if trained(second)] for index in (0, 1)]
    for device, values in zip(gpu.training.devices, expected, strict=True):
        assert device.memory_used.mean == pytest.approx(statistics.fmean(values))
        assert device.memory_used.deviation == pytest.approx(statistics.pstdev(values), rel=1e-4)  # stored rounded
        assert device.memory_used.count == 70
    assert gpu.main is gpu.training
    assert gpu.training.total_mean == pytest.approx(sum(map(statistics.fmean, expected)))
    assert gpu.whole.total_mean < gpu.training.total_mean
    # 2 GPUs: 100 W while training, 50 W during 20 s of set-up, 200 W during 10 s of an evaluation.
    assert gpu.joules == pytest.approx(2 * (20 * 50 + 69 * 100 + 10 * 200))
    assert gpu.training.joules == pytest.approx(2 * 69 * 100)
    assert gpu.training.joules_per_token == pytest.approx(13.8)
    assert gpu.joules_per_token == pytest.approx(19.8)
    assert gpu.training.mean_power == pytest.approx(200)
    assert gpu.training.seconds == pytest.approx(70, abs=1)
    means = [statistics.fmean(values) for values in expected]
    cv = 100 * statistics.pstdev(means) / statistics.fmean(means)
    assert gpu.balance("memory_used").cv == pytest.approx(cv)
    assert gpu.whole.balance("memory_used").cv != pytest.approx(cv)


@pytest.mark.parametrize("result", [95, None])
def test_only_the_time_from_first_to_last_step_of_each_attempt_is_training(tmp_path, result):
    run = record_run(tmp_path / "run", pauses=(30, 60, 75))
    start_recorders(run, (0.0, 1), (30.0, 2), (60.0, 3), (75.0, 4))
    # The first attempt is killed after its step at 22 s, the second in its set-up, the third after 69 s.
    write_phases(run)
    for attempt, begin, end in ((1, 5, 10), (3, 66, 68), (4, 80, 85)):
        line = {"phase": "set-up", "step": 0, "attempt": attempt, "begin": STARTED + begin, "end": STARTED + end}
        append_jsonl(run.phases, line)
    for attempt, second in ((1, 12), (1, 22), (3, 69), (4, 87), (4, 93)):
        append_jsonl(run.metrics, {"step": 1, "time": STARTED + second, "attempt": attempt, "train/loss": 1.0})
    run.result.unlink()
    if result:
        write_json(run.result, {"ended": STARTED + result, "attempt": 4})
    gpu = read_gpu(run, TrainingTotals())
    assert not [note for note in gpu.notes if "restarted" in note]
    end = result or 93
    ended = [(10, 22), (68, 69), (85, end)]
    assert [(p.name, p.begin, p.end) for p in gpu.phases] == [
        *(("set-up", 0, 10), ("ending", 22, 25), ("set-up", 30, 55), ("set-up", 60, 68), ("ending", 69, 70)),
        *(("set-up", 75, 85), ("ending", end, 99)),
    ]
    assert gpu.training.seconds == pytest.approx(sum(end - begin for begin, end in ended), abs=4)  # 1 s per sample
    assert gpu.training.joules == pytest.approx(
        sum(2 * power_at(second) for begin, end in ended for second in range(begin, end))
    )


def start_recorders(run, *starts):
    """Write a start of the recorder per second and attempt of the run."""
    for second, attempt in starts:
        event = {"time": STARTED + second, "monotonic": 500 + second, "event": "started", "gpu_index": None, "text": ""}
        append_jsonl(run.gpu_events, {**event, "attempt": attempt})


def test_a_restarted_recorder_is_a_note_and_no_attempt_of_the_run(tmp_path):
    """Compare a recording with a restart at 30 s with one by a single recorder."""
    single, restarted = record_run(tmp_path / "a"), record_run(tmp_path / "b", pauses=(30,))
    start_recorders(restarted, (-1, 1), (28, 1))
    for run in (single, restarted):
        write_phases(run, *PHASES)
        write_json(run.result, {"ended": STARTED + 95})

    expected, gpu = (read_gpu(run, TrainingTotals()) for run in (single, restarted))

    assert [(p.name, p.begin, p.end) for p in gpu.phases] == [(p.name, p.begin, p.end) for p in expected.phases]
    assert gpu.phase_joules("ending") == expected.phase_joules("ending")
    assert expected.notes == ()
    # record_run has no energy of a pause.
    assert gpu.notes == ("the recorder was restarted 1 time: 5.0 s have no sample, and 5.0 s no energy",)


def test_a_second_attempt_is_not_a_restart_of_the_recorder(tmp_path):
    run = record_run(tmp_path / "run", pauses=(50,))
    start_recorders(run, (-1, 1), (46, 2))
    write_phases(run)
    for attempt, begin, end in ((1, 5, 10), (2, 52, 58)):
        line = {"phase": "set-up", "step": 0, "attempt": attempt, "begin": STARTED + begin, "end": STARTED + end}
        append_jsonl(run.phases, line)
    append_jsonl(run.metrics, {"step": 1, "time": STARTED + 40, "attempt": 1, "train/loss": 1.0})
    write_json(run.result, {"ended": STARTED + 90, "attempt": 2})
    gpu = read_gpu(run, TrainingTotals())
    assert [(p.name, p.begin, p.end) for p in gpu.phases] == [
        *(("set-up", 0, 10), ("ending", 40, 45), ("set-up", 50, 58), ("ending", 90, 99)),
    ]
    assert gpu.notes == ()


def record_on_other_gpus(path, *, uptime=0.0, logged=True):
    """Record an attempt on 3 GPUs that is killed at 90 s, and one on 2 GPUs from 200 s on.

    uptime: seconds by which the host of the second one has been up for longer.  logged: whether the first logs phases.
    """
    run = record_run(path, gpus=3, seconds=90)
    run.gpu_samples.rename(run.path / "gpu_samples.1.bin")
    record_run(path, clock=200.0)
    for attempt, clock, shift in ((1, 0.0, 0.0), (2, 200.0, uptime)):
        for name, begin, end in PHASES if logged or attempt == 2 else ():
            line = {"phase": name, "attempt": attempt, "begin": STARTED + clock + begin, "end": STARTED + clock + end}
            mono = 500 + clock + shift
            append_jsonl(run.phases, {**line, "begin_monotonic": mono + begin, "end_monotonic": mono + end})
        append_jsonl(run.metrics, {"step": 1, "time": STARTED + clock + 80, "attempt": attempt, "train/loss": 1.0})
    write_json(run.result, {"ended": STARTED + 290.0, "attempt": 2})
    return run


def test_the_phases_of_an_attempt_on_other_gpus_are_not_training(tmp_path):
    run = record_on_other_gpus(tmp_path / "run")
    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=100.0))
    assert [(one.name, one.begin, one.end, one.is_earlier) for one in gpu.phases] == [
        ("set-up", -200, -180, True),
        ("evaluation", -150, -140, True),
        ("ending", -120, -111, True),
        ("set-up", 0, 20, False),
        ("evaluation", 50, 60, False),
        ("ending", 90, 99, False),
    ]
    assert (gpu.phase_seconds("set-up"), gpu.phase_seconds("ending")) == (40, 18)
    assert gpu.seconds == 100 + 89
    assert gpu.training.seconds == pytest.approx(189 - 40 - 20 - 18)
    assert gpu.training.joules == pytest.approx(3 * 50 * 100 + 2 * 60 * 100)
    assert gpu.training.mean_power == pytest.approx(gpu.training.joules / gpu.training.seconds)
    assert gpu.training.devices[0].power.mean == pytest.approx(100, rel=0.01)  # of the last attempt
    shown = add_timeline(run, gpu)
    assert [(one.name, one.begin) for one in shown.phases][:4:3] == [("set-up", 0), ("set-up", 200)]
    text = consolidated("m", [RunGpus(name=run.name, optimizer="adamw", status="finished", gpu=gpu)])
    assert f"last attempt: {gpu.total_mean:.1f} MB" in text
    assert "unknown" not in text.partition("Time:")[2].partition("recorded")[0]


def test_without_the_phases_of_an_attempt_on_other_gpus_the_length_of_the_training_is_unknown(tmp_path, monkeypatch):
    def unknown(*args, is_last=True, **kwargs):
        return read_phases(*args, **kwargs) if is_last else ()

    run = record_on_other_gpus(tmp_path / "run")
    monkeypatch.setattr("kmatrix.report.gpu.read_gpu.read_phases", unknown)
    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=100.0))
    assert (gpu.training.seconds, gpu.training.joules) == (None, None)
    assert gpu.training.mean_power == pytest.approx(200)  # of the last attempt, as its other means
    assert "recorded; phases of an earlier attempt are unknown" in "\n".join(cost_lines(gpu))


def test_the_phases_of_a_later_attempt_on_another_host_are_not_those_of_the_earlier_one(tmp_path):
    run = record_on_other_gpus(tmp_path / "run", uptime=-200.0, logged=False)
    earlier = [one for one in read_gpu(run, TrainingTotals()).phases if one.is_earlier]
    assert [(one.name, one.begin, one.end) for one in earlier] == [("ending", -120, -111)]


@pytest.mark.parametrize("final", [True, False])
def test_a_clock_that_is_set_back_by_a_day_changes_no_number(tmp_path, final):
    straight, back = record_run(tmp_path / "a", final=final), record_run(tmp_path / "b", back_at=40, final=final)
    for run in (straight, back):
        shift = DAY if run is back else 0.0
        for name, begin, end in PHASES:
            walls = [STARTED + time - (shift if time >= 40 else 0) for time in (begin, end)]
            line = {"phase": name, "attempt": 1, "begin": walls[0], "end": walls[1]}
            append_jsonl(run.phases, {**line, "begin_monotonic": 500 + begin, "end_monotonic": 500 + end})
    totals = TrainingTotals(tokens=1000, seconds=100.0)
    expected, numbers = (add_timeline(run, read_gpu(run, totals)) for run in (straight, back))
    assert gpu_object(numbers) == {**gpu_object(expected), "evidence": numbers.evidence}
    assert numbers.seconds == pytest.approx(100, abs=1)
    assert [point.seconds for point in numbers.timeline] == [point.seconds for point in expected.timeline]
    assert all(before.seconds < after.seconds for before, after in pairwise(numbers.timeline))
