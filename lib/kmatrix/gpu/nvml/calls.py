"""Fast NVML calls with preallocated buffers, for one GPU and for all GPUs in one batch.

nvidia-ml-py creates a ctypes array type per call of nvmlDeviceGetFieldValues, which costs ten times the call itself.
Only its loaded library and its handles are used here. Names and layouts: NVML API reference, nvml.h.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, truediv
from typing import Any

from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH

SUCCESS, UNINITIALIZED, NOT_SUPPORTED, OTHER_VERSION, NOT_FOUND_FUNCTION = 0, 1, 3, 25, 13  # nvmlReturn_t
DRIVER_NOT_LOADED = 9
# Codes after which a GPU has to be reopened: no driver, GPU is lost, reset required, GPU not found.
GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, 15, 16, 28})
MIB = 1 << 20
SM_CLOCK = 1  # nvmlClockType_t
MEMORY_V2 = struct.Struct("<I4xQQQQ")  # nvmlMemory_v2_t: version, total, reserved, free, used
FIELD = struct.Struct("<IIqqiiQ")  # nvmlFieldValue_t: id, scope, timestamp, latency, type, return, value
FIELD_TYPE, FIELD_VALUE = 24, 32  # offsets of the type and the value; the return code follows the type
FIELDS = {186: "power_instant", 185: "power", 83: "energy_j"}  # NVML_FI_DEV_POWER_INSTANT, _AVERAGE, _ENERGY
UNSIGNED_32 = 1  # nvmlValueType_t


@dataclass(frozen=True, slots=True)
class Number:
    """One number in the buffer of a call."""

    column: str
    offset: int  # bytes
    form: str  # format character of struct
    divisor: float  # converts the raw number to the unit of the column
    status: int | None = None  # of a field value: offset of its type (4 bytes) and return code (4 bytes)


class Call:
    """One call of the driver. `template`: initial content of its buffer, which is the last argument."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], template: bytes, *numbers: Number) -> None:
        self.function, self.arguments, self.template, self.numbers = function, arguments, template, numbers
        self._buffer = ctypes.create_string_buffer(template, len(template))
        self._pointer = ctypes.byref(self._buffer)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(number.column for number in self.numbers)

    def __call__(self, values: list[float], base: int) -> int:
        """Write the columns to `values` from `base` on. Return NVML's code, or a code in GONE of one of the fields."""
        code: int = self.function(*self.arguments, self._pointer)
        for number in self.numbers:
            own, form = self.status(number), self.kind(number)[1]
            known = code == SUCCESS and own == SUCCESS
            raw = struct.unpack_from(f"<{form}", self._buffer, number.offset)[0]
            values[base + COLUMN_INDEX[number.column]] = raw / number.divisor if known else UNKNOWN
            code = own if own in GONE else code
        return code

    def is_supported(self) -> bool:
        return self([UNKNOWN] * WIDTH, 0) not in (NOT_SUPPORTED, NOT_FOUND_FUNCTION, OTHER_VERSION)

    def status(self, number: Number) -> int:
        """Return the code of a field value at the last call, SUCCESS for any other number."""
        return SUCCESS if number.status is None else struct.unpack_from("<i", self._buffer, number.status + 4)[0]

    def kind(self, number: Number) -> tuple[int, str]:
        """Return the type of a field value at the last call, and its format character of struct."""
        if number.status is None:
            return 0, number.form
        # The driver chooses the type of each field. A 32-bit value fills only half of the union.
        kind = struct.unpack_from("<i", self._buffer, number.status)[0]
        return kind, "I" if kind == UNSIGNED_32 else number.form


def bind(library: Any, handle: Any) -> list[Call]:
    """Return the calls that read one GPU. Each candidate is tried once, and dropped if it is not supported."""

    def first(*calls: Call) -> list[Call]:
        return [call for call in calls if call.is_supported()][:1]

    def call(name: str, size: int, number: Number, *arguments: int, template: bytes = b"") -> Call:
        return Call(_function(library, name), (handle, *arguments), template.ljust(size, b"\0"), number)

    # Used memory as nvidia-smi shows it: version 2 excludes the memory that the driver reserves.
    second = MEMORY_V2.pack(MEMORY_V2.size | 2 << 24, 0, 0, 0, 0)
    versioned = struct.pack("<Iii", 12 | 1 << 24, 0, 0)  # nvmlTemperature_v1_t: version, sensor, degrees
    calls = [
        *first(call("nvmlDeviceGetUtilizationRates", 8, Number("utilization", 0, "I", 1.0))),
        *first(
            call("nvmlDeviceGetMemoryInfo_v2", len(second), Number("memory_used", 32, "Q", MIB), template=second),
            call("nvmlDeviceGetMemoryInfo", 24, Number("memory_used", 16, "Q", MIB)),
        ),
        *first(
            # Recent drivers deprecate the first function, older ones lack the second.
            call("nvmlDeviceGetTemperature", 4, Number("temperature", 0, "I", 1.0), 0),
            call("nvmlDeviceGetTemperatureV", 12, Number("temperature", 8, "i", 1.0), template=versioned),
        ),
        *first(call("nvmlDeviceGetClockInfo", 4, Number("sm_clock", 0, "I", 1.0), SM_CLOCK)),
    ]
    if fields := _fields(library, handle):
        calls.append(fields)
    known = fields.columns if fields else ()
    # Drivers without these fields have older functions of their own for average power and energy.
    if "power" not in known:
        calls += first(call("nvmlDeviceGetPowerUsage", 4, Number("power", 0, "I", 1000.0)))
    if "energy_j" not in known:
        calls += first(call("nvmlDeviceGetTotalEnergyConsumption", 8, Number("energy_j", 0, "Q", 1000.0)))
    return calls


