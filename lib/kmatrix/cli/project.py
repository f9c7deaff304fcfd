"""What the trackers' project is called: named once for a host and a folder, and kept from then on."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path

from kmatrix.cli.session import ROOT
from kmatrix.kconfig.strict import SLUG

PROJECT = "TRACKER_PROJECT"
PREFIX = "gpt2-"
DIGITS = 5  # of the hash in a project's name


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
