"""The table of commands: find a command, parse its arguments, call it, and return its exit status.

The module of a command is imported when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kmatrix import ROOT
from kmatrix.errors import ConfigError
from kmatrix.redaction.forms import is_key_name
from kmatrix.text import make_command

WIDTH, HELP_COLUMN = 110, 24  # columns of the help text
# Read by the Makefile or by make itself; allowed on any make command line.
MAKE_ONLY = frozenset({"PYTHON", "TORCH_INDEX", "V", "SHELL"})
SELECT = ("TARGET", "RUN", "RESULTS_DIR")  # matrices and runs: the titles of the help explain them
PLACES = frozenset({"KCONFIG_CONFIG", "O"})  # of the configuration; every command takes them, as in Linux
CONFIGURE, PLAN, STATUS = "kmatrix.cli.configure:", "kmatrix.cli.plan:", "kmatrix.cli.watch.status:"
RUN, REPRODUCE, CONTROL = "kmatrix.cli.run:", "kmatrix.cli.reproduce:", "kmatrix.cli.control:"
RESULTS, MACHINE, MODELS = "kmatrix.cli.results:", "kmatrix.cli.machine:", "kmatrix.cli.models:"
PAGES, TRACKERS = "kmatrix.cli.pages:", "kmatrix.cli.trackers:"
# Arguments that many commands take, with their forms: 1 is a switch, 1..9 a range of integers, a word the only value,
# and nothing any text.
MATRIX = "TARGET= RESULTS_DIR="
RUNS = f"RUN= {MATRIX}"
START_TAKES = "GPUS= HOSTS= SIMULATE="
RESUME_TAKES = f"CODE=checkout {START_TAKES} {RUNS}"
PORT = "PORT=0..65535"
ALIASES = {"test_matrix": "test-matrix"}  # as the documents call it


def main(argv: Sequence[str]) -> int:
    """Run `COMMAND [NAME=value ...]`, and return the exit status. Raises KmatrixError for what the user can fix.

    `--make TARGET`, which only the Makefile passes, takes the assignments from KMATRIX_WORDS.
    """
    from_make = len(argv) > 1 and argv[0] == "--make"
    name, *words = argv[from_make:] or ["help"]
    if from_make:
        words = from_make_words(os.environ.pop("KMATRIX_WORDS", ""))
    if name in ("help", "-h", "--help"):
        print(usage("make TARGET" if from_make else "kmatrix COMMAND"))
        return 0
    return _call(*parse(name, words, from_make=from_make))


def usage(program: str) -> str:
    """Return the text of `kmatrix help` and of `make help`."""
    lines = [f"usage: {program} [NAME=value ...]"]
    for title, commands in GROUPS.items():
        lines += ["", title]
        for name, command in commands.items():
            text = f"  {name:{HELP_COLUMN - 3}} {command.help}"
            takes = {name: "N" if ".." in form else form for name, form in command.takes.items() if name not in SELECT}
            text += f" [{' '.join(map('='.join, takes.items()))}]" if takes else ""
            lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * HELP_COLUMN)
    return "\n".join(lines)


def _call(command: Command, arguments: Arguments) -> int:
    # Imported here: status must not wait for the imports of commands that train.
    module, _, function = command.handler.partition(":")
    return int(getattr(importlib.import_module(module), function)(arguments) or 0)


class Command(NamedTuple):
    """One command, and the make target of the same name. This table is the only place of its help."""

    handler: str  # module:function; "" for a target that only make has
    help: str
    arguments: str = ""  # its own, each with its form: "JSON=1 PORT=1..65535 TARGET="
    assigns: bool = False  # other names are Kconfig assignments

    @property
    def takes(self) -> dict[str, str]:
        """Its own arguments with their forms."""
        return dict(re.findall(r"(\w+)=(\S*)", self.arguments))


class Arguments(NamedTuple):
    """The arguments of a command."""

    target: str  # name of the command; defconfig-<name> as typed
    values: Mapping[str, str] = {}  # its own arguments, checked
    assignments: Mapping[str, str] = {}  # Kconfig assignments, in the typed order
    takes: Collection[str] = ()  # names of its own arguments

    @property
    def config(self) -> Path:
        """The path of .config: KCONFIG_CONFIG=, else in O=, else in the project's root; of a link, its target."""
        return Path(self.get("KCONFIG_CONFIG") or Path(self.get("O") or ROOT) / ".config").resolve()

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name) or default  # NAME= counts as not given, as everywhere in make

    def is_on(self, name: str) -> bool:
        """Return whether a switch is given as 1 or y."""
        return self.get(name) in ("1", "y")

    def number(self, name: str) -> int | None:
        """Return an integer, None if it is not given."""
        return int(text) if (text := self.get(name)) else None

    @property
    def words(self) -> list[str]:
        """The assignments as typed: NAME=value."""
        return [f"{name}={text}" for name, text in self.assignments.items()]

    @property
    def command(self) -> str:
        """The whole command, quoted for a shell, for the records of a matrix."""
        return make_command(self.target, None, **self.values, **self.assignments)


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "First steps": {
        "quickstart": Command(
            RUN + "quickstart", "compare two optimizers on the CPU in minutes", START_TAKES, assigns=True
        ),
        "list-defconfigs": Command(CONFIGURE + "list_defconfigs", "list the ready-made configurations"),
        "defconfig": Command(
            CONFIGURE + "defconfig",
            "start from the defaults; defconfig-<name>: from a ready-made one",
            "DEFCONFIG=",
            assigns=True,
        ),
        "menuconfig": Command(CONFIGURE + "menuconfig", "edit .config in the terminal"),
        "test-matrix-dry-run": Command(
            PLAN + "dry_run", "list the runs, and why cells are excluded", "GPUS=", assigns=True
        ),
        "test-matrix": Command(RUN + "test_matrix", "run the matrix", f"DETACH=1 {START_TAKES}", assigns=True),
        "status": Command(
            STATUS + "status", "show the state of every run, live on a terminal", f"STATUS= JSON=1 {MATRIX}"
        ),
        "summary": Command(RESULTS + "summary", "print the results; write summary_report.txt and report.html", MATRIX),
        "doctor": Command(MACHINE + "doctor", "check this machine and suggest fixes", "JSON=1"),
        "help": Command("", "show this list"),
    },
    "Configuration (NAME=value sets a symbol; O=<folder> or KCONFIG_CONFIG=<file> for another .config)": {
        "olddefconfig": Command(CONFIGURE + "olddefconfig", "add new symbols with their defaults", assigns=True),
        "savedefconfig": Command(CONFIGURE + "savedefconfig", "write the lines that are not defaults", "DEFCONFIG="),
        "diffconfig": Command(CONFIGURE + "diffconfig", "compare .config.old with .config"),
    },
    "Running (NAME=value overrides .config once; NAME=a,b makes an axis; GPUS=0,2 selects GPUs)": {
        "plan": Command(
            PLAN + "plan", "forecast memory, time, energy, cost and disk of every run", "GPU= GPUS=", assigns=True
        ),
        "prepare-data": Command(
            PLAN + "prepare", "download and tokenize the data of the matrix", "GPUS=", assigns=True
        ),
        "train": Command(RUN + "train", "run one configuration", f"DETACH=1 {START_TAKES}", assigns=True),
        "continue": Command(
            RUN + "continue_",
            "run what has not finished; NAME=value changes settings that change no result",
            f"RETRY_FAILED=1 RESUME= MICRO_BATCH=1..9999999 DETACH=1 {RESUME_TAKES}",
            assigns=True,
        ),
        "test-rerun": Command(
            RUN + "test_rerun", "rerun runs from the start", f"STATUS= DETACH=1 {RESUME_TAKES}", assigns=True
        ),
        "add": Command(
            RUN + "add", "add values of an axis to a matrix", f"DETACH=1 {START_TAKES} {MATRIX}", assigns=True
        ),
        "reproduce": Command(
            REPRODUCE + "reproduce", "repeat a run, and compare bit for bit", "GPUS= RUN=", assigns=True
        ),
    },
    "While it runs (TARGET=<matrix>, the newest by default; RUN=<name, number or pattern>)": {
        "estimate": Command(
            "kmatrix.cli.watch.estimate:estimate", "time left and cost of every run", f"JSON=1 {MATRIX}"
        ),
        "logs": Command(
            "kmatrix.cli.watch.logs:logs",
            "follow the output of a run, or of one of its nodes",
            f"NODE=0..999999 {RUNS}",
        ),
        "stop": Command(CONTROL + "stop", "stop a matrix; its runs save a checkpoint first", MATRIX),
        "hold": Command(CONTROL + "hold", "pause runs: they save a checkpoint and free their GPUs", f"STATUS= {RUNS}"),
        "release": Command(CONTROL + "release", "continue runs that were held", f"STATUS= {RUNS}"),
        "gputop": Command(MACHINE + "gputop", "watch every GPU on one screen", "REPLAY= RUN= GPUS= SIMULATE="),
        "gpu-exporter": Command(MACHINE + "gpu_exporter", "serve every GPU for Prometheus", f"{PORT} GPUS= SIMULATE="),
    },
    "Results (TARGET=<matrix>, the newest by default)": {
        "update-graphs": Command(RESULTS + "graphs", "draw the graphs", MATRIX),
        "compare": Command(
            RESULTS + "compare", "compare two matrices or runs", "BASE= NEW= JSON=1 FAIL_ON=worse RESULTS_DIR="
        ),
        "gallery": Command(RESULTS + "gallery", "write gallery.html, a page of all matrices", "RESULTS_DIR="),
        "results-schema": Command(RESULTS + "results_schema", "print the JSON Schema of results.json"),
    },
    "Trackers (TRACKER=wandb,trackio,tensorboard selects them for a run)": {
        "track-sync": Command(TRACKERS + "sync", "upload missing data of TARGET=", f"PROJECT= TRACKER= {RUNS}"),
        "trackio-view": Command(PAGES + "trackio_view", "serve Trackio's page", f"PROJECT= {PORT} RESULTS_DIR="),
        "trackio-web": Command(PAGES + "web", "print the address of that page", "PROJECT= RESULTS_DIR="),
        "tensorboard": Command(PAGES + "show", "serve TensorBoard's page of a matrix", f"{PORT} {MATRIX}"),
        "wandb-test": Command(TRACKERS + "wandb_test", "send a synthetic run to W&B, and read it back", "PROJECT="),
        "trackio-test": Command(TRACKERS + "trackio_test", "the same with Trackio", "PROJECT="),
    },
    "Models (CHECKPOINT=<file, run or matrix>, the best of the newest matrix by default)": {
        "list-checkpoints": Command(
            MODELS + "list_checkpoints", "list checkpoints: step, kinds, loss, size, file", RUNS
        ),
        "sample": Command(MODELS + "sample", "generate text", f"PROMPT= TOKENS=1..100000 CHECKPOINT= {MATRIX}"),
        "serve": Command(MODELS + "serve", "serve OpenAI's completions API", f"{PORT} CHECKPOINT= {MATRIX}"),
        "export": Command(MODELS + "export", "write a model in Hugging Face's format", f"OUTPUT= CHECKPOINT= {MATRIX}"),
        "import-model": Command(MODELS + "import_model", "make a checkpoint of such a model", "MODEL= OUTPUT="),
    },
    "Set-up and cleaning (results, checkpoints and datasets are never touched)": {
        "setup": Command("", "create .venv with everything that training needs"),
        "setup-trackers": Command("", "install W&B, Trackio and TensorBoard, too"),
        "clean": Command("", "delete caches"),
        "mrproper": Command("", "delete caches and .config"),
    },
    "Development": {
        "check": Command("", "run formatter, linter, type checker and fast tests"),
        "check-all": Command("", "the same, and the stories: what a user does"),
        "check-nightly": Command("", "run the tests that may be random, or need another system"),
        "check-gpu": Command("", "run the tests that need a GPU", "ON=cpu"),
        "bench": Command("", "measure the speed and the memory of the trainer and of kmatrix"),
    },
}


