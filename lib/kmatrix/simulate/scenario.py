"""Parse and validate a scenario of simulated GPUs, and translate it to the table that table.c reads.

The language is described in docs/gputop.md. Errors name file, line and cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from kmatrix.errors import ConfigError, reason_of

BEFORE = -1e18  # s: start of the default values
MIN_WORDS = 4  # of an event: T GPU FIELD VALUE
MAX_GPUS = 64  # as in play.h
ONCE = ("energy", "all", "xid", "process")  # fields that a loop does not repeat
GROUPS = ("nvlink", "switch", "numa")  # settings with groups of GPUs: NVLink, PCIe switch, NUMA node
TEXTS = {"name": "NVIDIA A10G", "driver": "580.00.00"}
ERRORS = {  # nvmlReturn_t
    "invalid": 2,
    "not_supported": 3,
    "no_permission": 4,
    "no_driver": 9,
    "timeout": 10,
    "lost": 15,
    "reset_required": 16,
    "version_mismatch": 18,
    "no_data": 21,
    "unknown": 999,
}
THROTTLES = {  # nvmlClocksEventReasons
    "none": 0,
    "idle": 0x1,
    "clocks_setting": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "display": 0x100,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of one field of one GPU."""

    line: int  # of the scenario
    time: float  # s of the scenario
    gpu: int
    field: str
    value: float | None = None  # in the unit of the field, None: unchanged
    code: int = 0  # NVML error that the field returns from now on, 0: none
    pid: int = 0  # if field is "process": the process that uses `value` MiB from now on


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A validated scenario, in the units of the language."""

    path: Path
    gpus: int  # number of GPUs
    settings: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    periods: Mapping[str, float] = field(default_factory=dict)  # field -> ms between two changes
    events: tuple[Event, ...] = ()  # ordered by time
    groups: Mapping[str, tuple[frozenset[int], ...]] = field(default_factory=dict)  # nvlink, switch, numa -> GPUs

    def table(self) -> str:
        """Return the text that table.c reads."""
        settings = {name: setting.default for name, setting in SETTINGS.items()} | dict(self.settings)
        lines = [f"gpus {self.gpus}"]
        lines += [
            f"{setting.word} {settings[name] * setting.scale!r}" for name, setting in SETTINGS.items() if setting.word
        ]
        lines += [f"{name} {self.texts.get(name, default)}" for name, default in TEXTS.items()]
        lines += [f"period {name} {self.periods.get(name, settings['period_ms']) / 1000!r}" for name in QUANTITIES]
        for gpu in range(self.gpus):
            lines.append(self._place(gpu))
            lines += _device(gpu, [event for event in self.events if event.gpu == gpu])
        return "\n".join([*lines, "end", ""])

    def _place(self, gpu: int) -> str:
        """Return the topology line of a GPU: NUMA node, PCIe switch (-1: none shared), NVLink peers."""

        def group(name: str, alone: int) -> int:
            return next((at for at, gpus in enumerate(self.groups.get(name, ())) if gpu in gpus), alone)

        bridged = set().union(*(gpus for gpus in self.groups.get("nvlink", ()) if gpu in gpus)) - {gpu}
        return f"place {gpu} {group('numa', 0)} {group('switch', -1)} {sum(1 << peer for peer in bridged):x}"


def parse(path: Path, gpus: int | None = None) -> Scenario:
    """Parse a scenario.

    `gpus`: the number of GPUs; None: from the line `gpus N`, else the highest GPU in use plus one.
    Raises ConfigError for an unreadable file or an invalid line.
    """
    reader = _ScenarioReader(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the scenario {path}", why=reason_of(error)) from error
    for number, line in enumerate(text.splitlines(), 1):
        reader.read(number, line.partition("#")[0].split())
    return reader.scenario(gpus)


class _ScenarioReader:
    """The parsed lines of one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._line, self._words = path, 0, [""]
        self._gpus: int | None = None
        self._settings: dict[str, float] = {}
        self._texts: dict[str, str] = {}
        self._periods: dict[str, float] = {}
        self._groups: dict[str, tuple[frozenset[int], ...]] = {}
        self._events: list[Event] = []
        self._everywhere: list[Callable[[int, float], Event]] = []  # `*`: expanded at the end, for all GPUs
        self._lines: dict[str, int] = {}  # setting -> line

    def read(self, number: int, words: list[str]) -> None:
        """Parse one line, without its comment."""
        if not words:
            return
        self._line, self._words = number, words
        if words[0][0].isdigit() or words[0][0] in "+-.":
            self._event(words)
        else:
            self._setting(words[0], words[1:])

    def scenario(self, gpus: int | None) -> Scenario:
        """Return the validated scenario."""
        named = max((event.gpu + 1 for event in self._events), default=1)
        count = gpus if gpus is not None else self._gpus if self._gpus is not None else named
        if not 0 <= count <= MAX_GPUS:
            raise ConfigError(
                f"invalid number of simulated GPUs: {count}", why=f"expected 0 to {MAX_GPUS}", hint="use fewer GPUs"
            )
        events = [*self._events, *(event for make in self._everywhere for event in _each(make, range(count)))]
        # Of two events at the same time, the later line wins.
        events.sort(key=lambda event: (event.time, event.line))
        loop = self._settings.get("loop", 0.0)
        for event in events:
            self._check(event, count, loop)
        for name, groups in self._groups.items():
            if (highest := max(max(group) for group in groups)) >= count:
                why = f"GPU {highest} does not exist, the scenario has {count} GPUs"
                self._refuse(why, "use a lower index", self._lines[name])
        for gpu in range(count):
            self._check_memory([event for event in events if event.gpu == gpu])
        return Scenario(
            path=self._path,
            gpus=count,
            settings=self._settings,
            texts=self._texts,
            periods=self._periods,
            events=tuple(events),
            groups=self._groups,
        )

    def _check(self, event: Event, count: int, loop: float) -> None:
        """Reject an event that would never happen."""
        if event.gpu >= count:
            self._refuse(
                f"GPU {event.gpu} does not exist, the scenario has {count} GPUs", "use a lower index", event.line
            )
        if loop and event.time >= loop and event.field not in ONCE:
            why = f"second {event.time:g} is never reached: the loop restarts after {loop:g} s"
            self._refuse(why, "use an earlier second, or a longer loop", event.line)

    def _check_memory(self, events: Iterable[Event]) -> None:
        """Reject memory in use beyond the total memory."""
        now = {name: QUANTITIES[name].default for name in ("mem", "memtotal")}
        changes = [event for event in events if event.field in now and event.value is not None]
        # Events of the same second apply together: `mem` may be listed before the `memtotal` that allows it.
        for time, group in groupby(changes, key=lambda event: event.time):
            for event in group:
                now[event.field] = event.value or 0.0
            if now["mem"] > now["memtotal"]:
                why = f"{now['mem']:g} MiB in use exceed {now['memtotal']:g} MiB in total at second {time:g}"
                self._refuse(why, "set mem below memtotal", event.line)

    def _setting(self, name: str, words: list[str]) -> None:
        if name == "period_ms" and len(words) == 2:
            self._first(f"period_ms {self._known(words[0], QUANTITIES, 'field')}")
            self._periods[words[0]] = self._number(words[1], SETTINGS["period_ms"].range)
            return
        # All other settings have one line each.
        self._known(name, ["gpus", *SETTINGS, *TEXTS, *GROUPS], "setting")
        self._first(name)
        if name in TEXTS:
            self._text(name, " ".join(words))
        elif name in GROUPS:
            self._groups[name] = tuple(self._group(word) for word in words)
            if not words:
                self._refuse(f"{name} has no GPUs", f"write `{name} 0-1 2-3`, one group per word")
        elif len(words) != 1:
            self._refuse(f"{name} takes one value", f"write `{name} VALUE`")
        elif name == "gpus":
            self._gpus = int(self._number(words[0], Range(0, MAX_GPUS, whole=True)))
        elif name == "init":
            self._settings[name] = self._error(words[0])
        else:
            self._settings[name] = self._number(words[0], SETTINGS[name].range)

    def _text(self, name: str, text: str) -> None:
        # 51: with the suffix " (simulated)" and the final NUL, a name fits the 64 bytes of play.h.
        if not text or len(text) > 51 or not text.isascii() or not text.isprintable():
            self._refuse(f"{name} must have 1 to 51 ASCII characters", f"shorten the {name}")
        self._texts[name] = text

    def _group(self, word: str) -> frozenset[int]:
        """Return the GPUs of `0,2` or `0-3`."""
        limit, found = Range(0, MAX_GPUS - 1, whole=True), set()
        for part in word.split(","):
            first, dash, last = part.partition("-")
            low = int(self._number(first, limit))
            found |= set(range(low, int(self._number(last, limit)) + 1)) if dash else {low}
        if not found:
            self._refuse(f"{word} contains no GPU", "write `A-B` with A below B")
        return frozenset(found)

    def _event(self, words: list[str]) -> None:
        if len(words) < MIN_WORDS:
            self._refuse("an event has at least four words", "write `T GPU FIELD VALUE`, e.g. `5 0 power 280`")
        time, name, rest = self._number(words[0], Range(0, 1e9)), words[2], words[3:]
        self._known(name, [*QUANTITIES, "process"], "field")
        if len(rest) != (2 if name == "process" else 1):
            form = "process PID MIB" if name == "process" else f"{name} VALUE"
            self._refuse(f"{name} takes {'two values' if name == 'process' else 'one value'}", f"write `T GPU {form}`")
        # A..B: the value changes from GPU to GPU. An error has no values in between.
        first, dots, last = rest[-1].partition("..")
        value, code, pid = self._change(name, [*rest[:-1], first])
        end = self._change(name, [*rest[:-1], last])[0] if dots else value
        if dots and (value is None or end is None):
            self._refuse(f"{rest[-1]} is not a range of values", "write `A..B`, two numbers")
        line = self._line

        def make(gpu: int, fraction: float) -> Event:
            own = value if value is None or end is None else value + (end - value) * fraction
            return Event(line=line, time=time, gpu=gpu, field=name, value=own, code=code, pid=pid)

        if words[1] == "*":  # the number of GPUs may follow in a later line
            self._everywhere.append(make)
            return
        limit = Range(0, MAX_GPUS - 1, whole=True)
        self._events += _each(make, [int(self._number(index, limit)) for index in words[1].split(",")])

    def _change(self, name: str, words: list[str]) -> tuple[float | None, int, int]:
        """Return the value, error code and pid of the words after a field."""
        if name == "process":
            return (
                self._number(words[1], Range(0, 1e9)),
                0,
                int(self._number(words[0], Range(1, 2**31 - 1, whole=True))),
            )
        if words[0].startswith("!"):
            return None, self._error(words[0]), 0
        if words[0] == "ok":
            return None, 0, 0
        if not QUANTITIES[name].numeric:
            self._refuse(f"{name} does not take a value", f"write `{name} !lost`, another error, or `{name} ok`")
        if name == "throttle" and not words[0][0].isdigit():
            bits = [THROTTLES[self._known(word, THROTTLES, "reason")] for word in words[0].split("+")]
            return float(sum(set(bits))), 0, 0
        return self._number(words[0], QUANTITIES[name].range), 0, 0

    def _first(self, name: str) -> None:
        if name in self._lines:
            self._refuse(f"{name} is already set in line {self._lines[name]}", "remove one of them")
        self._lines[name] = self._line

    def _known(self, word: str, words: Iterable[str], kind: str) -> str:
        if word not in words:
            self._refuse(f"unknown {kind} {word}", f"use one of {', '.join(words)}")
        return word

    def _error(self, word: str) -> int:
        code = ERRORS.get(word[1:]) if word.startswith("!") else None
        if code is None and word[1:].isdecimal() and word.startswith("!") and 0 < int(word[1:]) < 1000:
            code = int(word[1:])
        if code is None:
            known = ", ".join(f"!{name}" for name in ERRORS)
            self._refuse(f"unknown driver error {word}", f"use one of {known}, or ! and an error number")
        return code

    def _number(self, word: str, limit: Range) -> float:
        try:
            number = float(int(word, 0)) if word.lower().startswith("0x") else float(word)
        except ValueError:
            self._refuse(f"{word} is not a number", "write a number")
        if not math.isfinite(number) or not limit.low <= number <= limit.high or (limit.whole and number % 1):
            kind = "an integer" if limit.whole else "a number"
            self._refuse(f"{word} is not {kind} from {limit.low:g} to {limit.high:g}", "use a value in this range")
        return number

    def _refuse(self, why: str, hint: str, line: int | None = None) -> NoReturn:
        where = self._line if line is None else line
        text = f" {' '.join(self._words)!r}" if line is None else ""
        raise ConfigError(f"{self._path}:{where}:{text} is not valid", why=why, hint=hint)


