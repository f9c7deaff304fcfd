"""The name of the project in trackers if none was chosen."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from kmatrix.records.paths import ROOT

PREFIX = "gpt2-"
DIGITS = 5  # hexadecimal digits of the hash


def computed_project(host: str, folder: Path) -> str:
    """Return the default project name of a host and a directory: `gpt2-` and five hexadecimal digits.

    `host`: the host name, because an IP address changes with the network.
    """
    return PREFIX + hashlib.sha256(f"{host}\0{folder}".encode()).hexdigest()[:DIGITS]


def own_project() -> str:
    """Return the default project name of this host and this checkout."""
    return computed_project(os.uname().nodename, ROOT)


def is_computed(name: str) -> bool:
    """Return whether a project name is a default name, of this host or another one."""
    return re.fullmatch(PREFIX + f"[0-9a-f]{{{DIGITS}}}", name) is not None
