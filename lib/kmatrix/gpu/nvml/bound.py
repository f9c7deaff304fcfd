"""The calls that read one GPU fast, and all of them at once: bound with the memory that they fill.

The client library's own functions make a new array type for each call of field values, which costs ten times
the call; here only its loaded library and its handles are used.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, truediv
from typing import Any

from kmatrix.gpu.source import AT, UNKNOWN, WIDTH

SUCCESS, UNINITIALIZED, NOT_SUPPORTED, OTHER_VERSION, NOT_FOUND_FUNCTION = 0, 1, 3, 25, 13
GONE = frozenset(
    {UNINITIALIZED, 15, 16, 28}
)  # uninitialized, lost, needs a reset, not found: the GPU answers nothing any more
MIB = 1 << 20
SM_CLOCK = 1
MEMORY_V2 = struct.Struct("<I4xQQQQ")  # nvmlMemory_v2_t: version, total, reserved, free, used
FIELD = struct.Struct("<IIqqiiQ")  # nvmlFieldValue_t: id, scope, timestamp, latency, type, return, value
FIELD_TYPE, FIELD_VALUE = 24, 32  # where the type and the value lie in it; behind the type lies the return
FIELDS = {186: "power_instant", 185: "power", 83: "energy_j"}  # NVML's ids: POWER_INSTANT, POWER_AVERAGE, ENERGY
UNSIGNED_32 = 1  # nvmlValueType_t


@dataclass(frozen=True, slots=True)
class Number:
    """One number in what a call fills in. form: struct's letter.  per: what makes one of the column's unit.

    status: where, for a field value, its type (4 bytes) and its own return code (4 bytes) lie.
    """

    column: str
    offset: int
    form: str
    per: float
    status: int | None = None


class Call:
    """One call of the driver. template: what its memory holds before; it is the last argument."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], template: bytes, *numbers: Number) -> None:
        self.function, self.arguments, self.template, self.numbers = function, arguments, template, numbers
        self._buffer = ctypes.create_string_buffer(template, len(template))
        self._where = ctypes.byref(self._buffer)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(number.column for number in self.numbers)

    def __call__(self, values: list[float], base: int) -> int:
        """Fill in the columns from `base` on; return NVML's code, or a field's own that says that the GPU is gone."""
        code: int = self.function(*self.arguments, self._where)
        for number in self.numbers:
            own, form = self.status(number), self.kind(number)[1]
            known = code == SUCCESS and own == SUCCESS
            raw = struct.unpack_from(f"<{form}", self._buffer, number.offset)[0]
            values[base + AT[number.column]] = raw / number.per if known else UNKNOWN
            code = own if own in GONE else code
        return code

    def works(self) -> bool:
        return self([UNKNOWN] * WIDTH, 0) not in (NOT_SUPPORTED, NOT_FOUND_FUNCTION, OTHER_VERSION)

    def status(self, number: Number) -> int:
        """Return the code that a field value had at the last call; of another number SUCCESS."""
        return SUCCESS if number.status is None else struct.unpack_from("<i", self._buffer, number.status + 4)[0]

    def kind(self, number: Number) -> tuple[int, str]:
        """Return the type that a field value had at the last call, and struct's letter for it."""
        if number.status is None:
            return 0, number.form
        kind = struct.unpack_from("<i", self._buffer, number.status)[0]
        return kind, "I" if kind == UNSIGNED_32 else number.form


def bind(library: Any, handle: Any) -> list[Call]:
    """Return the calls that read one GPU. Each is tried out once: what is not supported is not asked again."""

    def first(*calls: Call) -> list[Call]:
        return [call for call in calls if call.works()][:1]

    def call(name: str, size: int, number: Number, *arguments: int, template: bytes = b"") -> Call:
        return Call(_function(library, name), (handle, *arguments), template.ljust(size, b"\0"), number)

    # Used memory as nvidia-smi shows it (without what the driver reserves), where the driver tells them apart.
    second = MEMORY_V2.pack(MEMORY_V2.size | 2 << 24, 0, 0, 0, 0)
    versioned = struct.pack("<Iii", 12 | 1 << 24, 0, 0)  # nvmlTemperature_v1_t: version, sensor, degrees
    calls = [
        *first(call("nvmlDeviceGetUtilizationRates", 8, Number("utilization", 0, "I", 1.0))),
        *first(
            call("nvmlDeviceGetMemoryInfo_v2", len(second), Number("memory_used", 32, "Q", MIB), template=second),
            call("nvmlDeviceGetMemoryInfo", 24, Number("memory_used", 16, "Q", MIB)),
        ),
        *first(
            call("nvmlDeviceGetTemperature", 4, Number("temperature", 0, "I", 1.0), 0),
            call("nvmlDeviceGetTemperatureV", 12, Number("temperature", 8, "i", 1.0), template=versioned),
        ),
        *first(call("nvmlDeviceGetClockInfo", 4, Number("sm_clock", 0, "I", 1.0), SM_CLOCK)),
    ]
    if fields := _fields(library, handle):
        calls.append(fields)
    known = fields.columns if fields else ()
    if "power" not in known:
        calls += first(call("nvmlDeviceGetPowerUsage", 4, Number("power", 0, "I", 1000.0)))
    if "energy_j" not in known:
        calls += first(call("nvmlDeviceGetTotalEnergyConsumption", 8, Number("energy_j", 0, "Q", 1000.0)))
    return calls


