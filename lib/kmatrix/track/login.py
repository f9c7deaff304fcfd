"""Whether W&B is online here: it is with a key, and where nothing says offline. The key itself is never read."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


@dataclass(frozen=True, slots=True)
class Login:
    """online: whether runs go to W&B's server.  why: in words.  entity: user or team, "" for the key's own."""

    online: bool
    why: str
    entity: str = ""


def login(symbols: Mapping[str, str], environment: Mapping[str, str]) -> Login:
    """Return how W&B is used. symbols: texts in force.  environment: the process's variables."""
    entity = symbols.get("WANDB_ENTITY", "")
    mode = environment.get("WANDB_MODE", "").lower()
    if symbols.get("WANDB_OFFLINE") == "y":
        return Login(False, "CONFIG_WANDB_OFFLINE=y", entity)
    if mode in ("offline", "dryrun", "disabled"):
        return Login(False, f"WANDB_MODE={mode}", entity)
    found = key_place(environment)
    return Login(True, f"the key is in {found}", entity) if found else Login(False, "there is no key here", entity)


def key_place(environment: Mapping[str, str]) -> str | None:
    """Return where this machine has a key for W&B: a variable's name or a file; None where it has none."""
    for name in KEYS:
        if environment.get(name):
            return name
    own = urlsplit(environment.get("WANDB_BASE_URL", "")).netloc
    for path in _netrc_files(environment):
        try:
            hosts = netrc.netrc(path).hosts
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if any(host in hosts for host in (HOSTS if not own else (own,))):
            return str(path)
    return None


def _netrc_files(environment: Mapping[str, str]) -> list[Path]:
    """The files where `wandb login` leaves a key."""
    if environment.get("NETRC"):
        return [Path(environment["NETRC"]).expanduser()]
    home = Path(environment.get("HOME") or Path.home())
    return [home / ".netrc", home / "_netrc"]
