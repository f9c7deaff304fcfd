"""Make commands for the user to paste: with the checkout, and with the places that the user gave to this command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix import ROOT
from kmatrix.text import shown

# Arguments that are paths, and start at the current folder. RESULTS_DIR starts at the checkout, wherever one is.
PATHS = frozenset({"O", "KCONFIG", "KCONFIG_CONFIG", "TARGET"})
# Not needed next to one of these, which a message gives as a path.
NEEDLESS = dict.fromkeys(("RESULTS_DIR", "TARGET"), frozenset({"TARGET", "RUN", "CHECKPOINT", "BASE"}))
# make's -C, alone or after letters without an argument, or its long form.
FOLDER = re.compile(r"-[bBdeikLmnpqrRsStvw]*C|--di")
# `make continue TARGET='a b'` in a sentence: the target, and its arguments as a shell reads them.
COMMAND = re.compile(r"\bmake ([a-z][\w+<>-]*)((?: [A-Z_]+=(?:'[^']*'|\"[^\"]*\"|[^\s'\"`,;)])*)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How a command was called, for the commands that it prints."""

    given: Mapping[str, str] = field(default_factory=dict)  # arguments that a further command needs, too
    takes: Callable[[str, str], bool] = lambda *_: False  # (target, argument); "": is there such a target?
    elsewhere: bool = False  # called by make -C: the user's shell is in another folder


LIBRARY = Invocation()  # no command: a notebook, a test
_called: ContextVar[Invocation] = ContextVar("called")


@contextmanager
def called_as(call: Invocation) -> Iterator[None]:
    """Print commands for a user who has called a command like this."""
    token = _called.set(call)
    try:
        yield
    finally:
        _called.reset(token)


def called_with_folder(process: int | None = None, proc: Path = Path("/proc")) -> bool:
    """Return whether the make that called this process, by default the current one, has -C in its command line."""
    process = os.getpid() if process is None else process
    for _ in range(3):  # make, maybe a shell, this process
        try:
            process = int((proc / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            program, *words = (proc / str(process) / "cmdline").read_text(errors="replace").split("\0")
        except (OSError, ValueError, IndexError):  # no /proc, a parent that has ended or is hidden
            return False
        if Path(program).name in ("make", "gmake"):
            return any(FOLDER.match(word) for word in words)
    return False


def make_command(target: str, matrix: Path | None = None, /, **arguments: str) -> str:
    """Return a make command for the user to paste, with quotes where a shell needs them. matrix: its TARGET=.

    Messages name a matrix by its path, not by its name: the name is found only below the RESULTS_DIR of .config.
    The arguments with which this command was called, and which that one needs, are kept.

    >>> make_command("status", Path("/my results/test_matrix_results_1"), JSON="1").removeprefix(_make())
    " status TARGET='/my results/test_matrix_results_1' JSON=1"
    """
    place = {} if matrix is None else {"TARGET": str(matrix.resolve()) if _is_far() else shown(matrix)}
    words = {**place, **arguments}
    return " ".join([_make(), target, *_typed(words), *_typed(_kept(target, words))])


def pasteable(text: str) -> str:
    """Return a message whose make commands have the arguments that `make_command` would keep."""

    def completed(found: re.Match[str]) -> str:
        target, words = found[1], found[2]
        if not _called.get(LIBRARY).takes(target, ""):  # "make it", "make sure"
            return found[0]
        there = dict.fromkeys(re.findall(r" ([A-Z_]+)=", words), "")
        return " ".join([f"{_make()} {target}{words}", *_typed(_kept(target, there))])

    return COMMAND.sub(completed, text)


def _make() -> str:
    """Return `make`, with the checkout if the user is elsewhere."""
    return f"make -C {shlex.quote(str(ROOT))}" if _is_far() or _called.get(LIBRARY).elsewhere else "make"


def _is_far() -> bool:
    """Return whether this process runs in another folder than the checkout, so that relative paths change."""
    try:
        return not ROOT.samefile(Path.cwd())
    except OSError:  # the current folder was removed
        return True


def _kept(target: str, words: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of this call that another command needs, without those that it has."""
    call = _called.get(LIBRARY)
    return {
        name: _reachable(name, text)
        for name, text in call.given.items()
        if name not in words and call.takes(target, name) and not NEEDLESS.get(name, frozenset()) & words.keys()
    }


def _reachable(name: str, text: str) -> str:
    """Return an argument as the printed command needs it: make -C changes the meaning of a relative path."""
    path = Path(text).expanduser()
    # TARGET= may also be the name of a matrix in RESULTS_DIR.
    is_path = name in PATHS and (name != "TARGET" or path.exists())
    return str(path.absolute()) if is_path and _is_far() else text


def _typed(words: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(text)}" for name, text in words.items()]
