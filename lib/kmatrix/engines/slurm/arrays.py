"""Read and write Slurm's short forms: the tasks of an array, 12_[0-3,7%2], and lists of hosts, n[01-03]."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping

ARRAY = re.compile(r"(\d+)_(?:(\d+)|\[([\d,:-]*)(?:%\d+)?\])")
MOST = 5_000_000  # tasks of an array: Slurm has at most 4,000,001


def split_job(job: str) -> tuple[str, int | None]:
    """Return the job and the task of an id: 12_3 -> 12 and 3, 12 -> 12 and None."""
    base, _, task = job.partition("_")
    return base, int(task) if task.isdecimal() else None


def tasks_of(job: str) -> Iterator[int | None]:
    """Yield the tasks of an id as squeue writes it; None for a job without an array. Nothing if it cannot be read.

    >>> list(tasks_of("12_[2-4,8%2]")), list(tasks_of("12_7")), list(tasks_of("12"))
    ([2, 3, 4, 8], [7], [None])
    """
    match = ARRAY.fullmatch(job)
    if match is None:
        yield from [None] if job.isdecimal() else []
    elif match[2]:
        yield int(match[2])
    else:
        yield from itertools.islice(_numbers(match[3]), MOST)


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last if last.isdecimal() else first) + 1, max(1, int(step or 1)))


def short_jobs(jobs: Collection[str]) -> list[str]:
    """Return ids of jobs, with the tasks of each array in one.

    >>> short_jobs(["12_0", "12_1", "12_2", "12_7", "13"])
    ['12_[0-2,7]', '13']
    """
    found: dict[str, set[int]] = {}
    for job in jobs:
        base, task = split_job(job)
        found.setdefault(base, set()).update(() if task is None else (task,))
    return [f"{base}_[{_spans(sorted(tasks))}]" if tasks else base for base, tasks in found.items()]


def _spans(numbers: list[int]) -> str:
    """Return sorted numbers as spans: 0-2,7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def hosts_of(text: str) -> tuple[str, ...]:
    """Return the names of a list of hosts, in its order; what cannot be read stays as it is.

    >>> hosts_of("n[1-3],login"), hosts_of("r[0-1]n[08-09]"), hosts_of("")
    (('n1', 'n2', 'n3', 'login'), ('r0n08', 'r0n09', 'r1n08', 'r1n09'), ())
    """
    return tuple(host for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) for host in _hosts(item))


def _hosts(item: str) -> Iterator[str]:
    parts = [_padded(part[1:-1]) if part.startswith("[") else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
    for words in itertools.islice(itertools.product(*parts), MOST):
        yield "".join(words)


def _padded(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and int(last) - int(first) < MOST:
            found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found


def by_array(jobs: Mapping[str, str]) -> dict[str, dict[int | None, str]]:
    """Return job -> task -> key, of a mapping from keys to ids such as 12_3."""
    found: dict[str, dict[int | None, str]] = {}
    for key, job in jobs.items():
        base, task = split_job(job)
        found.setdefault(base, {})[task] = key
    return found
