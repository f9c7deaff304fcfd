"""The forms of settings that are texts, as $(form,NAME) in the Kconfig files names them: rules, and their parsers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
PART = re.compile(rf"({NUMBER})([dhms])")
LONGEST_S = 10_000 * 86400.0  # of a duration: a longer one is a typing error, or infinite
CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0, "": 1.0}
MEMORY = re.compile(r"(0|[1-9][0-9]{0,8})([KMGT]?)")
# A name, or several with commas, for a scheduler, which knows what it accepts: partitions, images, claims, users.
WORD = re.compile(r"[A-Za-z0-9_][\w.:/@+,=-]*", re.ASCII)
# A variable of a library, with a plain value. The engine decides which GPUs a run sees.
VARIABLE = re.compile(
    r"(?!CUDA_VISIBLE_DEVICES=)(?:NCCL|GLOO|PYTORCH|CUDA)_[A-Z0-9_]+=[A-Za-z0-9_.,:;^=@+\[\]>-]{1,200}", re.ASCII
)
USER = re.compile(r"[0-9]{1,10}(?::[0-9]{1,10})?")
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}")  # ISO 639 and ISO 15924, as FineWeb-2 and FinePDFs name folders
BY_LANGUAGE = ("fineweb2", "finepdfs")  # datasets whose path is a language
MIX_PART = re.compile(r"([a-z][a-z0-9]*)(?:=(.+))?:(\d*\.?\d+)")
MOST_SEQUENCES = 10_000  # upper bound of the sum of integer weights: finer ones would need too long a cycle
# The name of a project at every tracker: part of URLs, and of file names. Trackio reserves `registry-`.
PROJECT_NAME = re.compile(r"(?!registry-)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
PROJECT_RULE = "expected at most 64 lower-case letters, digits and hyphens, not registry-..."


def seconds(text: str) -> float | None:
    """Return a duration such as 1h30m in seconds; a plain number is in seconds. None: invalid, zero or too long."""
    # Units in descending order, each once: "30m1h" and "1h1h" are more likely typing errors than durations.
    parts = [(text, "s")] if re.fullmatch(NUMBER, text) else PART.findall(text)
    order = ["dhms".index(unit) for _, unit in parts]
    if "".join(number + unit for number, unit in parts) not in (text, f"{text}s") or order != sorted(set(order)):
        return None
    duration = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    return duration if 0 < duration <= LONGEST_S else None


def job_seconds(text: str) -> int | None:
    """Return the seconds of a time limit: 90m, 2d12h, or in a form of Slurm; None if invalid.

    Forms of Slurm (sbatch(1), --time): minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    >>> job_seconds("90"), job_seconds("1:30:00"), job_seconds("5-0"), job_seconds("1-12:30"), job_seconds("1h")
    (5400, 5400, 432000, 131400, 3600)
    """
    if match := CLOCK.fullmatch(text):
        days, first, second, third = match.groups()
        if days is None and third is None:
            whole = int(first) * 60 + int(second or 0)
        else:
            whole = int(days or 0) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    else:
        whole = int(seconds(text) or 0)
    return whole if 0 < whole <= 366 * 86400 else None


def memory_mib(text: str) -> int | None:
    """Return MiB of a size such as 64G, 512M or 0 (all memory of a node); None if invalid. A plain number is in MiB."""
    match = MEMORY.fullmatch(text)
    return None if match is None else round(int(match[1]) * MIB[match[2]])


def split_flags(text: str) -> list[list[str]]:
    """Return the flags of a command line, each with its value. Raises ValueError if it cannot be read.

    >>> split_flags("--mail-type=END -x n1 --comment 'a b'")
    [['--mail-type=END'], ['-x', 'n1'], ['--comment', 'a b']]
    """
    found: list[list[str]] = []
    for word in shlex.split(text):
        if word.startswith("-") and word.strip("-"):
            found.append([word])
        elif found and len(found[-1]) == 1 and "=" not in found[-1][0]:
            found[-1].append(word)
        else:
            raise ValueError(f"{word!r} does not belong to a flag")
    return found


def pairs(text: str) -> dict[str, str]:
    """Return name -> value of pairs such as `NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0`."""
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def _are_flags(text: str) -> bool:
    try:
        return bool(split_flags(text))
    except ValueError:
        return False


def _are_variables(text: str) -> bool:
    return all(map(VARIABLE.fullmatch, text.split()))


# Name of the form in $(form,NAME) -> whether a text has it, and what is expected.
FORMS: dict[str, tuple[Callable[[str], object], str]] = {
    "duration": (seconds, "expected a duration above zero: 90, 90s, 15m, 1h30m, 2.5h, 2d; at most 10000d"),
    "slug": (PROJECT_NAME.fullmatch, PROJECT_RULE),
    "word": (WORD.fullmatch, "expected a name without blanks and quotes"),
    "time": (job_seconds, "expected a time up to 366 days: 90m, 12h, 2d12h, or as for sbatch, 90, 1-12:00:00"),
    "memory": (MEMORY.fullmatch, "expected a size such as 64G or 512M"),
    "flags": (_are_flags, "expected flags such as --mail-type=END"),
    "variables": (_are_variables, "expected NAME=value, with names of NCCL_, GLOO_, PYTORCH_ or CUDA_"),
    "user": (USER.fullmatch, "expected numbers: <user> or <user>:<group>"),
}


def form_problem(form: Sequence[str], text: str) -> str:
    """Return why a text does not have a form, "" if it has, or is empty.

    form: its name; of `oneof`, the texts follow.
    """
    if form[0] == "oneof":
        return "" if text in form[1:] else f"expected one of {', '.join(form[1:])}"
    fits, rule = FORMS[form[0]]
    return "" if not text or fits(text) else rule


@dataclass(frozen=True, slots=True)
class MixPart:
    """One dataset of a mix."""

    dataset: str
    path: str  # "" if the dataset needs none
    weight: int  # sequences per cycle; a cycle is the sum of all weights


def parse_mix(text: str) -> tuple[MixPart, ...]:
    """Return the parts of "DATASET:WEIGHT DATASET=PATH:WEIGHT ...", weights as integers without a common divisor.

    Raises ValueError if the text is not a mix.
    """
    found: dict[tuple[str, str], Fraction] = {}
    for word in re.split(r"[\s+]+", text.strip()):
        match = MIX_PART.fullmatch(word)
        if not match:
            raise ValueError(f"{word!r} is not DATASET:WEIGHT or DATASET=PATH:WEIGHT")
        name = (match[1], match[2] or "")
        if name in found:
            raise ValueError(f"{name[0]} is listed twice")
        found[name] = Fraction(match[3])  # exact: as floats, 0.1 and 0.2 have no small common multiple
        if not found[name]:
            raise ValueError(f"the weight in {word!r} must be above 0")
    scale = lcm(*(weight.denominator for weight in found.values()))
    weights = [int(weight * scale) for weight in found.values()]
    divisor = gcd(*weights)
    if sum(weights) // divisor > MOST_SEQUENCES:
        raise ValueError(f"the weights {' '.join(map(str, weights))} add up to more than {MOST_SEQUENCES}")
    return tuple(MixPart(*name, weight // divisor) for name, weight in zip(found, weights, strict=True))


def read_string(path: Path, name: str) -> str:
    """Return the value of a string symbol in a .config, whatever its other lines say; "" without file or value."""
    if not path.is_file():
        return ""
    text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    found = re.search(rf'^CONFIG_{name}="((?:[^"\\\n]|\\.)*)"[ \t\r]*$', text, re.MULTILINE)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""
