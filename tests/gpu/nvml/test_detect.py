"""Detect GPUs and apply the limits of the user."""

import re
import sys

import pynvml
import pytest

from fake_nvml import FakeNvml
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml.detect import Detected, Gpu, detect, usable

A10G = ("NVIDIA A10G", "GPU-aaaa1111-0000", 23028)
FOUR_GPUS = [("NVIDIA A10G", f"GPU-{letter * 4}1111-0000", 23028) for letter in "abcd"]


@pytest.fixture
def driver(monkeypatch):
    def install(gpus, **options):
        fake = FakeNvml(gpus, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture
def four_gpus(driver):
    driver(FOUR_GPUS)
    return detect()


def test_a_gpu_is_described_by_index_name_uuid_and_memory_in_mib(driver):
    fake = driver([A10G])
    assert detect().gpus == (Gpu(index=0, name="NVIDIA A10G", uuid="GPU-aaaa1111-0000", memory_total=23028),)
    assert not fake.is_open


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_no_gpu_is_found_and_no_error_raised(driver, code):
    driver([], init=code)
    assert detect() == Detected()


def test_a_driver_library_mismatch_gives_no_gpu_and_a_note(driver):
    driver([], init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert detect().gpus == ()
    assert "version mismatch" in detect().notes[0].lower()


def test_a_lost_gpu_is_excluded_with_a_note_and_the_others_keep_their_index(driver):
    driver([FOUR_GPUS[0], pynvml.NVML_ERROR_GPU_IS_LOST, FOUR_GPUS[2]])
    found = detect()
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert found.notes[0].startswith("GPU 1 is ignored")


def test_a_gpu_in_mig_mode_is_excluded_with_a_note(driver):
    driver(FOUR_GPUS, mig=(1,))
    found = detect()
    assert [gpu.index for gpu in found.gpus] == [0, 2, 3]
    assert "MIG" in found.notes[0]


@pytest.mark.parametrize(
    ("visible", "requested", "indices"),
    [
        (None, None, [0, 1, 2, 3]),
        (None, "0,2", [0, 2]),
        (None, "2, 0", [2, 0]),
        ("3,1", None, [3, 1]),
        ("0,1", "1", [1]),
        ("", None, []),
        ("0,-1,2", None, [0]),
        ("-1", None, []),
        ("GPU-bbbb", "", [1]),
        ("GPU-bbbb1111-0000,GPU-d", "GPU-d", [3]),
        (None, "", [0, 1, 2, 3]),
    ],
)
def test_the_environment_and_the_command_line_limit_the_gpus(four_gpus, visible, requested, indices):
    assert [gpu.index for gpu in usable(four_gpus, visible=visible, asked=requested)] == indices


@pytest.mark.parametrize(
    ("visible", "requested", "message"),
    [
        (None, "7", r"GPUS names 7.*\n.*0 \(NVIDIA A10G, GPU-aaaa"),
        ("0,1", "3", r"GPUS names 3"),
        ("0,9", None, r"CUDA_VISIBLE_DEVICES names 9"),
        (None, "GPU-zzzz", r"GPUS names GPU-zzzz"),
        (None, "GPU-", r"4 GPUs match this prefix"),
        (None, "1,1", r"names GPU 1 twice"),
        (None, "0,", r"GPUS names nothing"),
        ("MIG-aaaa", None, r"MIG instances are not supported"),
        ("", "0", r"no usable GPU"),
    ],
)
def test_an_unavailable_gpu_is_refused_with_the_available_ones(four_gpus, visible, requested, message):
    with pytest.raises(LaunchError) as raised:
        usable(four_gpus, visible=visible, asked=requested)
    assert re.search(message, str(raised.value))


def test_without_gpus_the_environment_is_ignored_but_a_request_is_refused():
    assert usable(Detected(), visible="0", asked=None) == ()
    with pytest.raises(LaunchError, match="DEVICE=cpu"):
        usable(Detected(), visible=None, asked="0")
