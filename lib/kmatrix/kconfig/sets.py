"""Names of the command line that set several bools at once: TRACKER=wandb,trackio."""

from __future__ import annotations

import difflib

from kmatrix.errors import ConfigError
from kmatrix.kconfig.strict import Assignment
from kmatrix.kconfig.tree import Tree

TRACKERS = {"wandb": "TRACKER_WANDB", "trackio": "TRACKER_TRACKIO", "tensorboard": "TRACKER_TENSORBOARD"}
SHORT = {"both": ("wandb", "trackio"), "all": tuple(TRACKERS), "none": ()}
SETS = ("TRACKER",)


def parse_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers that a list names, in one order. Blanks beside commas do not count."""
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in TRACKERS and word not in SHORT:
            raise _unknown(text, word)
    if "none" in words and len(words) > 1:
        raise ConfigError(f"command line: TRACKER={text}", why="none stands alone")
    chosen = {name for word in words for name in SHORT.get(word, (word,))}
    return tuple(name for name in TRACKERS if name in chosen)


def parse_set(tree: Tree, name: str, text: str) -> dict[str, list[Assignment]]:
    """Return what NAME=text means: symbol -> its assignment, for each member of the set, chosen or not."""
    where = f"command line: {name}={text}"
    chosen = parse_trackers(text)
    for symbol in TRACKERS.values():
        tree.symbol(symbol, where)
    return {
        symbol: [Assignment(symbol, "y" if member in chosen else "n", where)] for member, symbol in TRACKERS.items()
    }


def _unknown(text: str, word: str) -> ConfigError:
    near = difflib.get_close_matches(word, [*TRACKERS, *SHORT], 2)
    return ConfigError(
        f"command line: TRACKER={text}: no tracker {word!r}",
        why="it is a list of wandb, trackio, tensorboard; both is wandb,trackio; or all; or none",
        fix=f"did you mean {' or '.join(near)}?" if near else "",
    )
