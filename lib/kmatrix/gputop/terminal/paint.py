"""Paint lines of text on a terminal, and after that only the cells that changed.

A screen of 16 GPUs has 8,000 cells, of which some dozens change in a second: writing all of them would cost a slow
connection 6 KB per picture. Control sequences: ECMA-48 (cursor position, erase in line) and xterm (alternate screen).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

OPEN = "\x1b[?1049h\x1b[?25l\x1b[2J"  # alternate screen, no cursor, empty
CLOSE = "\x1b[0m\x1b[?25h\x1b[?1049l"
PLAIN = Style.null()
Cell = tuple[str, Style]  # empty text: the right half of a wide character
Change = tuple[int, int, Sequence[Cell]]  # line, column, new cells; none: blanks up to the end of the line
BLANK: Cell = (" ", PLAIN)
MOVE_BYTES = 4  # of a move within a line, as ESC [ 5 C
COLORS = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}


class Painter:
    """The picture on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._colors = console, COLORS.get(console.color_system or "")
        self._lines: list[Text] = []  # what is painted
        self._rows: list[list[Cell]] = []
        self._size = (0, 0)  # columns, lines
        self._style, self._codes = PLAIN, dict[Style, str]()  # of the last character; style -> its sequence
        self._at: tuple[int, int] | None = None  # line and column of the cursor, None: unknown

    def start(self) -> None:
        """Open an empty screen; what was on the terminal is kept."""
        self.forget()
        self._write(OPEN)

    def stop(self) -> None:
        """Close the screen, and show what was on the terminal before."""
        self._write(CLOSE)

    def forget(self) -> None:
        """Drop the known picture, because something else wrote on the terminal: the next call writes all of it."""
        self._lines, self._rows, self._size, self._at, self._style = [], [], (0, 0), None, PLAIN

    @property
    def is_painted(self) -> bool:
        """False until the first picture, and after `fg`: the terminal is empty."""
        return bool(self._lines)

    def paint(self, lines: Sequence[Text], width: int, height: int) -> None:
        """Show lines on a terminal of this size; what does not fit is cut off."""
        parts = []
        if (width, height) != self._size:
            self.forget()
            self._size = (width, height)
            parts.append("\x1b[0m\x1b[2J")
        shown = [*lines[:height], *(Text() for _ in range(height - len(lines)))]
        before, rows = self._lines, self._rows or [[BLANK] * width for _ in range(height)]
        changes: list[Change] = []
        for number, line in enumerate(shown):
            if before and _is_equal(line, before[number]):
                continue
            new = self._cells(line, width)
            changes += _changes(number, rows[number], new)
            rows[number] = new
        self._lines, self._rows = shown, rows
        parts += [self._shortest(changes), self._switch(PLAIN)]
        if any(parts):
            self._write("".join(parts))

    def _cells(self, line: Text, width: int) -> list[Cell]:
        """Return the cells of a line, as many as the terminal is wide."""
        cells: list[Cell] = []
        whole = self._console.get_style(line.style)  # Rich leaves it out of a text without spans
        for segment in line.render(self._console):
            style = segment.style or whole
            for character in segment.text:
                size = cell_len(character)
                if size == 0 and cells:  # it combines with the one before
                    cells[-1] = (cells[-1][0] + character, cells[-1][1])
                cells += [(character, style), ("", style)][:size]
        del cells[width:]
        if cells and cell_len(cells[-1][0]) == 2:  # its right half does not fit
            cells[-1] = BLANK
        return cells + [BLANK] * (width - len(cells))

    def _shortest(self, changes: Sequence[Change]) -> str:
        """Return what makes these changes, line by line or column by column, whichever has fewer bytes."""
        state, found = (self._at, self._style), []
        for order in (changes, sorted(changes, key=lambda change: (change[1], change[0]))):
            self._at, self._style = state
            text = "".join(map(self._change, order))
            found.append((len(text.encode()), text, self._at, self._style))
        _, text, self._at, self._style = min(found, key=lambda one: one[0])
        return text

    def _change(self, change: Change) -> str:
        """Return what makes one change."""
        line, column, cells = change
        text = self._move(line, column)
        if not cells:
            self._at = (line, column)
            return text + self._switch(PLAIN) + "\x1b[K"  # it fills with the current background
        # In the last column, the terminal waits with the move to the next line: the place is unknown.
        self._at = (line, column + len(cells)) if column + len(cells) < self._size[0] else None
        return text + self._text(cells)

    def _move(self, line: int, column: int) -> str:
        """Return the shortest sequence that moves the cursor to a cell."""
        absolute = f"\x1b[{line + 1};{column + 1}H"
        if self._at is None or line < self._at[0]:
            return absolute
        down, right = line - self._at[0], column - self._at[1]
        vertical = "" if not down else f"\x1b[{down if down > 1 else ''}B"
        sideways = [f"\x1b[{column + 1}G"]
        if right <= 0:
            sideways.append("\b" * -right)
        else:
            sideways.append(f"\x1b[{right if right > 1 else ''}C")
        return min(absolute, vertical + min(sideways, key=len), key=len)

    def _text(self, cells: Sequence[Cell]) -> str:
        """Return cells as text, with a control sequence per change of style."""
        return "".join(self._switch(style) + character for character, style in cells)

    def _switch(self, style: Style) -> str:
        """Return what switches to a style from that of the last character, which the terminal keeps."""
        if style == self._style:
            return ""
        self._style = style
        if style not in self._codes:
            shown = style.without_color if self._console.no_color else style
            start = shown.render(".", color_system=self._colors).partition(".")[0]
            self._codes[style] = start.replace("\x1b[", "\x1b[0;", 1) or "\x1b[0m"  # without what was set before
        return self._codes[style]

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def _is_equal(one: Text, other: Text) -> bool:
    return one.plain == other.plain and one.spans == other.spans and one.style == other.style


def _changes(line: int, old: Sequence[Cell], new: Sequence[Cell]) -> Iterator[Change]:
    """Yield what turns a line of the terminal into another one."""
    end = len(new)
    while end and new[end - 1] == BLANK:
        end -= 1
    for first, last in _spans(old[:end], new[:end]):
        yield line, first, new[first:last]
    if any(cell != BLANK for cell in old[end:]):
        yield line, end, ()


def _spans(old: Sequence[Cell], new: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of cells to write, each with whole characters; those with few bytes between are joined."""
    first = last = -1
    for at, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        if first >= 0 and _is_near(new, last, at):
            last = at + 1
            continue
        if first >= 0:
            yield _whole(new, first, last)
        first, last = at, at + 1
    if first >= 0:
        yield _whole(new, first, last)


def _is_near(cells: Sequence[Cell], last: int, at: int) -> bool:
    """Return whether equal cells between two changes have at most as many bytes as a move over them."""
    between = cells[last:at]
    has_one_style = all(style == cells[last - 1][1] for _, style in between)
    return has_one_style and len("".join(character for character, _ in between).encode()) <= MOVE_BYTES


def _whole(cells: Sequence[Cell], first: int, last: int) -> tuple[int, int]:
    """Return a range extended to the halves of wide characters at its ends."""
    while first > 0 and not cells[first][0]:
        first -= 1
    while last < len(cells) and not cells[last][0]:
        last += 1
    return first, last
