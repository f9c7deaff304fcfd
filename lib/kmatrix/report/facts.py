"""Where the numbers of a matrix come from, as text that all reports print: machines, software, models, data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from kmatrix.records.matrix import Plan
from kmatrix.report.results import Run
from kmatrix.text import first_names

SOFTWARE = ("torch", "numpy", "kconfiglib", "nvidia-ml-py")  # packages of the provenance
MOST_HOSTS = 6  # named in a line
MOST_DATA = 3
# The address of a run below its project: only https, and only characters that need no escaping anywhere.
WANDB_RUN = re.compile(r"(https://[a-z0-9.-]+(?::\d+)?(?:/[\w.%~-]+)+)/runs/[\w.%~-]+/?", re.ASCII | re.IGNORECASE)


def facts_of(plan: Plan, runs: Sequence[Run]) -> dict[str, str]:
    """Return the facts that are known: name -> text."""
    about: Mapping[str, Any] = plan.provenance
    driver, environment = about.get("driver") or {}, about.get("environment") or {}
    facts = {
        "Machine": ", ".join(filter(None, [_machines(about, runs), _devices(about, runs)])),
        "Software": _software(about),
        "Code": _code(about),
        "Model": _models(runs),
        "Data": first_names(dict.fromkeys(_data(runs)), MOST_DATA),
        "Driver": ", ".join(f"{name} {value}" for name, value in driver.items() if value),
        "Kernel": about.get("kernel") or "",
        "Environment": " ".join(f"{name}={value}" for name, value in environment.items()),
        "W&B": " ".join(_wandb(plan.name, runs)),
    }
    return {name: text for name, text in facts.items() if text}


def _machines(about: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the host of the matrix; if others trained, these, and the one that submitted."""
    host = str(about.get("host") or "")
    used = dict.fromkeys(host for run in runs for host in run.hosts)
    if not used or [*used] == [host]:
        return host
    return first_names(used, MOST_HOSTS) + (f" (submitted from {host})" if host else "")


def _devices(about: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the devices that runs used; before the first run, those of the host."""
    if {host for run in runs for host in run.hosts} - {about.get("host")}:
        about = {}  # the devices and cores of the host that submitted are not those of the nodes
    # What was used is better evidence than what the planning machine had.
    used = dict.fromkeys(run.device_name for run in runs if run.device_name)
    gpus = Counter(str(gpu.get("name")) for gpu in about.get("gpus") or [])
    parts = [
        f"{gpus[name]} x {name}" if name in gpus else str(name) for name in used or gpus or [about.get("cpu") or ""]
    ]
    if about.get("cores") and any(run.device == "cpu" for run in runs):
        parts.append(f"{about['cores']} cores")
    return ", ".join(filter(None, parts))


def _software(about: Mapping[str, Any]) -> str:
    versions = about.get("versions") or {}
    python = [f"Python {about['python']}"] if about.get("python") else []
    return ", ".join([*(f"{name} {versions[name]}" for name in SOFTWARE if versions.get(name)), *python])


def _code(about: Mapping[str, Any]) -> str:
    """Return the commit of the code, and whether it was changed; "" outside a repository."""
    commit = str(about.get("git_commit") or "")[:10]
    return commit and f"git {commit}{' with uncommitted changes' if about.get('git_dirty') else ''}"


def _models(runs: Sequence[Run]) -> str:
    params: dict[str, str] = {}
    for run in runs:
        if run.model and (run.params or run.model not in params):
            params[run.model] = f"{run.model} ({run.params:,} parameters)" if run.params else run.model
    return ", ".join(params.values())


def _data(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.data_sha256:
            tokens = f"{run.tokenizer} tokens" if run.tokenizer else ""
            yield ", ".join(filter(None, [run.dataset, tokens, f"SHA-256 {run.data_sha256[:12]}"]))


def _wandb(matrix: str, runs: Sequence[Run]) -> list[str]:
    """Return the address of the runs of this matrix in each W&B project that runs were uploaded to."""
    found = (WANDB_RUN.fullmatch(run.links.get("wandb", "")) for run in runs)
    projects = dict.fromkeys(match[1] for match in found if match)
    return [f"{project}/groups/{quote(matrix, safe='')}/workspace" for project in projects]
