"""A program in a terminal that knows what is on it: tmux."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from skips import need


class Tmux:
    """Runs one command in a terminal of a size (columns, lines), and prints its exit status behind it."""

    def __init__(self, folder: Path, size: tuple[int, int], environ: Mapping[str, str], *command: str):
        self._tmux = [str(need("tmux")), "-S", str(folder / "tmux"), "-f", "/dev/null"]
        script = folder / "start.sh"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environ.items())
        script.write_text(f"{exports}{shlex.join(command)}; echo status=$?; sleep 60\n")
        self("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), f"sh {script}")

    def __call__(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True, timeout=20).stdout

    def screen(self) -> str:
        return self("capture-pane", "-p")