# Without the targets that exist only in the Makefile: they are in GROUPS for the help.
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items() if command.handler}


def find_command(target: str) -> Command:
    """Return the command of a target. defconfig-<name> and <name>_defconfig call defconfig."""
    name = ALIASES.get(target, target)
    if name in COMMANDS:
        return COMMANDS[name]
    if name.startswith("defconfig-") or name.endswith("_defconfig"):
        return COMMANDS["defconfig"]
    if any(name in group for group in GROUPS.values()):
        raise ConfigError(f"{target} is a make target, not a command of kmatrix", hint=f"run make {target}")
    near = difflib.get_close_matches(name, [name for group in GROUPS.values() for name in group], 3)
    raise ConfigError(
        f"unknown command {target}", hint=f"did you mean {' or '.join(near)}?" if near else "see `make help`"
    )


def parse(target: str, words: Sequence[str], *, from_make: bool = False) -> tuple[Command, Arguments]:
    """Return the command and its arguments. Other names are assignments, or refused if it takes none."""
    command = find_command(target)
    forms = command.takes | dict.fromkeys(PLACES, "")
    values: dict[str, str] = {}
    assignments: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{word!r} is not NAME=value", hint="see `make help`")
        if set(text) & {"\n", "\r", "\0"}:  # other control characters may be part of the name of an existing file
            raise ConfigError(f"{name}={text!a}", why="control characters are not allowed")
        if name in values or name in assignments:
            raise ConfigError(f"{name} is given twice")
        if name in forms:
            values[name] = _checked(name, forms[name], text)
        elif from_make and name in MAKE_ONLY:
            continue
        elif is_key_name(name):  # before assignments: its value must not appear in an error about an unknown symbol
            raise _key_refused(name)
        elif command.assigns:
            assignments[name] = text
        else:
            raise _unknown_argument(target, command, name)
    return command, Arguments(ALIASES.get(target, target), values, assignments, forms.keys())


