"""What commands know of trackers: whether they are installed, where runs are mirrored, which port is theirs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.project import own_project
from kmatrix.cli.session import config_path, load_config, open_tree
from kmatrix.config import Config
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.kconfig.sets import parse_trackers
from kmatrix.track.login import login

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard",)}
TITLES = {"wandb": "W&B", "trackio": "Trackio", "tensorboard": "TensorBoard"}
WANDB_SYMBOLS = ("WANDB_ENTITY", "WANDB_OFFLINE")  # what .config says of how W&B is used
PORTS = {"trackio": "TRACKIO_PORT", "tensorboard": "TENSORBOARD_PORT"}


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages that these trackers need and this interpreter does not have."""
    return [package for name in names for package in PACKAGES[name] if not _installed(package)]


def need_trackers(names: Iterable[str]) -> None:
    """Refuse before anything is made where a tracker that was chosen is not installed."""
    if absent := missing(names):
        raise LaunchError(
            f"not installed for these trackers: {', '.join(absent)}",
            fix="make setup-trackers, or pass TRACKER=none",
        )


def tracking(config: Config) -> dict[str, Any]:
    """Return what is written to run.json for the tracker process; nothing where there is no tracker."""
    if not config.trackers:
        return {}
    return {
        "trackers": list(config.trackers),
        "project": config.tracker_project or own_project(),
        "limit_s": config.tracker_limit_s,
    }


def asked_trackers(arguments: Arguments) -> tuple[str, ...] | None:
    """Return the trackers of TRACKER=, which must be installed; None where it is not given: those of the matrix."""
    if "TRACKER" not in arguments.values:
        return None
    names = parse_trackers(arguments.values["TRACKER"])
    need_trackers(names)
    return names


def announced(run: Mapping[str, Any], chosen: Sequence[str] | None = None) -> str:
    """Return the line that says where a matrix's runs are mirrored, "" where they are not.

    run: run.json of one.  chosen: trackers in the place of its own.
    """
    about = run.get("tracking") or {}
    names = [name for name in (about.get("trackers") or () if chosen is None else chosen) if name in TITLES]
    if not names:
        return ""
    said = ", ".join(_with_words(name, run.get("symbols") or {}) for name in names)
    return f"mirrored to {said}; project {about.get('project') or own_project()}"


def _with_words(name: str, symbols: Mapping[str, str]) -> str:
    """Return a tracker's title, and what there is to know of it here."""
    if missing([name]):
        return f"{TITLES[name]} (not installed: make setup-trackers, then make track-replay)"
    return f"{TITLES[name]} ({wandb_words(symbols)})" if name == "wandb" else TITLES[name]


def wandb_words(symbols: Mapping[str, str]) -> str:
    """Return how W&B is used here, in words."""
    found = login(symbols, os.environ)
    entity = f" as {found.entity}" if found.entity else ""
    return f"online{entity}: {found.why}" if found.online else f"offline: {found.why}"


def configured(arguments: Arguments, name: str) -> str:
    """Return a symbol's text in .config; its default where there is no .config."""
    tree = open_tree(arguments)
    path = config_path(arguments)
    if path.exists():
        load_config(tree, path)
    return tree.value(name) or ""


def port(arguments: Arguments, tracker: str) -> int:
    """Return the port of a tracker's page: PORT=, else that of .config, else the symbol's default."""
    text = arguments.get("PORT") or configured(arguments, PORTS[tracker])
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"PORT={text} is no port", why="it is a whole number from 1 to 65535")
    return int(text)


def _installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name, as results may have, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
