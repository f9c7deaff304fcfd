"""The section on scaling: speed-up and efficiency next to the ideal."""

from __future__ import annotations

import pytest

from kmatrix.report.analysis import analyse
from kmatrix.report.page.parts.groups import page_groups
from kmatrix.report.page.scaling import scaling
from records_factory import FakeRun, make_matrix


def section_of(matrix):
    numbers = analyse(matrix)
    return scaling(numbers, page_groups(numbers))


def matrix_of(root, batch=None):
    train = {"global_batch": batch} if batch else {}
    speeds = {1: (1000.0, 1010.0), 2: (1900.0, 1920.0), 4: (3600.0, 3620.0)}
    runs = [
        FakeRun(gpus=gpus, seed=seed, axes={"seed": str(seed)}, tokens_per_s=speed, device="cuda", train=train)
        for gpus, each in speeds.items()
        for seed, speed in enumerate(each)
    ]
    return make_matrix(root, runs)


def test_efficiency_is_the_share_of_the_ideal_speed_up(tmp_path):
    section = section_of(matrix_of(tmp_path, batch=32))

    (family,) = section.families
    assert [size.devices for size in family.sizes] == [1, 2, 4]
    assert [size.speedup for size in family.sizes] == pytest.approx([1, 1910 / 1005, 3610 / 1005])
    assert [size.efficiency for size in family.sizes] == pytest.approx([1, 1910 / 1005 / 2, 3610 / 1005 / 4])
    assert (family.sizes[1].low, family.sizes[1].high, family.sizes[1].runs) == (1900.0, 1920.0, 2)
    assert section.device == "GPUs"
    assert section.batches == ""


def test_a_global_batch_that_grows_with_the_devices_is_named(tmp_path):
    section = section_of(matrix_of(tmp_path))

    assert [size.global_batch for size in section.families[0].sizes] == [8, 16, 32]
    assert "weak scaling" in section.batches


def test_no_section_with_one_number_of_devices(tmp_path):
    assert section_of(make_matrix(tmp_path, [FakeRun(gpus=2), FakeRun(gpus=2, optimizer="muon")])) is None
