"""What commands know of trackers: whether they are installed, what the project is called, which port is theirs."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT, config_path, load_config, open_tree
from kmatrix.config import Config
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.kconfig.strict import SLUG

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard",)}
TITLES = {"wandb": "W&B", "trackio": "Trackio", "tensorboard": "TensorBoard"}
PORTS = {"trackio": "TRACKIO_PORT", "tensorboard": "TENSORBOARD_PORT"}
PROJECT = "TRACKER_PROJECT"
PREFIX = "gpt2-"
DIGITS = 5  # of the hash in a project's name


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


def computed_project(host: str, folder: Path) -> str:
    """Return the project's name for a host and a folder: gpt2- and five hexadecimal digits.

    The host's name and not its address, which changes with the network.
    """
    return PREFIX + hashlib.sha256(f"{host}\0{folder}".encode()).hexdigest()[:DIGITS]


def own_project() -> str:
    """Return the project's name for this host and this project's folder."""
    return computed_project(socket.gethostname(), ROOT)


def is_computed(name: str) -> bool:
    """Whether a project's name is one that was computed, here or elsewhere."""
    return re.fullmatch(PREFIX + f"[0-9a-f]{{{DIGITS}}}", name) is not None


def former_project(path: Path) -> str:
    """Return the project that a .config names; "" where there is no such file or no legal name in it."""
    try:
        found = re.search(rf'^CONFIG_{PROJECT}="(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found and SLUG.fullmatch(found[1]) else ""


def tracking(config: Config) -> dict[str, Any]:
    """Return what is written to run.json for the tracker process; nothing where there is no tracker."""
    if not config.trackers:
        return {}
    return {
        "trackers": list(config.trackers),
        "project": config.tracker_project or own_project(),
        "limit_s": config.tracker_limit_s,
    }


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
