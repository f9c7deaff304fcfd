"""Reading all GPUs at once gives the same values as call by call, and finds failing calls."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH, Device
from kmatrix.gpu.nvml.calls import FIELD, CallBatch, bind
from kmatrix.gpu.nvml.source import RETRY_READS, NvmlSource

LOST, NOT_SUPPORTED = 15, 3
UTILIZATION, MEMORY, TEMPERATURE, CLOCK, FIELDS = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetFieldValues",
)
MIB = 1 << 20


def fake_driver(gpus: list[dict], calls: list[str] | None = None) -> SimpleNamespace:
    """Return a fake driver of C functions. A handle is 1 + the index in `gpus`, which may change. calls: names."""
    library = SimpleNamespace(kept=[])

    def function(name: str, *more, write) -> None:
        def call(handle, *arguments):
            gpu = gpus[handle - 1]
            if calls is not None:
                calls.append(name)
            if code := gpu.get("codes", {}).get(name, 0):
                return code
            write(gpu, *arguments)
            return 0

        called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *more)(call)
        library.kept.append(called)
        setattr(library, name, called)

    def write_bytes(address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def fields(gpu: dict, count: int, address: int) -> None:
        for index in range(count):
            field_address = address + index * FIELD.size
            (field,) = struct.unpack("<I", ctypes.string_at(field_address, 4))
            value, kind = gpu[field]
            code = gpu.get("codes", {}).get(field, 0)
            write_bytes(field_address, FIELD.pack(field, 0, 7, 7, kind, code, value))

    pointer, number = ctypes.c_void_p, ctypes.c_uint
    function(UTILIZATION, pointer, write=lambda gpu, to: write_bytes(to, struct.pack("<II", gpu["utilization"], 9)))
    function(MEMORY, pointer, write=lambda gpu, to: write_bytes(to + 32, struct.pack("<Q", gpu["memory"])))
    function(
        TEMPERATURE, number, pointer, write=lambda gpu, _, to: write_bytes(to, struct.pack("<I", gpu["temperature"]))
    )
    function(CLOCK, number, pointer, write=lambda gpu, _, to: write_bytes(to, struct.pack("<I", gpu["clock"])))
    function(FIELDS, number, pointer, write=fields)
    return library


def gpu(**changes) -> dict:
    values = {"utilization": 95, "memory": 12_800 * MIB, "temperature": 60, "clock": 1695}
    return {**values, 186: (150_125, 1), 185: (140_000, 1), 83: (2**40, 3), **changes}


def source(library, count: int) -> NvmlSource:
    devices = [Device(gpu_index=index, gpu_name="A", uuid=f"GPU-{index}") for index in range(count)]
    return NvmlSource(SimpleNamespace(nvmlLib=library), devices, [ctypes.c_void_p(index + 1) for index in range(count)])


def read(opened: NvmlSource) -> list[list[float | None]]:
    """Return the values of each GPU, None if unknown."""
    values = [0.0] * (WIDTH * len(opened.devices))
    opened.read(values)
    readings = [None if math.isnan(value) else value for value in values]
    return [readings[index : index + WIDTH] for index in range(0, len(readings), WIDTH)]


WORDS = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(WORDS, st.integers(0, 2**60), WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=9))
@settings(max_examples=25, deadline=None)
def test_reading_all_fields_at_once_equals_reading_them_one_by_one(rows):
    names = ("utilization", "memory", "temperature", "clock")
    gpus = [gpu(**dict(zip(names, row, strict=False))) for row in rows]
    for gpu_state, row in zip(gpus, rows, strict=True):
        gpu_state[185], gpu_state[186] = (row[4], 1), (row[5], 1)
    library = fake_driver(gpus)
    calls = [bind(library, ctypes.c_void_p(index + 1)) for index in range(len(gpus))]
    at_once, one_by_one = ([UNKNOWN] * (WIDTH * len(gpus)) for _ in range(2))
    assert CallBatch(calls).read(at_once)
    for index, calls_of_gpu in enumerate(calls):
        for call in calls_of_gpu:
            assert call(one_by_one, index * WIDTH) == 0
    assert at_once == one_by_one
    assert at_once[COLUMN_INDEX["memory_used"]] == rows[0][1] / MIB
    assert at_once[COLUMN_INDEX["power_instant"]] == rows[0][5] / 1000


def test_each_value_is_in_its_column_and_unit():
    ((values),) = read(source(fake_driver([gpu()]), 1))
    columns = {name: values[index] for name, index in COLUMN_INDEX.items()}
    assert columns["energy_j"] == 2**40 / 1000
    del columns["energy_j"]
    assert columns == {
        "utilization": 95,
        "memory_used": 12_800,
        "power": 140,
        "power_instant": 150.125,
        "temperature": 60,
        "sm_clock": 1695,
    }


def test_an_unsupported_value_is_unknown_and_not_read_again():
    calls: list[str] = []
    gpus = [gpu(codes={CLOCK: NOT_SUPPORTED, 186: NOT_SUPPORTED}), gpu()]
    opened = source(fake_driver(gpus, calls), 2)
    calls.clear()
    first, second = read(opened)
    assert [first[COLUMN_INDEX[name]] for name in ("sm_clock", "power_instant", "power")] == [None, None, 140]
    assert second[COLUMN_INDEX["sm_clock"]] == 1695
    assert sorted(calls) == sorted([UTILIZATION, MEMORY, TEMPERATURE, FIELDS] * 2 + [CLOCK])


@pytest.mark.parametrize("failing", [TEMPERATURE, 185])
def test_a_call_that_fails_temporarily_costs_only_its_own_value(failing):
    calls: list[str] = []
    gpus = [gpu(), gpu()]
    opened = source(fake_driver(gpus, calls), 2)
    gpus[1]["codes"] = {failing: 999}
    name = "temperature" if failing == TEMPERATURE else "power"
    for _ in range(3):
        first, second = read(opened)
        assert None not in first
        assert [column for column, index in COLUMN_INDEX.items() if second[index] is None] == [name]
    gpus[1]["codes"] = {}
    for _ in range(RETRY_READS):
        read(opened)
    calls.clear()
    assert None not in read(opened)[1]
    assert len(calls) == 10  # each call once: all at once again


@pytest.mark.parametrize("failing", [UTILIZATION, FIELDS, 83])
def test_a_lost_gpu_is_unknown_and_the_others_are_read_at_once(failing):
    calls: list[str] = []
    gpus = [gpu(), gpu(), gpu()]
    opened = source(fake_driver(gpus, calls), 3)
    gpus[1]["codes"] = {failing: LOST}
    for _ in range(2):
        assert [None in values for values in read(opened)] == [False, True, False]
    assert [opened.is_lost(index) for index in range(3)] == [False, True, False]
    calls.clear()
    assert set(read(opened)[1]) == {None}
    assert len(calls) == 10
