"""Whether W&B is online here: it is with a key, and where nothing says offline. The key itself is never read."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")  # W&B's own


@dataclass(frozen=True, slots=True)
class Login:
    """online: whether runs go to W&B's server.  why: in words.  entity: user or team, "" for the key's own."""

    online: bool
    why: str
    entity: str = ""


def login(symbols: Mapping[str, str], environment: Mapping[str, str]) -> Login:
    """Return how W&B is used. symbols: texts in force.  environment: the process's variables."""
    entity = symbols.get("WANDB_ENTITY", "")
    said = _settings(environment)
    mode = (environment.get("WANDB_MODE") or said.get("mode", "")).lower()
    if symbols.get("WANDB_OFFLINE") == "y":
        return Login(False, "CONFIG_WANDB_OFFLINE=y", entity)
    if mode in ("offline", "dryrun", "disabled"):
        where = "" if environment.get("WANDB_MODE") else " in W&B's own settings"
        return Login(False, f"WANDB_MODE={mode}{where}", entity)
    found = key_place(environment)
    return Login(True, f"the key is in {found}", entity) if found else Login(False, "there is no key here", entity)


def key_place(environment: Mapping[str, str]) -> str | None:
    """Return where this machine has a key for W&B: a variable's name or a file; None where it has none."""
    for name in KEYS:
        if environment.get(name):
            return name
    own = urlsplit(environment.get("WANDB_BASE_URL") or _settings(environment).get("base_url", "")).netloc
    for path in _netrc_files(environment):
        try:
            hosts = netrc.netrc(path).hosts
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if any(host in hosts for host in (HOSTS if not own or own in HOSTS else (own,))):
            return str(path)
    return None


def _netrc_files(environment: Mapping[str, str]) -> list[Path]:
    """The files where `wandb login` leaves a key."""
    if environment.get("NETRC"):
        return [Path(environment["NETRC"]).expanduser()]
    home = Path(environment.get("HOME") or Path.home())
    return [home / ".netrc", home / "_netrc"]


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what `wandb login --host` and `wandb offline` keep for this user: base_url, mode."""
    home = Path(environment.get("HOME") or Path.home())
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser()
    reader = configparser.ConfigParser(interpolation=None)
    try:
        reader.read(folder / "settings", encoding="utf-8")
        return dict(reader["default"])
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return {}