def _each(make: Callable[[int, float], Event], gpus: Sequence[int]) -> list[Event]:
    """Return one event per GPU. Its fraction within the list is 0 for the first GPU and 1 for the last."""
    return [make(gpu, at / max(1, len(gpus) - 1)) for at, gpu in enumerate(gpus)]


def _device(gpu: int, events: Iterable[Event]) -> list[str]:
    """Return the lines of the table for one GPU."""
    events = list(events)
    lines = []
    for name, quantity in QUANTITIES.items():
        value, knots = quantity.default, {BEFORE: (quantity.default, quantity.code)}
        for event in (event for event in events if event.field == name):
            # Values of energy go to the counter lines below: here, it can only start or stop to fail.
            if name != "energy" and event.value is not None:
                value = event.value
            knots[event.time] = (value, event.code)
        lines += [f"knot {gpu} {name} {time!r} {value!r} {code}" for time, (value, code) in knots.items()]
    counters = {BEFORE: 0.0} | {e.time: e.value for e in events if e.field == "energy" and e.value is not None}
    lines += [f"counter {gpu} {time!r} {joules!r}" for time, joules in counters.items()]
    return lines + [f"process {gpu} {e.time!r} {e.pid} {e.value!r}" for e in events if e.field == "process"]


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of allowed values, bounds included."""

    low: float
    high: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Quantity:
    """One field of a GPU."""

    default: float
    range: Range
    numeric: bool = True  # it can be set to a number; otherwise only to an error or `ok`
    code: int = 0  # NVML error until it is set, 0: none


@dataclass(frozen=True, slots=True)
class ScenarioSetting:
    """A numeric setting of the whole scenario."""

    default: float
    range: Range
    word: str  # name in the table of table.c, empty if it has no line of its own
    scale: float = 1.0  # factor to the unit of the table


PERCENT = Range(0, 100)
COUNT = Range(0, 2**32 - 1, whole=True)


# Order of enum Field in play.h. Units: util, memutil, fan, smact, tensor, dram: %; mem, memtotal: MiB;
# power, limit: W; temp, memtemp: C; smclk: MHz; pcie_tx, pcie_rx, nvlink_tx, nvlink_rx: KB/s; energy: J.
# average and instant can only fail: their values come from power.
QUANTITIES = {
    "util": Quantity(95, PERCENT),
    "memutil": Quantity(60, PERCENT),
    "mem": Quantity(12800, Range(0, 1e9)),
    "memtotal": Quantity(23028, Range(1, 1e9)),
    "power": Quantity(150, Range(0, 1e5)),
    "average": Quantity(0, Range(0, 0), numeric=False),
    "instant": Quantity(0, Range(0, 0), numeric=False),
    "limit": Quantity(300, Range(0, 1e5)),
    "temp": Quantity(60, Range(0, 200)),
    "smclk": Quantity(1710, Range(0, 1e5)),
    "fan": Quantity(40, PERCENT),
    "throttle": Quantity(0, COUNT),
    "pcie_tx": Quantity(20000, COUNT),
    "pcie_rx": Quantity(10000, COUNT),
    "ecc_u": Quantity(0, COUNT),
    "smact": Quantity(0, PERCENT, code=3),  # GPM metrics: not supported unless set, as before Hopper
    "tensor": Quantity(0, PERCENT, code=3),
    "dram": Quantity(0, PERCENT, code=3),
    "memtemp": Quantity(0, Range(0, 200), code=3),  # not supported unless set: of memory next to the GPU (HBM)
    "nvlink_tx": Quantity(0, COUNT, code=3),  # not supported unless set, as without NVLink
    "nvlink_rx": Quantity(0, COUNT, code=3),
    "xid": Quantity(0, Range(0, 1000, whole=True)),
    "energy": Quantity(0, Range(0, 1e12)),
    "all": Quantity(0, Range(0, 0), numeric=False),
}


SETTINGS = {
    "loop": ScenarioSetting(0, Range(0.001, 1e9), "loop"),
    "period_ms": ScenarioSetting(100, Range(0.1, 1e6), "", 1e-3),
    "window_ms": ScenarioSetting(1000, Range(0, 1e6), "window", 1e-3),
    "instant_ms": ScenarioSetting(0, Range(0, 1e6), "instant", 1e-3),
    "call_us": ScenarioSetting(0, Range(0, 1e6), "call", 1e-6),
    "speed": ScenarioSetting(1, Range(0.001, 1e6), "speed"),
    "freeze": ScenarioSetting(-1, Range(0, 1e9), "freeze"),
    "init": ScenarioSetting(0, Range(0, 999), "init"),
}
