"""Run a command in a tmux terminal and read its screen."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from skips import require_program


class Tmux:
    """Run one command in a terminal of a size (columns, lines), and print its exit status after it."""

    def __init__(self, folder: Path, size: tuple[int, int], environ: Mapping[str, str], *command: str):
        self._tmux = [str(require_program("tmux")), "-S", str(folder / "tmux"), "-f", "/dev/null"]
        script = folder / "start.sh"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environ.items())
        script.write_text(f"{exports}{shlex.join(command)}; echo status=$?; sleep 60\n")
        self("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), f"sh {script}")

    def __call__(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True, timeout=20).stdout

    def screen(self) -> str:
        return self("capture-pane", "-p")
