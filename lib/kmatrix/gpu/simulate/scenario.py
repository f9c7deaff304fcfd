"""A scenario, the text that says what simulated GPUs do -> a checked value -> the table that table.c reads.

The language is described in docs/simulated-gpus.md. Every mistake is refused with file, line and cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from kmatrix.errors import ConfigError
from kmatrix.gpu.simulate.words import ERRORS, GROUPS, MOST_GPUS, ONCE, QUANTITIES, SETTINGS, TEXTS, THROTTLES, Range

BEFORE = -1e18  # seconds: when the defaults begin
LEAST_WORDS = 4  # of an event: T GPU FIELD VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """From `time` on, in seconds of the scenario, one thing of one GPU changes. line: where it was asked for.

    value: in the unit of the field; None where it stays.  code: the NVML error that the field answers with, 0: none.
    pid: of the process that holds `value` MiB from now on, where field is "process".
    """

    line: int
    time: float
    gpu: int
    field: str
    value: float | None = None
    code: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What the GPUs of a simulation do. settings, periods: in the units of the language; events in order of time.

    groups: GPUs that belong together, by what holds them: nvlink, switch, numa.
    """

    path: Path
    gpus: int
    settings: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    periods: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    groups: Mapping[str, tuple[frozenset[int], ...]] = field(default_factory=dict)

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
        """Return the line that says where a GPU sits: its NUMA node, its switch (-1: of its own), and its links."""

        def group(name: str, alone: int) -> int:
            return next((at for at, gpus in enumerate(self.groups.get(name, ())) if gpu in gpus), alone)

        bridged = set().union(*(gpus for gpus in self.groups.get("nvlink", ()) if gpu in gpus)) - {gpu}
        return f"place {gpu} {group('numa', 0)} {group('switch', -1)} {sum(1 << peer for peer in bridged):x}"


