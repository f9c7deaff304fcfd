"""Means, balance and energy per token are of the training; peaks and energy of the whole run; a sum has all parts."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import msgspec
import pytest

from gpu_factory import STARTED, FakeGpus, record, summary_of, write_samples, write_timings
from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
from kmatrix.records import attempts
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.measure import NOTHING_RECORDED, gpu_of
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.results import Gpu

DAY = 86_400.0
PHASES = (("set-up", 0.0, 20.0), ("evaluation", 50.0, 60.0))
TWO = {"memory": (1000.0, 2000.0), "power": (150.0, 150.0), "utilization": (95.0, 95.0)}


def power_at(second):
    return 50.0 if second < 20 else 200.0 if 50 <= second < 60 else 100.0


def memory_at(second, gpu):
    return 100.0 if second < 20 else 400.0 + gpu * 20 + second % 7


def is_training(second, end=90):
    return 20 <= second < end and not 50 <= second < 60


def record_run(
    path,
    *,
    gpus=2,
    seconds=100,
    begin=0.0,
    clock=0.0,
    pauses=(),
    counter=True,
    back_at=math.inf,
    name="gpu_samples.bin",
):
    """Record GPUs at 1 Hz for some seconds. begin: of the recording (s).  clock: s by which this host is ahead.

    pauses: seconds before each of which 4 s are not recorded. back_at: second in which the clock is set back by a day.
    """
    run = RunDir(path)
    run.path.mkdir(parents=True, exist_ok=True)
    header = [{"gpu_index": gpu, "gpu_name": "A", "uuid": f"GPU-{gpu}", "rank": gpu} for gpu in range(gpus)]
    file = SampleFile(run.path / name, {"gpus": header, "hz": 1, "device_type": "nvidia", "simulated": False})
    joules = 0.0
    for second in range(seconds):
        if not any(0 < pause - second <= 4 for pause in pauses):
            values = []
            for gpu in range(gpus):
                known = {"memory_used": memory_at(second, gpu), "power": power_at(second)}
                known |= {"energy_j": joules} if counter else {}
                values += [known.get(column, math.nan) for column in COLUMNS]
            shift = begin + clock + second
            file.append(STARTED + shift - (DAY if second >= back_at else 0), 500.0 + shift, values)
        joules += power_at(second)
    file.close()
    return run


def log_phase(run, name, begin, end, *, attempt=1, shift=0.0):
    walls = {"begin": STARTED + shift + begin, "end": STARTED + shift + end}
    monotonic = {"begin_monotonic": 500 + shift + begin, "end_monotonic": 500 + shift + end}
    append_jsonl(run.phases, {"phase": name, "step": 0, "attempt": attempt, **walls, **monotonic})


def log_attempt(run, *phases, attempt=1, shift=0.0, end=None, last=None):
    """Log phases of an attempt. end: of its training, with an ending.  last: its last training line, without one."""
    for phase in (*phases, *(() if end is None else [("ending", end, end + 1)])):
        log_phase(run, *phase, attempt=attempt, shift=shift)
    if last is not None:
        line = {"step": 1, "time": STARTED + shift + last, "attempt": attempt, "train/loss": 1.0}
        append_jsonl(run.metrics, line)


def measured(run, **totals) -> Gpu:
    found = gpu_of(run, **{"tokens": 1000, **totals})
    assert found is not None
    return found


# ---- the training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter", [True, False])
def test_means_are_of_the_training_and_peaks_and_energy_of_the_whole_run(tmp_path, counter):
    run = record_run(tmp_path / "run", counter=counter)
    log_attempt(run, *PHASES, end=90)
    gpu = measured(run)
    expected = [[memory_at(second, index) for second in range(100) if is_training(second)] for index in (0, 1)]
    for device, values in zip(gpu.gpus, expected, strict=True):
        assert device.main["memory_used"].mean == pytest.approx(statistics.fmean(values))
        assert device.training["memory_used"].deviation == pytest.approx(statistics.pstdev(values))
        assert device.training["memory_used"].count == 60  # the sample in which the training ends is not one of it
    assert gpu.training.memory_used_mean == pytest.approx(sum(map(statistics.fmean, expected)))
    assert gpu.whole.memory_used_mean < gpu.training.memory_used_mean
    assert gpu.memory_used_max == max(memory_at(second, 0) + memory_at(second, 1) for second in range(100))
    # 2 GPUs, without a counter by trapezoids: 75 W and 150 W at the four edges.
    edges = 0 if counter else 2 * (25 + 50 - 50)
    whole = 2 * (20 * 50 + 69 * 100 + 10 * 200) + edges
    training = 2 * 60 * 100 + (0 if counter else 2 * 50)
    assert (gpu.whole.joules, gpu.training.joules) == pytest.approx((whole, training))
    assert (gpu.whole.joules_per_token, gpu.training.joules_per_token) == pytest.approx((whole / 1e3, training / 1e3))
    assert (gpu.training.seconds, gpu.training.mean_power) == (60, 200)
    means = [statistics.fmean(values) for values in expected]
    assert gpu.training.balance["memory_used"].cv == pytest.approx(
        100 * statistics.pstdev(means) / statistics.fmean(means)
    )
    assert gpu.phases == {"set-up": 20, "evaluation": 10, "ending": 1}


def test_only_the_time_from_first_to_last_step_of_each_attempt_is_training(tmp_path):
    run = record_run(tmp_path / "run", pauses=(30, 60, 75))
    # Killed after its step at 22 s; killed in its set-up; killed after 69 s; finished.
    log_attempt(run, ("set-up", 5, 10), attempt=1, last=22)
    log_attempt(run, ("set-up", 66, 68), attempt=3, last=69)
    log_attempt(run, ("set-up", 80, 85), attempt=4, end=95)
    gpu = measured(run)
    trained = [(10, 22), (68, 69), (85, 95)]
    assert gpu.training.seconds == sum(end - begin for begin, end in trained)
    assert gpu.training.joules == pytest.approx(
        sum(2 * power_at(second) for begin, end in trained for second in range(begin, end))
    )
    assert gpu.gpus[0].training["memory_used"].count == 23
    assert gpu.notes == ()


def test_a_running_attempt_trains_until_now(tmp_path):
    run = record_run(tmp_path / "run")
    log_attempt(run, *PHASES, last=70)
    assert measured(run, running=True).training.seconds == 69  # 20 to 50 and 60 to 99
    assert measured(run).training.seconds == 40  # killed: what follows the last line is not training


def test_without_phases_the_training_is_unknown(tmp_path):
    gpu = measured(record_run(tmp_path / "run"))
    assert (gpu.training, gpu.phases) == (None, {})
    assert gpu.whole.joules_per_token is not None


def test_a_clock_that_is_set_back_changes_no_number(tmp_path):
    straight, back = record_run(tmp_path / "a"), record_run(tmp_path / "b", back_at=40)
    log_attempt(straight, *PHASES, end=90)
    for line in straight.phases.read_text().splitlines():
        known = json.loads(line)
        shifted = {name: known[name] - (DAY if known[name] >= STARTED + 40 else 0) for name in ("begin", "end")}
        append_jsonl(back.phases, {**known, **shifted})
    expected, gpu = (msgspec.to_builtins(measured(run)) for run in (straight, back))
    assert {**gpu, "evidence": ""} == {**expected, "evidence": ""}


# ---- coverage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "known"), [(100, True), (87, True), (70, False)])
def test_energy_per_token_needs_nine_tenths_of_the_training(tmp_path, seconds, known):
    """The recorder was killed before the training ended at 90 s."""
    run = record_run(tmp_path / "run", seconds=seconds)
    log_attempt(run, *PHASES, end=90)
    gpu = measured(run)
    assert (gpu.training.joules_per_token is not None) is known
    assert gpu.whole.joules is not None
    assert gpu.notes == (() if known else ("J/token of the training unknown: 39.0s of 1m00s were recorded",))


def test_a_recording_that_covers_too_little_of_a_run_without_phases_has_no_energy_per_token(tmp_path):
    run = RunDir(tmp_path)
    record(run, FakeGpus())
    assert measured(run, seconds=62.0).whole.joules_per_token == pytest.approx(4 * 59 * 150 / 1000)
    partial = measured(run, seconds=120.0)
    assert (partial.whole.joules_per_token, partial.whole.joules) == (None, pytest.approx(4 * 59 * 150))
    assert "J/token of the recording unknown: 59.0s of 2m00s were recorded" in partial.notes


@pytest.mark.parametrize(("seconds", "joules"), [((0,), None), ((3, 2, 1), None), ((0, 10, 9, 8, 7), 1000.0)])
def test_a_recording_without_time_has_no_energy(tmp_path, seconds, joules):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    rows = [{"timestamp": f"2025-01-02T03:04:{second:02}", "power": 100.0} for second in seconds]
    run.gpu_stats.write_text(json.dumps(rows))
    gpu = measured(run)
    assert (gpu.samples, gpu.whole.joules) == (len(seconds), joules)
    assert not any("energy is unknown" in note for note in gpu.notes)


# ---- attempts on other devices, and nodes ------------------------------------------------------------------------


def test_an_attempt_on_other_gpus_is_in_time_and_energy_and_memory_is_of_the_last_one(tmp_path):
    run = record_run(tmp_path / "run", gpus=3, seconds=90, name="gpu_samples.1.bin")
    record_run(run.path, begin=200.0)
    log_attempt(run, *PHASES, attempt=1, last=80)
    log_attempt(run, *PHASES, attempt=2, shift=200.0, end=90)
    gpu = measured(run)
    assert (len(gpu.gpus), gpu.samples) == (2, 190)
    assert gpu.whole.seconds == 89 + 99
    assert (gpu.training.seconds, gpu.training.joules) == (50 + 60, pytest.approx(3 * 50 * 100 + 2 * 60 * 100))
    assert gpu.training.mean_power == 2 * 100
    assert gpu.gpus[0].main["memory_used"].mean == pytest.approx(
        statistics.fmean(memory_at(second, 0) for second in range(100) if is_training(second))
    )
    (note,) = gpu.notes
    assert note.startswith("an earlier attempt was recorded on 3 GPUs (A), 89 s in gpu_samples.1.bin: in time")


def test_simulated_and_real_gpus_are_never_combined(tmp_path):
    run = RunDir(tmp_path)
    record(run, FakeGpus())
    alone = measured(run)
    earlier = FakeGpus(name="NVIDIA A10G (simulated)")
    snapshots = [replace(snapshot, time=snapshot.time - 100) for snapshot in earlier.snapshots()]
    write_samples(run.path / "gpu_samples.1.bin", earlier, snapshots)
    both = measured(run)
    assert (both.simulated, both.whole.joules, both.samples) == (False, alone.whole.joules, alone.samples)
    assert both.notes[-1].endswith("not included in these numbers")
    assert len(recordings_of(run)[0].samples) == 60  # nor in the energy of loss curves, nor in a graph


def record_nodes(tmp_path, *, silent=False):
    run = record_run(tmp_path / "run")
    log_attempt(run, *PHASES, end=90)
    write_json(attempts.path_of(run.path, 1), {"number": 1, "host": "n1", "nodes": 2})
    write_json(run.path / "nodes" / "1.json", {"host": "n2", "attempt": 1})
    if not silent:
        record_run(run.path / "nodes" / "1", clock=DAY)  # its clock is a day ahead
        log_attempt(run.later_nodes()[1], *PHASES, shift=DAY, end=90)
    return run


def test_nodes_are_summed_by_their_own_clocks(tmp_path):
    gpu = measured(record_nodes(tmp_path))
    alone = record_run(tmp_path / "alone")
    log_attempt(alone, *PHASES, end=90)
    one = measured(alone)
    assert [device.label for device in gpu.gpus] == ["GPU 0 on n1", "GPU 1 on n1", "GPU 0 on n2", "GPU 1 on n2"]
    for name in ("joules", "memory_used_mean", "mean_power", "joules_per_token"):
        assert getattr(gpu.whole, name) == pytest.approx(2 * getattr(one.whole, name))
        assert getattr(gpu.training, name) == pytest.approx(2 * getattr(one.training, name))
    assert (gpu.training.seconds, gpu.memory_used_max) == (60, None)
    assert gpu.training.balance["memory_used"].cv == pytest.approx(one.training.balance["memory_used"].cv)


def test_a_node_whose_attempt_was_killed_trained_until_its_recording_ends(tmp_path):
    run = record_nodes(tmp_path, silent=True)
    node = RunDir(run.path / "nodes" / "1")
    record_run(node.path, seconds=50, name="gpu_samples.1.bin")
    record_run(node.path, begin=200.0)
    log_attempt(node, ("set-up", 0, 20), attempt=1)
    log_attempt(node, *PHASES, attempt=2, shift=200.0, end=90)
    gpu = measured(run)
    assert gpu.training.joules == pytest.approx(2 * 100 * 60 + 2 * 100 * (29 + 60))


def test_a_node_without_a_recording_makes_sums_unknown_and_is_named(tmp_path):
    gpu = measured(record_nodes(tmp_path, silent=True))
    assert (gpu.whole.joules, gpu.whole.memory_used_mean, gpu.training.joules) == (None, None, None)
    assert gpu.notes == ("nothing recorded on n2",)


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter", [True, False])
def test_a_lost_gpu_adds_no_zeros_and_its_energy_and_power_are_unknown(tmp_path, counter):
    run = RunDir(tmp_path)
    record(run, FakeGpus(lost={1: 20}, counter=counter))
    gpu = measured(run)
    device = gpu.gpus[1]
    assert (device.whole["memory_used"].count, device.lost_at, device.lost_s) == (20, STARTED + 20, 40.0)
    assert device.main["memory_used"].mean == pytest.approx(12_750)
    assert (device.main.get("power"), device.joules) == (None, None)
    assert (gpu.whole.joules, gpu.whole.mean_power, gpu.whole.balance.get("power")) == (None, None, None)
    assert gpu.notes == ("GPU 1 was lost at 2026-11-20 05:23:40 UTC: its numbers end there",)


def test_a_gpu_that_was_lost_at_the_very_end_is_lost_by_the_word_of_the_recorder(tmp_path):
    run, gpus = RunDir(tmp_path), FakeGpus()  # it ended before a sample could show the loss
    (first, second, *rest) = summary_of(gpus, list(gpus.snapshots()))["gpus"]
    record(run, gpus, summary={"gpus": [first, {**second, "lost_at": STARTED + 59}, *rest]})
    device = measured(run).gpus[1]
    assert (device.lost_at, device.main.get("power")) == (STARTED + 59, None)


def test_ranks_on_the_cpu_have_no_capacity_and_share_the_memory_of_their_host(tmp_path):
    gpus = FakeGpus(memory=(812.0, 820.0), power=(None, None), utilization=(99.0, 98.0), device_type="cpu")
    record(RunDir(tmp_path), gpus)
    gpu = measured(RunDir(tmp_path))
    assert [device.label for device in gpu.gpus] == ["rank 0", "rank 1"]
    assert (gpu.unit, gpu.memory_total, gpu.whole.joules, gpu.notes) == ("rank", 24_576.0, None, ())


@pytest.mark.parametrize(
    ("memory", "quality"),
    [
        ((95.01, 104.99), "Excellent"),
        ((95.0, 105.0), "Good"),  # a bound belongs to the class above it
        ((90.0, 110.0), "Fair"),
        ((80.0, 120.0), "Poor"),
        ((50.0,), None),
        ((0.0, 0.0), None),
    ],
)
def test_classes_of_the_balance(tmp_path, memory, quality):
    count = len(memory)
    gpus = FakeGpus(memory=memory, power=(1.0,) * count, utilization=(1.0,) * count, spread=0.0)
    record(RunDir(tmp_path), gpus)
    found = measured(RunDir(tmp_path)).whole.balance.get("memory_used")
    assert (found and found.quality) == quality


@pytest.mark.parametrize(("slow", "hidden"), [(130.0, True), (104.0, False)])
def test_a_straggler_that_an_excellent_cv_hides_is_named(tmp_path, slow, hidden):
    record(RunDir(tmp_path), FakeGpus())
    write_timings(RunDir(tmp_path), [100.0, 100.0, 100.0, slow], step_ms=1.05 * slow)
    ranks = measured(RunDir(tmp_path)).ranks
    assert (ranks.hidden, ranks.slowest_rank) == (hidden, 3)


def test_xid_errors_are_counted_by_gpu_and_code(tmp_path):
    def xid(second, index, code, count=1):
        text = f"NVIDIA A10G (GPU-{index}): XID {code}"
        known = {"event": "xid", "gpu_index": index, "text": text, "xid": code, "xid_count": count}
        append_jsonl(RunDir(tmp_path).gpu_events, {"time": 1_794_000_000 + second, **known})

    for event in ((0, 2, 31, 3), (9, 2, 79), (60, 2, 31), (61, 7, 48)):
        xid(*event)
    record(RunDir(tmp_path), FakeGpus())
    gpu = measured(RunDir(tmp_path))
    assert gpu.notes == (
        "NVIDIA A10G (GPU-2): XID 31: memory page fault: an illegal address in a kernel, or a defect (4 times); "
        "XID 79: the GPU has fallen off the bus",
        "NVIDIA A10G (GPU-7): XID 48: uncorrectable memory error",
    )


# ---- what is missing ---------------------------------------------------------------------------------------------


def test_what_only_the_recorder_knows_is_taken_from_its_summary_and_numbers_are_not(tmp_path):
    run, gpus = RunDir(tmp_path), FakeGpus()
    record(run, gpus)
    half = summary_of(gpus, list(gpus.snapshots())[:30])
    half["gpus"][1] |= {"throttled_s": {"heat (hardware)": 3.0}, "ecc_uncorrected": 2}
    half["gpus"][1]["foreign"] = [{"pid": 7, "name": "python", "memory_mib": 512.0}]
    write_json(run.gpu_summary, {**half, "samples": 30, "final": False, "warnings": ["the disk was slow"]})
    gpu = measured(run)
    assert (gpu.samples, gpu.whole.joules) == (60, pytest.approx(4 * 59 * 150))
    assert gpu.notes == (
        "the disk was slow",
        "GPU 1 was throttled: heat (hardware) 3.0s",
        "GPU 1 had 2 uncorrected memory errors: do not trust its results",
        "GPU 1 was shared with python (pid 7)",
    )


def test_without_samples_the_text_is_read_and_without_both_nothing_was_recorded(tmp_path):
    run = RunDir(tmp_path)
    record(run, FakeGpus())
    expected = measured(run)
    run.gpu_samples.unlink()
    gpu = measured(run)
    assert gpu.whole.balance == expected.whole.balance
    assert [one.main["memory_used"] for one in gpu.gpus] == [one.main["memory_used"] for one in expected.gpus]
    for path in (run.gpu_stats, run.gpu_stats_multi):
        path.unlink()
    assert gpu_of(run) is None


def test_an_unreadable_recording_is_a_note_and_the_text_is_read(tmp_path):
    run = RunDir(tmp_path / "run")
    record(run, FakeGpus())
    run.gpu_samples.write_bytes(b"garbage")
    gpu = measured(run)
    assert gpu.notes == ("gpu_samples.bin is not a GPU recording: it does not begin with KMXGPU3",)
    assert gpu.evidence == "run/gpu_stats_run_multi_gpu.json"
    for path in (run.gpu_summary, run.gpu_stats, run.gpu_stats_multi):
        path.unlink()
    assert (measured(run).gpus, measured(run).notes) == ((), gpu.notes)


def test_the_reason_why_nothing_was_recorded_is_told(tmp_path):
    run = RunDir(tmp_path)
    assert gpu_of(run) is None
    reason = "no GPU and no rank found: nothing is recorded; the NVIDIA driver does not respond: Unknown Error"
    append_jsonl(run.gpu_events, {"time": 1.0, "event": NOTHING_RECORDED, "gpu_index": None, "text": reason})
    assert gpu_of(run).notes == (reason,)
