"""The table of commands: find a command, parse its arguments, call it, and return its exit status.

The module of a command is imported when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix import ROOT
from kmatrix.errors import ConfigError
from kmatrix.redaction.redactor import is_key_name

WIDTH, HELP_COLUMN = 110, 32  # columns of the help text
# Read by the Makefile or by make itself; allowed on any make command line.
MAKE_ONLY = frozenset({"PYTHON", "TORCH_INDEX", "V", "SHELL"})
PLACES = frozenset({"KCONFIG_CONFIG", "O"})  # of the configuration; every command takes them, as in Linux
CONFIGURE, PLAN, STATUS = "kmatrix.cli.configure:", "kmatrix.cli.plan:", "kmatrix.cli.status:"
START, RESUME = "kmatrix.cli.running.start:", "kmatrix.cli.running.resume:"
REPRODUCE = "kmatrix.cli.running.reproduce:"
RESULTS, MACHINE = "kmatrix.cli.results:", "kmatrix.cli.machine:"
LOGS, STOP, REQUEST = (f"kmatrix.cli.control.{name}:" for name in ("logs", "stop", "requests"))
PAGES, TRACKERS, MODELS = "kmatrix.cli.pages:", "kmatrix.cli.trackers:", "kmatrix.cli.models:"
# Arguments that many commands take.
PAGE = "PORT="
CHECKPOINT = "CHECKPOINT= TARGET= RESULTS_DIR="
MATRIX = "TARGET= RESULTS_DIR="
# Symbols that `continue` may change, because they say how jobs are submitted, not what they train.
OF_SCHEDULER = re.compile(r"(SLURM|K8S)_[A-Z0-9_]+|GPUS_PER_NODE|PARALLEL_JOBS|PACK_NODES")
RUNS = "TARGET= RUN= RESULTS_DIR="
START_TAKES = "GPUS= HOSTS= PREFLIGHT=1 SIMULATE="
RESUME_TAKES = f"{RUNS} CHECKPOINT_DIR= TRACKER= GPUS= HOSTS= SIMULATE= CODE=checkout BUDGET_HOURS= BUDGET_DOLLARS="
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
            if command.arguments:
                text += f" [{command.arguments}]"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * HELP_COLUMN)
    return "\n".join(lines)


def _call(command: Command, arguments: Arguments) -> int:
    # Imported here: status must not wait for the imports of commands that train.
    module, _, function = command.handler.partition(":")
    return int(getattr(importlib.import_module(module), function)(arguments) or 0)


def yes(arguments: Arguments, name: str) -> bool:
    """Return whether NAME=1 or NAME=y was given; False for NAME=0, NAME=n or no NAME."""
    text = arguments.get(name)
    if text not in ("", "0", "1", "n", "y"):
        raise ConfigError(f"{name}={text}", why="expected 1 or 0")
    return text in ("1", "y")


@dataclass(frozen=True, slots=True)
class Command:
    """One command, and the make target of the same name. This table is the only place of its help."""

    handler: str  # module:function; "" for a target that only make has
    help: str
    arguments: str = ""  # its own, as the help shows them: "TARGET= JSON=1"
    assigns: bool = False  # other names are Kconfig assignments
    settings: bool = False  # settings of a scheduler are assignments

    @property
    def takes(self) -> frozenset[str]:
        """The names of its own arguments."""
        return frozenset(re.findall(r"(\w+)=", self.arguments))

    @property
    def names(self) -> frozenset[str]:
        """The names of all arguments, without the assignments."""
        return self.takes | PLACES


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a command."""

    target: str  # name of the command; defconfig-<name> as typed
    values: Mapping[str, str] = field(default_factory=dict)  # its own arguments
    assignments: Mapping[str, str] = field(default_factory=dict)  # Kconfig assignments, in the typed order
    takes: frozenset[str] = frozenset()  # names of its own arguments

    @property
    def config(self) -> Path:
        """The path of .config: KCONFIG_CONFIG=, else in O=, else in the project's root; of a link, its target."""
        path = Path(self.get("KCONFIG_CONFIG") or Path(self.get("O") or ROOT) / ".config")
        return path.resolve() if path.is_symlink() else path

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name) or default  # NAME= counts as not given, as everywhere in make

    @property
    def all_words(self) -> list[str]:
        """All arguments as typed: NAME=value."""
        return [f"{name}={text}" for name, text in self.values.items()] + self.words

    @property
    def words(self) -> list[str]:
        """The assignments as typed: NAME=value."""
        return [f"{name}={text}" for name, text in self.assignments.items()]


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Set-up": {
        "help": Command("", "show this list"),
        "setup": Command("", "create .venv with everything that training needs"),
        "setup-trackers": Command("", "install W&B, Trackio and TensorBoard too, for TRACKER="),
        "quickstart": Command(
            START + "quickstart", "compare two optimizers on the CPU in minutes", START_TAKES, assigns=True
        ),
        "doctor": Command(MACHINE + "doctor", "check this machine and suggest fixes", "JSON=1"),
    },
    "Configuration (NAME=value sets a symbol; O= KCONFIG_CONFIG=)": {
        "menuconfig": Command(CONFIGURE + "menuconfig", "edit .config in the terminal"),
        "list-defconfigs": Command(CONFIGURE + "list_defconfigs", "list defconfigs and fragments"),
        "defconfig": Command(
            CONFIGURE + "defconfig",
            "start from the defaults; defconfig-<name>[+fragment]: from a defconfig",
            "DEFCONFIG=",
            assigns=True,
        ),
        "olddefconfig": Command(CONFIGURE + "olddefconfig", "add new symbols with their defaults", assigns=True),
        "savedefconfig": Command(
            CONFIGURE + "savedefconfig", "write only the lines that differ from the defaults", "DEFCONFIG="
        ),
        "diffconfig": Command(
            CONFIGURE + "diffconfig", "compare .config.old with .config, or OLD= with NEW=", "OLD= NEW="
        ),
    },
    "Running (NAME=value overrides .config once; NAME=a,b makes an axis; GPUS=0,2 selects GPUs)": {
        "prepare-data": Command(
            PLAN + "prepare", "download and tokenize the data of the matrix", "GPUS=", assigns=True
        ),
        "test-matrix-dry-run": Command(
            PLAN + "dry_run", "list the runs, and the excluded cells with the reason", "GPUS=", assigns=True
        ),
        "plan": Command(
            PLAN + "plan",
            "forecast memory, time, energy, cost and disk space of every run",
            "GPU= GPUS=",
            assigns=True,
        ),
        "test-matrix": Command(START + "test_matrix", "run the matrix", f"DETACH=1 WAIT=1 {START_TAKES}", assigns=True),
        "train": Command(START + "train", "run one configuration", f"DETACH=1 WAIT=1 {START_TAKES}", assigns=True),
        "continue": Command(
            RESUME + "continue_",
            "run what has not finished; finished runs are kept",
            f"DETACH=1 WAIT=1 RETRY_FAILED=1 RESUME= MICRO_BATCH= {RESUME_TAKES}",
            settings=True,
        ),
        "test-rerun": Command(
            RESUME + "test_rerun",
            "rerun runs of TARGET= (old results are archived)",
            f"OPTIMIZER= STATUS= WAIT=1 {RESUME_TAKES}",
            settings=True,
        ),
        "add": Command(
            START + "add",
            "add values of an axis to a matrix, and run the new cells",
            f"GPUS= SIMULATE= WAIT=1 {MATRIX}",
            assigns=True,
        ),
        "status": Command(STATUS + "status", "show the state of every run", f"STATUS= JSON=1 {MATRIX}"),
        "estimate": Command("kmatrix.cli.estimate:estimate", "time left and cost of every run", f"JSON=1 {MATRIX}"),
        "logs": Command(LOGS + "logs", "follow the output of a run, on a cluster of node NODE=", f"NODE= {RUNS}"),
        "stop": Command(STOP + "stop", "stop a running matrix; its runs save a checkpoint first", MATRIX),
        "hold": Command(REQUEST + "hold", "pause runs: they save a checkpoint and free their GPUs", f"STATUS= {RUNS}"),
        "release": Command(REQUEST + "release", "continue runs that were held", f"STATUS= {RUNS}"),
        "reproduce": Command(
            REPRODUCE + "reproduce",
            "repeat a run from its own .config, and compare bit for bit",
            "RUN= TRACKER= GPUS=",
            assigns=True,
        ),
        "gputop": Command(MACHINE + "gputop", "watch every GPU on one screen", "RUN= REPLAY= AT= GPUS= SIMULATE="),
        "gpu-exporter": Command(
            MACHINE + "gpu_exporter", "serve every GPU as metrics for Prometheus", "PORT= GPUS= SIMULATE="
        ),
    },
    "Results (TARGET=, the newest by default)": {
        "report": Command(RESULTS + "page", "write report.html, the page of all results", MATRIX),
        "gallery": Command(RESULTS + "gallery", "write gallery.html, a page of all matrices", "MATRICES= RESULTS_DIR="),
        "summary": Command(RESULTS + "summary", "write and print the summary", MATRIX),
        "update-graphs": Command(RESULTS + "graphs", "draw the graphs", MATRIX),
        "compare": Command(
            RESULTS + "compare",
            "compare two matrices or runs",
            "BASE= NEW= JSON=1 FAIL_ON=worse RESULTS_DIR=",
        ),
    },
    "Trackers (TRACKER=wandb,trackio,tensorboard selects them for a run)": {
        "track-sync": Command(
            TRACKERS + "sync",
            "upload missing data of TARGET= to the trackers",
            f"PROJECT= TRACKER= WANDB_OFFLINE=n {RUNS}",
        ),
        "trackio-view": Command(
            PAGES + "trackio_view",
            "serve Trackio's page of the results on this machine",
            f"PROJECT= {PAGE} RESULTS_DIR=",
        ),
        "trackio-web": Command(PAGES + "web", "print the address of that page", "PROJECT= RESULTS_DIR="),
        "tensorboard": Command(PAGES + "show", "serve TensorBoard's page of a matrix", f"{PAGE} {MATRIX}"),
        "wandb-test": Command(TRACKERS + "wandb_test", "send a synthetic run to W&B, and read it back", "PROJECT="),
        "trackio-test": Command(
            TRACKERS + "trackio_test", "store a synthetic run in Trackio, and read it back", "PROJECT="
        ),
    },
    "Checkpoints": {
        "list-checkpoints": Command(
            MODELS + "list_checkpoints", "list the checkpoints: step, kinds, loss, size, file", RUNS
        ),
    },
    "Models (the best checkpoint of the newest matrix by default)": {
        "sample": Command(
            MODELS + "sample",
            "generate text with a trained model",
            f"PROMPT= TOKENS= TEMPERATURE= TOP_K= TOP_P= SEED= DEVICE= {CHECKPOINT}",
        ),
        "serve": Command(
            MODELS + "serve", "serve OpenAI's completions API on this machine", f"{PAGE} DEVICE= {CHECKPOINT}"
        ),
        "export": Command(MODELS + "export", "write a model in Hugging Face's format", f"OUTPUT= {CHECKPOINT}"),
        "import-model": Command(
            MODELS + "import_model", "make a checkpoint of a model in that format", "MODEL= OUTPUT="
        ),
    },
    "Cleaning (results, checkpoints and datasets are never touched)": {
        "clean": Command("", "delete caches"),
        "mrproper": Command("", "delete caches and .config"),
    },
    "Checks of kmatrix itself": {
        "check": Command("", "run formatter, linter, type checker and fast tests"),
        "check-all": Command("", "the same, and the stories: what a user does"),
        "check-nightly": Command("", "run the tests that may be random, or need another system"),
        "check-gpu": Command("", "run the tests that need a GPU", "ON=cpu"),
        "bench": Command("", "measure speed and memory of the trainer and of kmatrix (bench/)"),
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
        if name in command.names:
            values[name] = text
        elif from_make and name in MAKE_ONLY:
            continue
        elif is_key_name(name):  # before assignments: its value must not appear in an error about an unknown symbol
            raise _key_refused(name)
        elif command.assigns or (command.settings and OF_SCHEDULER.fullmatch(name)):
            assignments[name] = text
        else:
            raise _unknown_argument(target, command, name)
    return command, Arguments(ALIASES.get(target, target), values, assignments, command.names)


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
    near = difflib.get_close_matches(name, command.names, 1)
    return ConfigError(
        f"{target} does not take {name}",
        why=f"it takes {', '.join(takes)}",
        hint=f"did you mean {near[0]}?" if near else "",
    )
