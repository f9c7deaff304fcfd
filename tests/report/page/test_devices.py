"""The section on devices: one run per configuration, what went wrong anywhere, and recordings thinned for the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_factory import FakeGpus, record, summary_of, write_phases, write_samples, write_timings
from kmatrix.report.analysis import analyse
from kmatrix.report.gpu.phases import read_phases
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.devices import MOST_TIMELINES, MOST_VALUES, device_colour, devices
from kmatrix.report.page.parts.groups import page_groups
from records_factory import FakeRun, make_matrix, runs_with_seeds


def section_of(matrix):
    numbers = analyse(matrix)
    return devices(numbers, page_groups(numbers))


@pytest.fixture
def matrix(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.28, 3.29, 3.30), optimizer="muon", gpus=4, device="cuda"),
        *runs_with_seeds(3, (3.31, 3.32, 3.33), optimizer="adamw", gpus=4, device="cuda"),
    ]
    return make_matrix(tmp_path, runs)


def test_a_run_of_each_configuration_is_shown_with_its_numbers(matrix):
    for folder in matrix.runs():
        record(folder, FakeGpus(counter=True))
        write_phases(folder, ("set-up", 0, 10), ("evaluation", 30, 33))

    section = section_of(matrix)

    assert [row.run for row in section.rows] == ["gpt2_muon_seed1_4gpu", "gpt2_adamw_seed1_4gpu"]
    row = section.rows[0]
    assert row.peak == 12_825.0 + 45
    assert row.share == pytest.approx((12_825.0 + 45) / 24_576)
    assert row.utilization == (95.0, 95.0)
    assert row.power == pytest.approx(600.0)
    assert row.quality == "excellent"
    assert [bar.tip.partition(":")[0] for bar in row.bars] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert [(span.phase, span.seconds) for span in row.phases] == [
        ("training", 28.0),
        ("set-up", 10.0),
        ("evaluation", 3.0),
        ("ending", 19.0),
    ]
    assert row.training_share == pytest.approx(28 / 60, abs=1e-3)
    assert not section.simulated


def test_a_lost_gpu_is_shown_whatever_run_it_was_in(matrix):
    for folder in matrix.runs():
        record(folder, FakeGpus(lost={1: 20} if "muon_seed3" in folder.name else None))

    section = section_of(matrix)

    assert [row.run for row in section.rows][2:] == ["gpt2_muon_seed3_4gpu"]
    assert section.rows[2].problems[0].startswith("GPU 1 was lost at 2026-")
    assert section.script["runs"][2]["d"][1]["u"][0][-1] is None
    assert section.script["runs"][2]["d"][0]["u"][0][-1] == 95


def test_only_a_lost_gpu_is_marked_over_time(matrix):
    for folder in matrix.runs():
        record(folder, FakeGpus(lost={1: 20} if "muon_seed1" in folder.name else None))

    (lost, whole) = section_of(matrix).script["runs"]

    assert [device.get("x") for device in lost["d"]] == [None, 1, None, None]
    assert not any("x" in device for device in whole["d"])


def test_a_rank_that_ended_before_the_recording_is_not_lost(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(gpus=2)])
    (folder,) = matrix.runs()
    gpus = FakeGpus(memory=(800.0, 790.0), power=(None, None), device_type="cpu", lost={0: 50, 1: 50})
    gone = [{**device, "lost_at": None} for device in summary_of(gpus, list(gpus.snapshots()))["gpus"]]
    record(folder, gpus, summary={"gpus": gone})  # as the recorder of a run that ended normally

    (run,) = section_of(matrix).script["runs"]

    assert run["d"][0]["u"][0][-1] is None
    assert not any("x" in device for device in run["d"])


def record_earlier(folder, gpus, *, ago=200.0):
    """Write the recording of an attempt on other GPUs that began `ago` seconds before the last one."""
    snapshots = [replace(one, time=one.time - ago) for one in gpus.snapshots()]
    write_samples(folder.path / "gpu_samples.1.bin", gpus, snapshots)


def test_the_set_up_of_an_attempt_on_other_gpus_is_not_training(matrix):
    folder = matrix.runs()[0]
    record(folder, FakeGpus())
    record_earlier(folder, FakeGpus(memory=(900.0,), power=(100.0,)))
    write_phases(folder, ("set-up", -200, -150), ("set-up", 0, 30))

    section = section_of(matrix)
    (row,) = section.rows

    spans = {span.phase: span.seconds for span in row.phases}
    assert spans["set-up"] == pytest.approx(80, abs=1)
    assert spans["training"] == pytest.approx(119 - 80 - spans["ending"], abs=1)
    assert next(phase[:3] for phase in section.script["runs"][0]["ph"]) == ["set-up", 0.0, 50.0]


def test_no_time_is_called_training_if_the_phases_of_an_attempt_are_unknown(matrix, monkeypatch):
    folder = matrix.runs()[0]
    record(folder, FakeGpus())
    record_earlier(folder, FakeGpus(memory=(900.0,), power=(100.0,)))
    write_phases(folder, ("set-up", 0, 30))
    known = read_phases
    monkeypatch.setattr(
        "kmatrix.report.gpu.read_gpu.read_phases",
        lambda *args, is_last=True, **names: known(*args, **names) if is_last else (),
    )

    (row,) = section_of(matrix).rows

    assert row.phases == ()


def test_throttling_and_memory_errors_are_named(matrix):
    folder = matrix.runs()[0]
    one = {"gpu_index": 0, "gpu_name": "NVIDIA A10G", "samples": 5, "throttled_s": {"thermal": 12.0}}
    record(folder, FakeGpus(), summary={"gpus": [{**one, "ecc_uncorrected": 2}]})

    (row,) = section_of(matrix).rows

    assert [problem.partition(":")[0] for problem in row.problems] == [
        "GPU 0 was throttled",
        "GPU 0 had 2 uncorrected memory errors",
    ]


def test_waiting_ranks_are_shown_for_the_run_that_has_them(matrix):
    for folder in matrix.runs():
        record(folder, FakeGpus())
        write_timings(folder, (100.0, 100.0, 100.0, 140.0 if "adamw_seed2" in folder.name else 100.0))

    section = section_of(matrix)

    assert section.has_ranks
    assert [row.run for row in section.rows][2:] == ["gpt2_adamw_seed2_4gpu"]
    assert section.rows[2].ranks.slowest == 3


def test_simulated_gpus_are_marked(matrix):
    record(matrix.runs()[0], FakeGpus(name="NVIDIA A10G (simulated)"))

    section = section_of(matrix)

    assert section.simulated
    assert section.script["runs"][0]["simulated"]


def test_ranks_on_the_cpu_have_no_capacity(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(gpus=2)])
    gpus = FakeGpus(memory=(800.0, 810.0), power=(None, None), utilization=(780.0, 770.0), device_type="cpu")
    record(matrix.runs()[0], gpus)

    section = section_of(matrix)

    assert section.is_cpu
    assert (section.has_capacity, section.unit, section.has_power) == (False, "MiB", False)
    assert [device["l"] for device in section.script["runs"][0]["d"]] == ["rank 0", "rank 1"]


def test_each_gpu_is_compared_with_its_own_capacity(tmp_path):
    runs = [FakeRun(optimizer=name, gpus=2, device="cuda") for name in ("adamw", "muon")]
    matrix = make_matrix(tmp_path, runs)
    large = FakeGpus(memory=(40_000.0, 40_000.0), total=81_559.0)
    for folder, gpus in zip(matrix.runs(), (FakeGpus(memory=(24_300.0, 24_000.0)), large), strict=True):
        record(folder, gpus)

    section = section_of(matrix)
    shares = {row.run.split("_")[1]: (row.share, row.capacities) for row in section.rows}

    assert shares["adamw"][0] == pytest.approx(24_345 / 24_576)
    assert shares["muon"][0] == pytest.approx(40_045 / 81_559)
    assert shares["adamw"][1][0].at == pytest.approx(96 * 24_576 / 81_559, abs=0.01)
    assert [(mark.at, mark.first, mark.end) for mark in shares["muon"][1]] == [(96.0, 0, 2)]
    assert (section.capacity, section.has_capacity) == (None, True)
    assert "red line: capacity of each GPU" in render_page(analyse(matrix))


def test_a_run_on_gpus_of_two_models_has_a_mark_per_model(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(gpus=3, device="cuda")])
    one = {"gpu_name": "NVIDIA A10G", "samples": 5}
    memory = {"mean": 900.0, "deviation": 0.0, "min": 900.0, "max": 900.0, "count": 5}
    totals = (1000.0, 1000.0, 2000.0)
    gpus = [{**one, "gpu_index": at, "memory_total": total, "memory_used": memory} for at, total in enumerate(totals)]
    record(matrix.runs()[0], FakeGpus(), summary={"gpus": gpus})

    (row,) = section_of(matrix).rows

    assert row.share == 0.9
    assert [(mark.at, mark.first, mark.end) for mark in row.capacities] == [(48.0, 0, 2), (96.0, 2, 3)]


def test_no_section_if_nothing_was_recorded(matrix):
    assert section_of(matrix) is None


def test_a_recording_that_cannot_be_read_leaves_the_table(matrix):
    first, *_ = matrix.runs()
    record(first, FakeGpus())
    first.gpu_samples.write_bytes(b"KMXGPU3\n" + bytes(300))

    section = section_of(matrix)

    assert section.rows[0].peak is not None
    assert section.unreadable == first.name
    assert section.single == ""
    assert section.script == {}
    assert section.static == ()


def test_as_many_recordings_as_the_page_has_room_for(tmp_path):
    count = MOST_TIMELINES + 2
    matrix = make_matrix(tmp_path, [FakeRun(axes={"lr": str(at)}, device="cuda") for at in range(count)])
    for folder in matrix.runs():
        record(folder, FakeGpus(samples=4, memory=(1000.0,), power=(100.0,), utilization=(90.0,)))

    section = section_of(matrix)

    assert len(section.script["runs"]) == MOST_TIMELINES
    assert section.no_room == ", ".join(row.run for row in section.rows[MOST_TIMELINES:])
    assert f"no room for the recordings of {section.no_room}" in render_page(analyse(matrix))


def test_a_recording_without_room_does_not_exclude_smaller_ones(tmp_path):
    runs = [FakeRun(axes={"lr": str(at)}, gpus=count, device="cuda") for at, count in enumerate((9, 64, 2))]
    matrix = make_matrix(tmp_path, runs)
    for folder, run in zip(matrix.runs(), runs, strict=True):
        gpus = FakeGpus(
            samples=200, memory=(1000.0,) * run.gpus, power=(100.0,) * run.gpus, utilization=(9.0,) * run.gpus
        )
        record(folder, gpus)

    section = section_of(matrix)

    assert [len(run["d"]) for run in section.script["runs"]] == [9, 2]
    assert section.no_room.endswith("_64gpu")


def test_a_single_sample_is_not_an_unreadable_recording(matrix):
    first, *_ = matrix.runs()
    record(first, FakeGpus(samples=1))

    section = section_of(matrix)

    assert (section.unreadable, section.single) == ("", first.name)
    page = render_page(analyse(matrix))
    assert f"a single sample was recorded in {first.name}" in page
    assert "cannot be read" not in page


def test_long_names_are_shortened_in_the_middle_and_stay_distinct(tmp_path):
    axes = {"a_rather_long_axis_name": "value_number_one"}
    runs = [FakeRun(axes={**axes, "weight_decay": f"0.{at}"}, device="cuda") for at in range(3)]
    matrix = make_matrix(tmp_path, runs)
    for folder in matrix.runs():
        record(folder, FakeGpus(samples=4))
        write_phases(folder, ("set-up", 0, 1))

    rows = section_of(matrix).rows

    assert len({row.short for row in rows}) == 3
    assert max(len(row.short) for row in rows) <= 40
    page = render_page(analyse(matrix))
    assert page.count(f'<span class="clip" title="{rows[0].run}">{rows[0].short}</span>') == 2


def test_recordings_of_many_gpus_are_fewer(matrix):
    gpus = FakeGpus(samples=200, memory=(1000.0,) * 32, power=(100.0,) * 32, utilization=(90.0,) * 32)
    for folder in matrix.runs():
        write_samples(folder.gpu_samples, gpus, list(gpus.snapshots()))

    section = section_of(matrix)

    values = [part for run in section.script["runs"] for device in run["d"] for key in "upm" for part in device[key]]
    assert len(section.script["runs"]) == 1
    assert sum(map(len, values)) <= MOST_VALUES
    assert section.static == ()  # 32 lines would hide each other


def test_phases_that_no_figure_can_separate_are_one(matrix):
    folder = matrix.runs()[0]
    record(folder, FakeGpus(samples=600))
    often = [("evaluation", at, at + 0.8) for at in range(100, 300)]
    write_phases(folder, ("set-up", 0, 10), *often, ("evaluation", 500, 510))

    (run,) = section_of(matrix).script["runs"]

    evaluations = [phase[1:] for phase in run["ph"] if phase[0] == "evaluation"]
    assert evaluations == [[100.0, 299.8], [500.0, 510.0]]


def test_the_static_figure_breaks_at_a_gap(matrix):
    folder = matrix.runs()[0]
    record(folder, FakeGpus(samples=100, lost={1: 50}))

    lane = section_of(matrix).static[0]

    assert lane.title == "utilization"
    ends = [float(points.split()[-1].partition(",")[0]) for _, points, _ in lane.lines]
    assert ends[0] > 790
    assert ends[1] < 410


def test_devices_with_equal_values_do_not_hide_each_other_without_scripts(matrix):
    record(matrix.runs()[0], FakeGpus(samples=40, power=(150.0,) * 3, memory=(900.0,) * 3, utilization=(50.0,) * 3))

    lane = section_of(matrix).static[1]

    assert (lane.title, lane.count) == ("power", 3)
    assert len({points for _, points, _ in lane.lines}) == 1
    assert [place for _, _, place in lane.lines] == [0, 1, 2]
    page = render_page(analyse(matrix))
    assert [f'stroke-dasharray="7 14" stroke-dashoffset="{offset}"' in page for offset in (0, -7, -14)] == [True] * 3


def test_devices_of_a_run_have_different_colours():
    assert len({device_colour(at, 4) for at in range(4)}) == 4
    assert len({device_colour(at, 8) for at in range(7)}) == 7
    assert device_colour(0, 1) == "r2"