def _checked(name: str, form: str, text: str) -> str:
    """Return the value of an argument. Raises ConfigError if it does not have the form."""
    low, is_range, high = form.partition("..")
    if not text or not form:
        return text
    if form == "1":
        fits, expected = text in ("0", "1", "n", "y"), "1 or 0"
    elif is_range:
        is_integer = text.isascii() and text.isdecimal() and len(text) <= len(high)
        fits, expected = is_integer and int(low) <= int(text) <= int(high), f"an integer from {low} to {high}"
    else:
        fits, expected = text == form, form
    if not fits:
        raise ConfigError(f"invalid {name}={text}", why=f"expected {expected}")
    return text


def from_make_words(text: str) -> list[str]:
    """Return the NAME=value words of the make command line, in the typed order.

    make keeps them in reverse order, with backslashes before blanks and $ doubled.
    No shell parses them, so quotes are ordinary characters.
    """
    # A line break in a value is escaped like a blank, or not at all: only blanks and tabs separate words.
    found = re.findall(r"(?:\\.|[^ \t\\])+", text, re.DOTALL)
    return [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$") for word in reversed(found)]


def _key_refused(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not accepted on the command line",
        why="every user of this machine can read a command line, and it is recorded with the results",
        hint=f"export {name} in your shell before make, or use the login of the tracker",
    )


def _unknown_argument(target: str, command: Command, name: str) -> ConfigError:
    takes = sorted(command.takes) or ["no arguments"]
    near = difflib.get_close_matches(name, takes, 1)
    return ConfigError(
        f"{target} does not take {name}",
        why=f"it takes {', '.join(takes)}",
        hint=f"did you mean {near[0]}?" if near else "",
    )