def _fields(library: Any, handle: Any) -> Call | None:
    """Return the one call for average and instant power and the energy counter: of those that the driver knows."""
    trial = _field_call(library, handle, list(FIELDS))
    if trial([UNKNOWN] * WIDTH, 0) != SUCCESS:
        return None
    known = [field for field, number in zip(FIELDS, trial.numbers, strict=True) if trial.status(number) == SUCCESS]
    if not known:
        return None
    call = _field_call(library, handle, known)
    call([UNKNOWN] * WIDTH, 0)  # so that the type of each field is known
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
    """Return a function of the driver's library, or one that answers that it is not there."""
    return getattr(library, name, lambda *_arguments: NOT_FOUND_FUNCTION)


class Batch:
    """Reads all GPUs with one look at one piece of memory, as long as every call answers as it did when it was bound.

    It takes a third of the time of reading call by call, which 100 times a second is most of what a recorder costs.
    """

    def __init__(self, gpus: Sequence[Sequence[Call] | None]) -> None:
        """gpus: the calls of each; None: it is lost, and nothing is known of it."""
        calls = [(gpu * WIDTH, call) for gpu, own in enumerate(gpus) for call in own or ()]
        self._buffer = ctypes.create_string_buffer(1 + sum(_room(call) for _, call in calls))
        self._calls: list[Callable[[], int]] = []
        forms: list[tuple[int, str]] = []  # where each number lies that is looked at, and its letter
        kinds: dict[int, int] = {}  # of field values: which of those numbers is its type, and what that must be
        places: dict[int, tuple[int, float]] = {}  # of values: which of those numbers it is, and its unit
        begin = 0
        for base, call in calls:
            struct.pack_into(f"{len(call.template)}s", self._buffer, begin, call.template)
            self._calls.append(partial(call.function, *call.arguments, ctypes.byref(self._buffer, begin)))
            for number in call.numbers:
                form = number.form
                if number.status is not None:
                    kind, form = call.kind(number)
                    kinds[len(forms)] = kind
                    forms.append((begin + number.status, "Q"))  # with the return code behind it, which must be 0
                places[base + AT[number.column]] = len(forms), number.per
                forms.append((begin + number.offset, form))
            begin += _room(call)
        self._unpack = struct.Struct(_layout(forms)).unpack_from
        nothing, zero = len(forms), len(forms) + 1  # of what stands behind the numbers
        wanted = [places.get(value, (nothing, 1.0)) for value in range(WIDTH * len(gpus))]
        self._pick, self._units = itemgetter(*[place for place, _ in wanted]), [unit for _, unit in wanted]
        self._kinds, self._expected = itemgetter(zero, zero, *kinds), (0, 0, *kinds.values())

    def read(self, values: list[float]) -> bool:
        """Fill in everything, or nothing: False when a call failed, or gave a value of another type."""
        if any([call() for call in self._calls]):  # noqa: C419 (every call is made)
            return False
        numbers = (*self._unpack(self._buffer), UNKNOWN, 0)
        if self._kinds(numbers) != self._expected:
            return False
        values[:] = map(truediv, self._pick(numbers), self._units)
        return True


def _room(call: Call) -> int:
    """Return the bytes of a call's memory, filled up so that the next one's begins at a multiple of 8."""
    return -(-len(call.template) // 8) * 8


def _layout(forms: Sequence[tuple[int, str]]) -> str:
    """Return struct's format for numbers at these places, which ascend."""
    text, at = "<", 0
    for offset, form in forms:
        text += f"{offset - at}x{form}"
        at = offset + struct.calcsize(f"<{form}")
    return text
