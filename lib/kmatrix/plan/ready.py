"""Datasets that lie on Hugging Face as shards of GPT-2's tokens: how many a run needs, before one is fetched."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARD_TOKENS = 100_000_000
HEADER, TOKEN = 1024, 2  # bytes of a shard's header and of a token (llm.c's format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A dataset's training shards; one of validation, as long as the others, stands beside them.

    last: tokens of the last training shard, None where it is not known.
    """

    shards: int
    last: int | None

    @property
    def tokens(self) -> int | None:
        """All training tokens."""
        return None if self.last is None else (self.shards - 1) * SHARD_TOKENS + self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What a run needs. shards: of training.  bytes: with that of validation, at the most."""

    shards: int
    bytes: int


# The names in gpt2's catalogue. Counts: data/cached_fineweb10B.py and data/cached_finewebedu10B.py of
# KellerJordan/modded-nanogpt, which fetch the same repositories (kjj0/finewebedu10B-gpt2, kjj0/fineweb10B-gpt2).
READY = {
    "finewebedu": Ready(shards=99, last=53_989_344),
    "fineweb": Ready(shards=103, last=None),
}


def to_fetch(ready: Ready, tokens: int, block_size: int) -> Fetch:
    """Return what has to be fetched so that `tokens` can be read once, all for 0, or all where there are fewer.

    A shard gives whole sequences of `block_size` tokens, each with the token behind it.
    """
    whole = (SHARD_TOKENS - 1) // block_size * block_size
    shards = min(ready.shards, math.ceil(tokens / whole)) if tokens else ready.shards
    held = (shards + 1) * SHARD_TOKENS
    if shards == ready.shards and ready.last is not None:
        held -= SHARD_TOKENS - ready.last
    return Fetch(shards=shards, bytes=(shards + 1) * HEADER + held * TOKEN)