def parse(path: Path, gpus: int | None = None) -> Scenario:
    """Read a scenario.

    gpus: how many GPUs there are; None: as many as the text says in its line `gpus N`, else as many as it names.
    Raises ConfigError for a file that cannot be read and for a line that says nothing or something impossible.
    """
    reader = _Reader(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this scenario cannot be read", why=str(error)) from error
    for number, line in enumerate(text.splitlines(), 1):
        reader.read(number, line.partition("#")[0].split())
    return reader.scenario(gpus)


class _Reader:
    """The lines of one file so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._line, self._words = path, 0, [""]
        self._gpus: int | None = None
        self._settings: dict[str, float] = {}
        self._texts: dict[str, str] = {}
        self._periods: dict[str, float] = {}
        self._groups: dict[str, tuple[frozenset[int], ...]] = {}
        self._events: list[Event] = []
        self._everywhere: list[Callable[[int, float], Event]] = []  # `*`: known only once the number of GPUs is
        self._lines: dict[str, int] = {}  # of each setting

    def read(self, number: int, words: list[str]) -> None:
        """Take one line, without its comment."""
        if not words:
            return
        self._line, self._words = number, words
        if words[0][0].isdigit() or words[0][0] in "+-.":
            self._event(words)
        else:
            self._setting(words[0], words[1:])

    def scenario(self, gpus: int | None) -> Scenario:
        """Return the whole, checked."""
        named = max((event.gpu + 1 for event in self._events), default=1)
        count = gpus if gpus is not None else self._gpus if self._gpus is not None else named
        if not 0 <= count <= MOST_GPUS:
            raise ConfigError(f"{count} simulated GPUs", why=f"there can be 0 to {MOST_GPUS}", fix="ask for fewer")
        events = [*self._events, *(event for make in self._everywhere for event in _each(make, range(count)))]
        events.sort(key=lambda event: (event.time, event.line))
        loop = self._settings.get("loop", 0.0)
        for event in events:
            self._check(event, count, loop)
        for name, groups in self._groups.items():
            if (highest := max(max(group) for group in groups)) >= count:
                why = f"there is no GPU {highest}: there are {count}"
                self._refuse(why, "name a GPU below that", self._lines[name])
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
        """Refuse what would never happen."""
        if event.gpu >= count:
            self._refuse(f"there is no GPU {event.gpu}: there are {count}", "name a GPU below that", event.line)
        if loop and event.time >= loop and event.field not in ONCE:
            why = f"second {event.time:g} never comes: everything begins anew after {loop:g} seconds (loop)"
            self._refuse(why, "name an earlier second, or a longer loop", event.line)

    def _check_memory(self, events: Iterable[Event]) -> None:
        """Refuse more memory in use than there is."""
        now = {name: QUANTITIES[name].default for name in ("mem", "memtotal")}
        changes = [event for event in events if event.field in now and event.value is not None]
        for time, group in groupby(changes, key=lambda event: event.time):
            for event in group:
                now[event.field] = event.value or 0.0
            if now["mem"] > now["memtotal"]:
                why = f"{now['mem']:g} MiB would be in use of {now['memtotal']:g} MiB at second {time:g}"
                self._refuse(why, "set mem and memtotal so that mem is the smaller one", event.line)

    def _setting(self, name: str, words: list[str]) -> None:
        if name == "period_ms" and len(words) == 2:
            self._first(f"period_ms {self._known(words[0], QUANTITIES, 'field')}")
            self._periods[words[0]] = self._number(words[1], SETTINGS["period_ms"].range)
            return
        self._known(name, ["gpus", *SETTINGS, *TEXTS, *GROUPS], "setting")
        self._first(name)
        if name in TEXTS:
            self._text(name, " ".join(words))
        elif name in GROUPS:
            self._groups[name] = tuple(self._group(word) for word in words)
            if not words:
                self._refuse(f"{name} names no GPUs", f"write `{name} 0-1 2-3`, each word a group")
        elif len(words) != 1:
            self._refuse(f"{name} takes one value", f"write `{name} VALUE`")
        elif name == "gpus":
            self._gpus = int(self._number(words[0], Range(0, MOST_GPUS, whole=True)))
        elif name == "init":
            self._settings[name] = self._error(words[0])
        else:
            self._settings[name] = self._number(words[0], SETTINGS[name].range)

    def _text(self, name: str, text: str) -> None:
        if not text or len(text) > 51 or not text.isascii() or not text.isprintable():
            self._refuse(f"a {name} has 1 to 51 ASCII characters", f"shorten the {name}")
        self._texts[name] = text

    def _group(self, word: str) -> frozenset[int]:
        """Return the GPUs of `0,2` or `0-3`."""
        limit, found = Range(0, MOST_GPUS - 1, whole=True), set()
        for part in word.split(","):
            first, dash, last = part.partition("-")
            low = int(self._number(first, limit))
            found |= set(range(low, int(self._number(last, limit)) + 1)) if dash else {low}
        if not found:
            self._refuse(f"{word} holds no GPU", "write `A-B` with A below B")
        return frozenset(found)

    def _event(self, words: list[str]) -> None:
        if len(words) < LEAST_WORDS:
            self._refuse("an event has four words or more", "write `T GPU FIELD VALUE`, e.g. `5 0 power 280`")
        time, name, rest = self._number(words[0], Range(0, 1e9)), words[2], words[3:]
        self._known(name, [*QUANTITIES, "process"], "field")
        if len(rest) != (2 if name == "process" else 1):
            form = "process PID MIB" if name == "process" else f"{name} VALUE"
            self._refuse(f"{name} takes {'two values' if name == 'process' else 'one value'}", f"write `T GPU {form}`")
        first, dots, last = rest[-1].partition("..")
        value, code, pid = self._change(name, [*rest[:-1], first])
        end = self._change(name, [*rest[:-1], last])[0] if dots else value
        if dots and (value is None or end is None):
            self._refuse(f"{rest[-1]} is no range of values", "write `A..B`, two numbers")
        line = self._line

        def make(gpu: int, place: float) -> Event:
            here = value if value is None or end is None else value + (end - value) * place
            return Event(line=line, time=time, gpu=gpu, field=name, value=here, code=code, pid=pid)

        if words[1] == "*":
            self._everywhere.append(make)
            return
        limit = Range(0, MOST_GPUS - 1, whole=True)
        self._events += _each(make, [int(self._number(index, limit)) for index in words[1].split(",")])

    def _change(self, name: str, words: list[str]) -> tuple[float | None, int, int]:
        """Return value, error code and pid of the words behind a field."""
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
            self._refuse(f"{name} has no value of its own", f"write `{name} !lost`, another error, or `{name} ok`")
        if name == "throttle" and not words[0][0].isdigit():
            bits = [THROTTLES[self._known(word, THROTTLES, "reason")] for word in words[0].split("+")]
            return float(sum(set(bits))), 0, 0
        return self._number(words[0], QUANTITIES[name].range), 0, 0

    def _first(self, name: str) -> None:
        if name in self._lines:
            self._refuse(f"{name} is set in line {self._lines[name]} already", "leave one of them")
        self._lines[name] = self._line

    def _known(self, word: str, words: Iterable[str], kind: str) -> str:
        if word not in words:
            self._refuse(f"{word} is no {kind}", f"a {kind} is one of {', '.join(words)}")
        return word

    def _error(self, word: str) -> int:
        code = ERRORS.get(word[1:]) if word.startswith("!") else None
        if code is None and word[1:].isdecimal() and word.startswith("!") and 0 < int(word[1:]) < 1000:
            code = int(word[1:])
        if code is None:
            known = ", ".join(f"!{name}" for name in ERRORS)
            self._refuse(f"{word} is no error of the driver", f"an error is one of {known}, or ! and its number")
        return code

    def _number(self, word: str, limit: Range) -> float:
        try:
            number = float(int(word, 0)) if word.lower().startswith("0x") else float(word)
        except ValueError:
            self._refuse(f"{word} is no number", "write a number")
        if not math.isfinite(number) or not limit.low <= number <= limit.high or (limit.whole and number % 1):
            kind = "a whole number" if limit.whole else "a number"
            self._refuse(f"{word} is not {kind} from {limit.low:g} to {limit.high:g}", "write one in that range")
        return number

    def _refuse(self, why: str, fix: str, line: int | None = None) -> NoReturn:
        where = self._line if line is None else line
        text = f" {' '.join(self._words)!r}" if line is None else ""
        raise ConfigError(f"{self._path}:{where}:{text} cannot be simulated", why=why, fix=fix)


def _each(make: Callable[[int, float], Event], gpus: Sequence[int]) -> list[Event]:
    """Return the event of each of these GPUs. The place of one among them is 0 for the first and 1 for the last."""
    return [make(gpu, place / max(1, len(gpus) - 1)) for place, gpu in enumerate(gpus)]


def _device(gpu: int, events: Iterable[Event]) -> list[str]:
    """Return the lines of one GPU."""
    events = list(events)
    lines = []
    for name, quantity in QUANTITIES.items():
        value, knots = quantity.default, {BEFORE: (quantity.default, quantity.code)}
        for event in (event for event in events if event.field == name):
            if name != "energy" and event.value is not None:
                value = event.value
            knots[event.time] = (value, event.code)
        lines += [f"knot {gpu} {name} {time!r} {value!r} {code}" for time, (value, code) in knots.items()]
    counters = {BEFORE: 0.0} | {e.time: e.value for e in events if e.field == "energy" and e.value is not None}
    lines += [f"counter {gpu} {time!r} {joules!r}" for time, joules in counters.items()]
    return lines + [f"process {gpu} {e.time!r} {e.pid} {e.value!r}" for e in events if e.field == "process"]
