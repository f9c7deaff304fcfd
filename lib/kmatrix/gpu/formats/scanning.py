"""The values of a JSON array, one by one, from text that comes in parts; what is damaged costs only itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 1 << 23  # characters of one value; a longer one is damaged
NO_END = "the array has no end"
CUT_SHORT = "the file is cut short"
DAMAGED = "an entry is damaged"
BEHIND = "something follows the end of the array"
_ENTRY = re.compile(r'\{\s*"timestamp"')  # where an object begins after a damaged one
_BEGIN = 64  # characters in which the begin of an entry fits
_SAMPLES = re.compile(r'"samples"\s*:\s*\[')
_SPACE = " \t\r\n,"
_WORD = 16  # characters of the longest word or escape that the end of a text can cut
_DONE = 1 << 18  # characters that are behind the reader, before they are let go


class Scanner:
    """Reads the values of an array that begins before `text`.

    more: gives the text that follows; nothing at the end.  lost: is told why, and how many entries at least.
    alone: nothing may follow the end of the array.  rest: the text that was not read yet.
    ended: the array's end, or that of the text, was met.
    """

    def __init__(self, text: str, more: Callable[[], str], lost: Callable[[str, int], None], *, alone: bool) -> None:
        self._text, self._more, self._lost, self._alone = text, more, lost, alone
        self._at, self._let_go = 0, 0
        self.ended = False

    @property
    def position(self) -> int:
        """Characters that were read."""
        return self._let_go + self._at

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def values(self) -> Iterator[Any]:
        """Yield each value that is whole. One may stop between two of them, and read `rest` by other means."""
        decoder = json.JSONDecoder()
        while not self._closed():
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:  # of no form, a number without end, nested without end
                self._grow_or_skip(damaged=self._is_damage(error))
                continue
            if end == len(self._text) and isinstance(value, int | float) and (more := self._more()):
                self._text += more  # of which the number's next digits may be
                continue
            self._at = end
            if self._at > _DONE:
                self._let_go_of(self._at)
            yield value

    def _closed(self) -> bool:
        """Pass what stands between two values; return whether the array ends here."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self.ended or self._text[self._at : self._at + 1] != "]":
                return self.ended
            self._at += 1
            self.ended = not (self._alone and self._goes_on())

    def _goes_on(self) -> bool:
        """Return whether entries follow the end of the array; say so, and go there."""
        while not self.rest.strip():
            self._let_go_of(len(self._text))
            self._text = self._more()
            if not self._text:
                return False
        self._lost(BEHIND, 0)
        return self._skip()

    def _is_damage(self, error: Exception) -> bool:
        """Whether no text that follows can make the value whole."""
        if not isinstance(error, json.JSONDecodeError):
            return True
        return error.pos + _WORD < len(self._text.rstrip()) and not error.msg.startswith("Unterminated string")

    def _grow_or_skip(self, *, damaged: bool) -> None:
        """Get more text for a value that is not whole; where none helps, say so and go on at the next entry."""
        more = "" if damaged or len(self._text) - self._at >= LONGEST else self._more()
        self._let_go_of(self._at)
        if more:
            self._text += more
            return
        if not self._text.strip():
            self._lost(NO_END, 0)
            self.ended = True
            return
        self._at = 1
        self._lost(DAMAGED if self._skip() else CUT_SHORT, 1)

    def _skip(self) -> bool:
        """Let go of everything up to the next entry; return whether there is one."""
        while not (found := _ENTRY.search(self._text, self._at)):
            more = self._more()
            if not more:
                self._let_go_of(len(self._text))
                self.ended = True
                return False
            self._let_go_of(max(self._at, len(self._text) - _BEGIN))
            self._text += more
        self._let_go_of(found.start())
        return True

    def _let_go_of(self, characters: int) -> None:
        self._text, self._at = self._text[characters:], 0
        self._let_go += characters


def opening(text: str) -> tuple[int, bool] | None:
    """Return where the entries begin, and whether the array stands alone; None where `text` begins neither kind.

    Either it is an array, or an object with an array named samples.
    """
    at = len(text) - len(text.lstrip("\ufeff \t\r\n"))
    if text[at : at + 1] == "[":
        return at + 1, True
    found = _SAMPLES.search(text) if text[at : at + 1] == "{" else None
    return (found.end(), False) if found else None
