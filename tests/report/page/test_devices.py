"""The section on devices: one run per configuration, what went wrong anywhere, and recordings thinned for the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_factory import FakeGpus, record, write_phases, write_samples
from kmatrix.report.analysis import analyse
from kmatrix.report.gpu.phases import read_phases
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.devices import devices
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


def record_earlier(folder, gpus, *, ago=200.0):
    """Write the recording of an attempt on other GPUs that began `ago` seconds before the last one."""
    snapshots = [replace(one, time=one.time - ago) for one in gpus.snapshots()]
    write_samples(folder.path / "gpu_samples.1.bin", gpus, snapshots)


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
