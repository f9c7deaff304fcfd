"""The forms of settings that a scheduler or a library reads: times, memory, names, flags, variables, labels.

One owner of each rule and its parser.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
WITH_UNITS = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0, "": 1.0}
MEMORY = re.compile(r"(0|[1-9][0-9]{0,8})([KMGT]?)")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
# A variable of a library, with a plain value. The engine decides which GPUs a run sees.
VARIABLE = re.compile(
    r"(?!CUDA_VISIBLE_DEVICES=)(?:NCCL|GLOO|PYTORCH|CUDA)_[A-Z0-9_]+=[A-Za-z0-9_.,:;^=@+\[\]>-]{1,200}", re.ASCII
)
# Kubernetes: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)  # RFC 1123 label: namespaces, queues
DNS_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)  # RFC 1123 subdomain: claims, secrets
LABEL_KEY = re.compile(rf"(?:{DNS_NAME.pattern}/)?[A-Za-z0-9](?:[-\w.]{{0,61}}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
QUANTITY = re.compile(r"[1-9][0-9]*(?:Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)  # of bytes
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)  # the registry decides the rest
USER = re.compile(r"(\d{1,10})(?::(\d{1,10}))?", re.ASCII)

LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}")  # ISO 639 and ISO 15924, as FineWeb-2 and FinePDFs name folders
BY_LANGUAGE = ("fineweb2", "finepdfs")  # datasets whose path is a language
MIX_PART = re.compile(r"([a-z][a-z0-9]*)(?:=(.+))?:(\d*\.?\d+)")
MOST_SEQUENCES = 10_000  # upper bound of the sum of integer weights: finer ones would need too long a cycle
# The name of a project at every tracker: part of URLs, and of file names. Trackio reserves `registry-`.
PROJECT_NAME = re.compile(r"(?!registry-)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
PROJECT_RULE = "expected at most 64 lower-case letters, digits and hyphens, not registry-..."


def job_seconds(text: str) -> int | None:
    """Return the seconds of a time limit: 90m, 2d12h, or in a form of Slurm; None if invalid.

    Forms of Slurm (sbatch(1), --time): minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    >>> job_seconds("90"), job_seconds("1:30:00"), job_seconds("5-0"), job_seconds("1-12:30")
    (5400, 5400, 432000, 131400)
    """
    if (match := WITH_UNITS.fullmatch(text)) and text:
        whole = sum(int(part or 0) * unit for part, unit in zip(match.groups(), UNITS_S.values(), strict=True))
    elif match := CLOCK.fullmatch(text):
        days, first, second, third = match.groups()
        if days is None and third is None:
            whole = int(first) * 60 + int(second or 0)
        else:
            whole = int(days or 0) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    else:
        return None
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


def words(text: str) -> list[str]:
    """Return the words of a list, separated by blanks or commas."""
    return [word for word in re.split(r"[\s,]+", text) if word]


def label_pairs(text: str) -> dict[str, str]:
    """Return label -> value of pairs such as `disk=ssd zone=a`."""
    return {key: value for key, _, value in (word.partition("=") for word in words(text))}


def _labels_problem(text: str) -> str:
    for key, value in label_pairs(text).items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            return f"expected label=value, not {key}={value}"
    return ""


def _mount_problem(text: str) -> str:
    parts = text.split("/")
    is_path = text.startswith("/") and ".." not in parts and any(parts)
    return "" if is_path else "expected an absolute path, such as /mnt/results"


def variables_of(text: str) -> dict[str, str]:
    """Return the variables of a text such as `NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO`."""
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def _variables_problem(text: str) -> str:
    wrong = next((word for word in text.split() if not VARIABLE.fullmatch(word)), None)
    return "" if wrong is None else f"expected NAME=value with names of NCCL_, GLOO_, PYTORCH_ or CUDA_, not {wrong}"


def _flags_problem(text: str) -> str:
    try:
        split_flags(text)
    except ValueError as error:
        return f"expected flags such as --mail-type=END: {str(error)[:1].lower()}{str(error)[1:]}"
    return ""


def _matches(pattern: re.Pattern[str], rule: str) -> Callable[[str], str]:
    return lambda text: "" if pattern.fullmatch(text) else rule


# Name of the form in $(form,NAME) -> why a text is invalid, "" if it is valid. An empty text always is.
FORMS: dict[str, Callable[[str], str]] = {
    "name": _matches(NAME, "expected one name of letters, digits and . _ - + @"),
    "names": _matches(
        re.compile(rf"{NAME.pattern}(?:,{NAME.pattern})*"),
        "expected names of letters, digits and . _ - + @, with commas",
    ),
    "time": lambda text: (
        "" if job_seconds(text) else "expected a time up to 366 days: 90m, 12h, 2d12h, or as for sbatch, 90, 1-12:00:00"
    ),
    "memory": lambda text: "expected a size such as 64G or 512M" if memory_mib(text) is None else "",
    "flags": _flags_problem,
    "variables": _variables_problem,
    "dns-label": _matches(DNS_LABEL, "expected lower-case letters, digits and -, at most 63"),
    "dns-name": _matches(DNS_NAME, "expected lower-case letters, digits, - and ."),
    "image": _matches(IMAGE, "expected a name such as registry.example.org/kmatrix:1.0"),
    "quantity": _matches(QUANTITY, "expected a size such as 64Gi"),
    "resource": _matches(LABEL_KEY, "expected a resource name such as nvidia.com/gpu"),
    "user": _matches(USER, "expected numbers: <user> or <user>:<group>"),
    "labels": _labels_problem,
    "mount": _mount_problem,
}


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