def _fields(library: Any, handle: Any) -> Call | None:
    """Return one call for average power, instant power and energy, as far as the driver supports them."""
    trial = _field_call(library, handle, list(FIELDS))
    if trial([UNKNOWN] * WIDTH, 0) != SUCCESS:
        return None
    known = [field for field, number in zip(FIELDS, trial.numbers, strict=True) if trial.status(number) == SUCCESS]
    if not known:
        return None
    call = _field_call(library, handle, known)
    call([UNKNOWN] * WIDTH, 0)  # fills in the type of each field
    return call


def _field_call(library: Any, handle: Any, fields: Sequence[int]) -> Call:
    template = b"".join(FIELD.pack(field, 0, 0, 0, 0, 0, 0) for field in fields)
    numbers = [
        Number(FIELDS[field], at * FIELD.size + FIELD_VALUE, "Q", 1000.0, status=at * FIELD.size + FIELD_TYPE)
        for at, field in enumerate(fields)
    ]
    function = _function(library, "nvmlDeviceGetFieldValues")
    return Call(function, (handle, len(fields)), template, *numbers)


def _function(library: Any, name: str) -> Any:
    """Return a function of the driver library, or a stub that returns NOT_FOUND_FUNCTION."""
    return getattr(library, name, lambda *_arguments: NOT_FOUND_FUNCTION)


class CallBatch:
    """Reads all GPUs with one `struct.unpack` of one buffer, as long as every call answers as it did when it was bound.

    This takes a third of the time of reading call by call, which is most of the cost of a recorder at 100 Hz.
    """

    def __init__(self, gpus: Sequence[Sequence[Call] | None]) -> None:
        """Bind the calls of each GPU; None: the GPU is lost and all its values are unknown."""
        calls = [(gpu * WIDTH, call) for gpu, bound in enumerate(gpus) for call in bound or ()]
        self._buffer = ctypes.create_string_buffer(1 + sum(_aligned_size(call) for _, call in calls))
        self._calls: list[Callable[[], int]] = []
        forms: list[tuple[int, str]] = []  # offset and format character of each number to unpack
        kinds: dict[int, int] = {}  # index in `forms` of the type of a field value, expected type
        places: dict[int, tuple[int, float]] = {}  # index in `values` -> index in `forms`, divisor
        begin = 0
        for base, call in calls:
            struct.pack_into(f"{len(call.template)}s", self._buffer, begin, call.template)
            self._calls.append(partial(call.function, *call.arguments, ctypes.byref(self._buffer, begin)))
            for number in call.numbers:
                form = number.form
                if number.status is not None:
                    kind, form = call.kind(number)
                    kinds[len(forms)] = kind
                    # Type and return code as one number: a single comparison in `read` covers both.
                    forms.append((begin + number.status, "Q"))  # includes the return code that follows, which must be 0
                places[base + COLUMN_INDEX[number.column]] = len(forms), number.divisor
                forms.append((begin + number.offset, form))
            begin += _aligned_size(call)
        self._unpack = struct.Struct(_layout(forms)).unpack_from
        unknown, zero = len(forms), len(forms) + 1  # the two constants that `read` appends
        # `read` unpacks all numbers, appends NaN and 0, and picks one for each value: unknown columns pick the NaN.
        wanted = [places.get(value, (unknown, 1.0)) for value in range(WIDTH * len(gpus))]
        self._pick, self._units = itemgetter(*[place for place, _ in wanted]), [unit for _, unit in wanted]
        # Two zeros first: itemgetter returns a tuple only for at least two items.
        self._kinds, self._expected = itemgetter(zero, zero, *kinds), (0, 0, *kinds.values())

    def read(self, values: list[float]) -> bool:
        """Read all values. Return False, with `values` unchanged, if a call failed or returned another type."""
        if any([call() for call in self._calls]):  # noqa: C419 (no short circuit: every call has to be made)
            return False
        numbers = (*self._unpack(self._buffer), UNKNOWN, 0)
        if self._kinds(numbers) != self._expected:
            return False
        values[:] = map(truediv, self._pick(numbers), self._units)
        return True


def _aligned_size(call: Call) -> int:
    """Return the size of a call's buffer in bytes, rounded up to a multiple of 8."""
    return -(-len(call.template) // 8) * 8


def _layout(forms: Sequence[tuple[int, str]]) -> str:
    """Return the struct format for numbers at these ascending offsets."""
    text, at = "<", 0
    for offset, form in forms:
        text += f"{offset - at}x{form}"
        at = offset + struct.calcsize(f"<{form}")
    return text
