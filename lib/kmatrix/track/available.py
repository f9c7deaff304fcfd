"""Which trackers can be used on this machine: installed packages, W&B's login, the name of the project."""

from __future__ import annotations

import configparser
import hashlib
import netrc
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from kmatrix.errors import LaunchError
from kmatrix.records.paths import ROOT
from kmatrix.records.runs import RunFile
from kmatrix.redaction.redactor import netrc_files
from kmatrix.text import make_command

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")

# W&B's own servers, as `wandb login` writes them to ~/.netrc.
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")


@dataclass(frozen=True, slots=True)
class WandbLogin:
    """Whether W&B is used online, and why."""

    online: bool  # runs are sent to W&B's server; otherwise to local files
    why: str  # the reason, for a message
    entity: str = ""  # user or team; empty: the default of the API key

    def describe(self) -> str:
        """Return the login as part of a message."""
        entity = f" as {self.entity}" if self.entity else ""
        return f"online{entity}: {self.why}" if self.online else f"offline: {self.why}"


def login(symbols: Mapping[str, str], environment: Mapping[str, str]) -> WandbLogin:
    """Return whether W&B is online, from the effective symbols and the environment variables.

    It is online if an API key is configured and nothing selects the offline mode. The key itself is never read.
    """
    entity = symbols.get("WANDB_ENTITY", "")
    mode = (environment.get("WANDB_MODE") or _settings(environment).get("mode", "")).lower()
    if symbols.get("WANDB_OFFLINE") == "y" and environment.get("WANDB_MODE") != "online":
        return WandbLogin(False, "CONFIG_WANDB_OFFLINE=y", entity)
    if mode in ("offline", "dryrun", "disabled"):
        where = "" if environment.get("WANDB_MODE") else " in W&B's settings file"
        return WandbLogin(False, f"WANDB_MODE={mode}{where}", entity)
    found = key_place(environment)
    return WandbLogin(True, f"API key in {found}", entity) if found else WandbLogin(False, "no API key", entity)


def key_place(environment: Mapping[str, str]) -> str | None:
    """Return where W&B's API key is configured: the name of a variable or a file, or None."""
    for name in KEYS:
        if environment.get(name):
            return name
    server = urlsplit(environment.get("WANDB_BASE_URL") or _settings(environment).get("base_url", "")).netloc
    for path in netrc_files(environment):
        try:
            hosts = netrc.netrc(path).hosts
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if any(host in hosts for host in (HOSTS if not server or server in HOSTS else (server,))):
            return str(path)
    return None


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return W&B's settings of this user (base_url, mode), written by `wandb login --host` and `wandb offline`."""
    home = Path(environment.get("HOME") or Path.home())
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser()
    # Without interpolation: a % in a value is not a reference.
    reader = configparser.ConfigParser(interpolation=None)
    try:
        reader.read(folder / "settings", encoding="utf-8")
        return dict(reader["default"])
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return {}


PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard",)}
TITLES = {"wandb": "W&B", "trackio": "Trackio", "tensorboard": "TensorBoard"}
WANDB_SYMBOLS = ("WANDB_ENTITY", "WANDB_OFFLINE")  # the symbols that decide how W&B is used


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages that these trackers need and that are not installed."""
    return [package for name in names for package in PACKAGES[name] if not _installed(package)]


def need_trackers(names: Iterable[str]) -> None:
    """Raise LaunchError if a selected tracker is not installed."""
    if absent := missing(names):
        raise LaunchError(
            f"missing packages for the selected trackers: {', '.join(absent)}",
            hint="make setup-trackers, or pass TRACKER=none",
        )


def announced(run: RunFile) -> str:
    """Return the line that lists the trackers of a matrix and their project, empty if it has none.

    `run`: one run of the matrix.
    """
    tracking = run.tracking
    names = [name for name in tracking.trackers if name in TITLES]
    if not names:
        return ""
    titles = ", ".join(_title(name, run.symbols) for name in names)
    return f"trackers: {titles}; project {tracking.project or own_project()}"


def _title(name: str, symbols: Mapping[str, str]) -> str:
    """Return a tracker's title, with its status on this machine in parentheses."""
    if missing([name]):
        return f"{TITLES[name]} (not installed: {make_command('setup-trackers')}, then {make_command('track-sync')})"
    return f"{TITLES[name]} ({login(symbols, os.environ).describe()})" if name == "wandb" else TITLES[name]


def _installed(package: str) -> bool:
    """Return whether a package can be imported.

    A directory of that name in the working directory, such as results in `wandb/`, is a namespace package: it has no
    origin and does not count.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def own_project() -> str:
    """Return the project name of this host and this checkout: `gpt2-` and five hexadecimal digits."""
    # The host name, because an IP address changes with the network.
    return "gpt2-" + hashlib.sha256(f"{os.uname().nodename}\0{ROOT}".encode()).hexdigest()[:5]
