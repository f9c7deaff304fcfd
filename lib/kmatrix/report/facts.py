"""Where the numbers of a matrix come from, as text that all reports print: machines, software, models, data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kmatrix.records.matrix import Plan
from kmatrix.report.results import Run
from kmatrix.text import first_names

SOFTWARE = ("torch", "numpy", "kconfiglib", "nvidia-ml-py")  # packages of the provenance


def facts_of(plan: Plan, runs: Sequence[Run]) -> dict[str, str]:
    """Return the facts that are known: name -> text."""
    about: Mapping[str, Any] = plan.provenance
    versions = {name: (about.get("versions") or {}).get(name) for name in SOFTWARE} | {"Python": about.get("python")}
    commit = str(about.get("git_commit") or "")[:10]
    facts = {
        "Machine": ", ".join(_machine(about, runs)),
        "Software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Code": commit and f"git {commit}{' with uncommitted changes' if about.get('git_dirty') else ''}",
        "Model": ", ".join(_models(runs)),
        "Data": first_names(dict.fromkeys(_data(runs))),
    }
    return {name: text for name, text in facts.items() if text}


def _machine(about: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the hosts and the devices that trained; before the first run has ended, those of the provenance."""
    hosts: list[Any] = [host for run in runs for host in run.hosts] or [about.get("host")]
    # What was used is better evidence than what the planning machine had.
    used: list[Any] = [run.device_name for run in runs]
    if not any(used):
        used = [gpu.get("name") for gpu in about.get("gpus") or []] or [about.get("cpu")]
    for names in (hosts, used):
        if known := dict.fromkeys(str(name) for name in names if name):
            yield first_names(known)


def _models(runs: Sequence[Run]) -> list[str]:
    sizes: dict[str, int | None] = {}
    for run in runs:
        if run.model:
            sizes[run.model] = sizes.get(run.model) or run.params
    return [f"{name} ({size:,} parameters)" if size else name for name, size in sizes.items()]


def _data(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.data_sha256:
            tokens = f"{run.tokenizer} tokens" if run.tokenizer else ""
            yield ", ".join(filter(None, [run.dataset, tokens, f"SHA-256 {run.data_sha256[:12]}"]))
