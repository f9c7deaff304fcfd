"""What the user does with the processes: sort, filter by user, select one, and send it a signal after a question."""

from __future__ import annotations

import getpass
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmatrix.gpu.processes import ProcessHandle
from kmatrix.gputop.terminal.keyboard import STEPS
from kmatrix.gputop.view import Confirmation, ProcessList, ProcessRow

# Title of a column -> its value, and whether the largest comes first.
SORTS: dict[str, tuple[Callable[[ProcessRow], Any], bool]] = {
    "GPU": (lambda row: row.gpu_index, False),
    "PID": (lambda row: row.pid, False),
    "user": (lambda row: row.user, False),
    "GPU mem": (lambda row: row.memory_mib, True),
    "%SM": (lambda row: row.sm, True),
    "%CPU": (lambda row: row.cpu, True),
    "host mem": (lambda row: row.host_mib, True),
    "time": (lambda row: row.seconds, True),
    "command": (lambda row: row.command or None, False),  # of a process that is not visible, it is unknown
}
SIGNALS = {"I": signal.SIGINT, "T": signal.SIGTERM, "K": signal.SIGKILL}
Key = tuple[int, int]  # GPU index and pid


@dataclass(slots=True)
class ProcessActions:
    """The state of the process table that keys change."""

    focused: bool = False  # the keys up and down move among the processes
    sort: str = "GPU"
    reverse: bool = False
    user: str | None = None
    selected: Key | None = None
    message: str = ""  # the result of the last signal
    _rows: tuple[ProcessRow, ...] = ()  # all, as the driver lists them
    _asked: tuple[signal.Signals, ProcessRow, ProcessHandle] | None = field(default=None)  # a question to the user

    def update(self, rows: Sequence[ProcessRow]) -> None:
        """Replace the processes by the newest ones. The selection stays on its process as long as that is there."""
        self._rows = tuple(rows)
        shown = [_key(row) for row in self.shown()]
        if self.selected not in shown:
            self.selected = shown[0] if shown else None
        self.focused = self.focused and bool(shown)

    def shown(self) -> list[ProcessRow]:
        """Return the processes in the order of the screen. Unknown values come last."""
        value, largest_first = SORTS[self.sort]
        rows = sorted(self._rows, key=_key)
        known = [row for row in rows if value(row) is not None]
        known.sort(key=value, reverse=largest_first != self.reverse)
        rows = known + [row for row in rows if value(row) is None]
        return [row for row in rows if self.user in (None, row.user)]

    def list(self) -> ProcessList:
        """Return what the screen shows."""
        return ProcessList(
            rows=tuple(self.shown()),
            total=len(self._rows),
            sort=f"{self.sort}, reversed" if self.reverse else self.sort,
            user=self.user,
            selected=self.selected if self.focused else None,
        )

    @property
    def question(self) -> Confirmation | None:
        """The question to the user, None if there is none."""
        if self._asked is None:
            return None
        number, row, _ = self._asked
        who = f"run {row.run}" + ("" if row.rank is None else f", rank {row.rank}") if row.run else row.command
        action = f"send {number.name} to process {row.pid} of {row.user or 'an unknown user'}"
        return Confirmation(action=action, about=who)

    def press(self, key: str) -> bool:
        """Handle a key. Return whether it is one of the processes."""
        if self._asked is not None:
            self._answer(key)
            return True
        self.message = ""
        if key == "tab":
            self.focused, self.selected = not self.focused and bool(self.shown()), None  # starts at the first one
        elif key == "s":
            order = list(SORTS)
            self.sort, self.reverse = order[(order.index(self.sort) + 1) % len(order)], False
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "u":
            self._next_user()
        elif key in SIGNALS:
            self._ask(SIGNALS[key])
        elif self.focused and key in STEPS:
            self._move(STEPS[key])
        elif self.focused and key == "escape":
            self.focused = False
        else:
            return False
        self.update(self._rows)
        return True

    def _next_user(self) -> None:
        """Show the processes of the next user; own ones first, all of them after the last user."""
        own = next((row.user for row in self._rows if row.pid and row.user == _own_name()), None)
        users = sorted({row.user for row in self._rows if row.user}, key=lambda user: (user != own, user))
        order = [None, *users]
        at = order.index(self.user) if self.user in order else 0
        self.user = order[(at + 1) % len(order)]

    def _move(self, steps: int) -> None:
        keys = [_key(row) for row in self.shown()]
        if keys:
            at = keys.index(self.selected) if self.selected in keys else 0
            self.selected = keys[min(len(keys) - 1, max(0, at + steps))]

    def _ask(self, number: signal.Signals) -> None:
        row = next((row for row in self.shown() if _key(row) == self.selected), None)
        if not self.focused or row is None:
            self.message = "no process is selected: Tab moves to the processes"
        elif not row.visible:
            self.message = f"process {row.pid} is not visible from here (another container): no signal can be sent"
        else:
            # The handle knows the start of the process: its number may be used again before the answer.
            self._asked = number, row, ProcessHandle(row.pid)

    def _answer(self, key: str) -> None:
        assert self._asked is not None
        number, row, handle = self._asked
        self._asked = None
        if key not in ("y", "Y"):
            self.message = "no signal was sent"
        elif not handle.is_alive():
            self.message = f"process {row.pid} has ended already"
        else:
            try:
                os.kill(row.pid, number)
                self.message = f"sent {number.name} to process {row.pid}"
            except ProcessLookupError:
                self.message = f"process {row.pid} has ended already"
            except PermissionError:
                self.message = f"process {row.pid} belongs to {row.user or 'another user'}: not permitted"


def _key(row: ProcessRow) -> Key:
    return row.gpu_index, row.pid


def _own_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return None
