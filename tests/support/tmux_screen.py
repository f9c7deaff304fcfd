"""Run a command in a tmux terminal and read its screen."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from skips import require_program

LEFT_S = 3600  # longer than any test
ANSWER_S = 120  # on a busy machine


class Tmux:
    """Run one command in a terminal of a size (columns, lines), and print its exit status after it.

    The terminal stays until kill-server. If nobody sends that, it ends after LEFT_S.
    """

    def __init__(self, folder: Path, size: tuple[int, int], environ: Mapping[str, str], *command: str):
        self._tmux = [str(require_program("tmux")), "-S", str(folder / "tmux"), "-f", "/dev/null"]
        script = folder / "start.sh"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environ.items())
        # Ctrl+C and Ctrl+\\ in the terminal reach the shell, too, which has to go on.
        exports += "trap : INT QUIT\n"
        script.write_text(f"{exports}{shlex.join(command)}; echo status=$?; exec sleep {LEFT_S}\n")
        self("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), f"sh {script}")

    def __call__(self, *arguments: str) -> str:
        command = [*self._tmux, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout

    def screen(self) -> str:
        return self("capture-pane", "-p")
