"""What commands know of trackers: whether they are installed, where runs are mirrored, which port is theirs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.project import own_project
from kmatrix.cli.session import config_path, load_config, open_tree
from kmatrix.config import Config
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.track.login import login

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard",)}
TITLES = {"wandb": "W&B", "trackio": "Trackio", "tensorboard": "TensorBoard"}
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


def announced(run: Mapping[str, Any]) -> str:
    """Return the line that says where a matrix's runs are mirrored, "" where they are not. run: run.json of one."""
    about = run.get("tracking") or {}
    names = [name for name in about.get("trackers") or () if name in TITLES]
    if not names:
        return ""
    said = [TITLES[name] + (f" ({wandb_words(run.get('symbols') or {})})" if name == "wandb" else "") for name in names]
    return f"mirrored to {', '.join(said)}; project {about.get('project')}"


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
