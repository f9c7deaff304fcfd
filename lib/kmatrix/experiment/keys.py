"""Refuse a plan whose settings contain a key: they are written to the results as they are, because runs read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kmatrix.kconfig.tree import Tree, is_text, key_error
from kmatrix.redaction.redactor import redactor

COMMENT = re.compile(r"#(?! CONFIG_\w+ is not set\s*$)")


def refuse_keys(tree: Tree, values: Mapping[str, str], folders: Mapping[str, Path], names: Iterable[str]) -> None:
    """Raise ConfigError, naming symbol and variable, if a setting contains a known key.

    Values that users type are checked where they are read; this covers the others: defaults, resolved paths, names.
    values: effective ones, by symbol.  folders: resolved paths by symbol.  names: of the runs.
    """
    known = redactor()
    symbols = tree.kconf.syms
    texts = {name: text for name, text in values.items() if name in symbols and is_text(symbols[name])}
    texts |= {name: str(folder.resolve()) for name, folder in folders.items()}
    # One text: a matrix may have 100,000 runs, and a search takes 20 microseconds.
    texts["the name of a run"] = "\n".join(names)
    for name, text in texts.items():
        if found := known.known_in(text):
            raise key_error(f"{name} would contain the {found[0]}", found[0])


def redacted_comments(text: str) -> str:
    """Return the text of a .config without the keys in its comments. Its settings are checked when they are read."""
    redact = redactor().redact
    return "\n".join(redact(line) if COMMENT.match(line) else line for line in text.split("\n"))
