"""Facts about a matrix as text, for all of its reports: machines, devices, software, models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from kmatrix.report.numbers import MatrixNumbers
from kmatrix.text import first_names

SOFTWARE = ("torch", "numpy", "kconfiglib", "nvidia-ml-py")  # packages of the provenance
MAX_HOSTS = 6  # named in a line
WANDB = "wandb"  # key of the links of a run
WANDB_RUN = re.compile(r"((?:/[\w.%~-]+)+)/runs/[\w.%~-]+/?", re.ASCII)  # path of a run there, below its project
HOST = re.compile(r"[a-z0-9.-]+(?::\d+)?", re.ASCII | re.IGNORECASE)


def machines(numbers: MatrixNumbers) -> str:
    """Return the host of the matrix; if others trained, these, and the one that submitted."""
    host = str(numbers.provenance.get("host") or "")
    used = dict.fromkeys(device.host for run in numbers.runs for device in run.devices)
    if not used or [*used] == [host]:
        return host
    return first_names(used, MAX_HOSTS) + (f" (submitted from {host})" if host else "")


def devices(numbers: MatrixNumbers) -> str:
    """Return the devices that runs used; before the first run, those of the host."""
    host: Mapping[str, Any] = numbers.provenance
    if {device.host for run in numbers.runs for device in run.devices} - {host.get("host")}:
        host = {}  # the devices and cores of the host that submitted are not those of the nodes
    # What was used is better evidence than what the planning machine had.
    used = dict.fromkeys(run.device_name for run in numbers.runs if run.device_name)
    gpus = Counter(str(gpu.get("name")) for gpu in host.get("gpus") or [])
    parts = [
        f"{gpus[name]} x {name}" if name in gpus else str(name) for name in used or gpus or [host.get("cpu") or ""]
    ]
    if "cpu" in numbers.devices and host.get("cores"):
        parts.append(f"{host['cores']} cores")
    return ", ".join(filter(None, parts))


def software(numbers: MatrixNumbers) -> str:
    """Return the versions of the packages that compute, and of Python."""
    versions = numbers.provenance.get("versions") or {}
    parts = [f"{name} {versions[name]}" for name in SOFTWARE if versions.get(name)]
    if python := numbers.provenance.get("python"):
        parts.append(f"Python {python}")
    return ", ".join(parts)


def code(numbers: MatrixNumbers) -> str:
    """Return the commit of the code, and whether it was changed; "" outside a repository."""
    commit = str(numbers.provenance.get("git_commit") or "")[:10]
    changed = " with uncommitted changes" if numbers.provenance.get("git_dirty") else ""
    return commit and f"git {commit}{changed}"


def models(numbers: MatrixNumbers) -> str:
    """Return the models of the runs, with their numbers of parameters."""
    params: dict[str, str] = {}
    for run in numbers.runs:
        if run.model and (run.params or run.model not in params):
            params[run.model] = f"{run.model} ({run.params:,} parameters)" if run.params else run.model
    return ", ".join(params.values())


def wandb_groups(numbers: MatrixNumbers) -> list[str]:
    """Return the address of the runs of this matrix in each W&B project that runs were uploaded to.

    It is made of the recorded addresses of runs. Only https, and only characters that need no escaping anywhere.
    """
    found: dict[str, None] = {}
    for run in numbers.runs:
        address = urlsplit(run.links.get(WANDB, "")) if _is_address(run.links.get(WANDB, "")) else None
        path = None if address is None else WANDB_RUN.fullmatch(address.path)
        if address is not None and path is not None and address.scheme == "https" and HOST.fullmatch(address.netloc):
            group = quote(numbers.name, safe="")
            found[f"https://{address.netloc}{path[1]}/groups/{group}/workspace"] = None
    return list(found)


def _is_address(text: str) -> bool:
    """Return whether a text can be parsed as an address: urlsplit raises for a bracket, and drops line ends."""
    return text.isascii() and text.isprintable() and "[" not in text and "]" not in text
