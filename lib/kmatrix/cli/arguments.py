"""The commands, the arguments that each takes, and how both are read from words or from MAKEFLAGS."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.errors import ConfigError
from kmatrix.redaction import is_key_name

# Read by the Makefile or by make itself; they may stand on any make command line.
MAKE_ONLY = frozenset({"PYTHON", "TORCH_INDEX", "V", "MAKEFLAGS", "SHELL"})
PLACES = frozenset({"KCONFIG", "KCONFIG_CONFIG", "O"})


@dataclass(frozen=True, slots=True)
class Command:
    """One command. handler: module:function.

    takes: names of its arguments.  assigns: other names are Kconfig assignments.
    """

    handler: str
    help: str
    takes: frozenset[str] = frozenset()
    assigns: bool = False
    places: bool = True

    @property
    def names(self) -> frozenset[str]:
        return self.takes | (PLACES if self.places else frozenset())


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a command was given. target: the command's own name as typed.  assignments: NAME -> text, in order."""

    target: str
    values: Mapping[str, str] = field(default_factory=dict)
    assignments: Mapping[str, str] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name) or default

    @property
    def all_words(self) -> list[str]:
        """The command's own arguments and the assignments, as they were typed."""
        return [f"{name}={text}" for name, text in self.values.items()] + self.words

    @property
    def words(self) -> list[str]:
        """The assignments as they were typed."""
        return [f"{name}={text}" for name, text in self.assignments.items()]


CONFIGURE = "kmatrix.cli.configure:"
COMMANDS = {
    "menuconfig": Command(CONFIGURE + "menuconfig", "edit .config in the terminal"),
    "nconfig": Command(CONFIGURE + "menuconfig", "the same as menuconfig"),
    "oldconfig": Command(CONFIGURE + "oldconfig", "ask for symbols that .config does not have yet", assigns=True),
    "olddefconfig": Command(CONFIGURE + "olddefconfig", "give new symbols their defaults", assigns=True),
    "defconfig": Command(CONFIGURE + "defconfig", "DEFCONFIG=name[+fragment]", frozenset({"DEFCONFIG"}), assigns=True),
    "savedefconfig": Command(
        CONFIGURE + "savedefconfig", "write .config's own lines to DEFCONFIG=", frozenset({"DEFCONFIG"})
    ),
    "alldefconfig": Command(CONFIGURE + "alldefconfig", ".config of defaults"),
    "allyesconfig": Command(CONFIGURE + "allyesconfig", ".config with every bool y"),
    "allnoconfig": Command(CONFIGURE + "allnoconfig", ".config with every bool n"),
    "randconfig": Command(CONFIGURE + "randconfig", "a random .config (KCONFIG_SEED=)", frozenset({"KCONFIG_SEED"})),
    "listnewconfig": Command(CONFIGURE + "listnewconfig", "list symbols that .config does not have"),
    "helpnewconfig": Command(CONFIGURE + "helpnewconfig", "the same, with their help"),
    "diffconfig": Command(CONFIGURE + "diffconfig", "compare OLD= and NEW=", frozenset({"OLD", "NEW"})),
    "list-defconfigs": Command(CONFIGURE + "list_defconfigs", "list the ready configurations"),
    "quickstart": Command(
        "kmatrix.cli.run:quickstart",
        "compare two optimizers on the CPU, from nothing",
        frozenset({"PREFLIGHT", "SIMULATE", "YES"}),
        assigns=True,
    ),
    "prepare-data": Command(
        "kmatrix.cli.data:prepare", "fetch or make the data of the matrix", frozenset({"GPUS"}), assigns=True
    ),
    "test-matrix-dry-run": Command(
        "kmatrix.cli.run:dry_run", "list the runs and what is cut", frozenset({"GPUS"}), assigns=True
    ),
    "plan": Command(
        "kmatrix.cli.plan:plan",
        "what each run needs: memory, time, energy, money, disk",
        frozenset({"GPU", "GPUS", "HOURS", "SECONDS_PER_STEP", "TOKENS_PER_SECOND"}),
        assigns=True,
    ),
    "doctor": Command(
        "kmatrix.cli.doctor:doctor", "what this machine has, and what to mend; JSON=1 for programs", frozenset({"JSON"})
    ),
    "test-matrix": Command(
        "kmatrix.cli.run:test_matrix",
        "run the matrix; PREFLIGHT=1 tries two steps of each shape first",
        frozenset({"DETACH", "GPUS", "PREFLIGHT", "SIMULATE", "YES"}),
        assigns=True,
    ),
    "continue": Command(
        "kmatrix.cli.again:continue_",
        "go on with a matrix: its finished runs stay",
        frozenset(
            {"DETACH", "GPUS", "RESULTS_DIR", "RESUME", "RETRY_FAILED", "RUN", "SIMULATE", "TARGET", "TRACKER", "YES"}
        ),
    ),
    "train": Command(
        "kmatrix.cli.run:train",
        "run one configuration",
        frozenset({"GPUS", "PREFLIGHT", "SIMULATE", "YES"}),
        assigns=True,
    ),
    "test-rerun": Command(
        "kmatrix.cli.again:test_rerun",
        "run runs of TARGET= anew; their old results are kept aside",
        frozenset({"GPUS", "OPTIMIZER", "RESULTS_DIR", "RUN", "SIMULATE", "TARGET", "TRACKER", "YES"}),
    ),
    "status": Command(
        "kmatrix.cli.status:status",
        "how each run of a matrix stands; JSON=1 for programs",
        frozenset({"JSON", "RESULTS_DIR", "TARGET"}),
    ),
    "estimate": Command(
        "kmatrix.cli.estimate:estimate",
        "when each run of a matrix will have ended, and what it costs; JSON=1 for programs",
        frozenset({"JSON", "RESULTS_DIR", "TARGET"}),
    ),
    "logs": Command("kmatrix.cli.logs:logs", "follow what a run prints", frozenset({"RESULTS_DIR", "RUN", "TARGET"})),
    "stop": Command(
        "kmatrix.cli.stop:stop", "end a running matrix; its runs save first", frozenset({"RESULTS_DIR", "TARGET"})
    ),
    "reproduce": Command(
        "kmatrix.cli.reproduce:reproduce",
        "run RUN=<run directory> again, and compare bit for bit",
        frozenset({"GPUS", "YES", "RUN", "TRACKER"}),
    ),
    "gputop": Command(
        "kmatrix.cli.monitor:gputop", "watch every GPU on one screen", frozenset({"GPUS", "RUN", "SIMULATE"})
    ),
    "summary": Command(
        "kmatrix.cli.results:summary", "write and print the summary", frozenset({"TARGET", "RESULTS_DIR"})
    ),
    "update-graphs": Command("kmatrix.cli.results:graphs", "draw the graphs", frozenset({"TARGET", "RESULTS_DIR"})),
    "compare": Command(
        "kmatrix.cli.compare:compare",
        "hold two matrices or two runs together: BASE= NEW=; JSON=1 for programs",
        frozenset({"BASE", "JSON", "NEW", "RESULTS_DIR"}),
    ),
    "wandb-test": Command(
        "kmatrix.cli.track_test:wandb_test", "send a made-up run to W&B, and read it back", frozenset({"PROJECT"})
    ),
    "trackio-test": Command(
        "kmatrix.cli.track_test:trackio_test",
        "put a made-up run into a Trackio database, and read it back",
        frozenset({"PROJECT"}),
    ),
    "trackio-view": Command(
        "kmatrix.cli.trackio:view",
        "serve Trackio's page of the results",
        frozenset({"HOST", "PORT", "PROJECT", "RESULTS_DIR"}),
    ),
    "trackio-web": Command(
        "kmatrix.cli.trackio:web",
        "say where that page is; SHOW_TOKEN=1 for the link that may delete",
        frozenset({"PROJECT", "RESULTS_DIR", "SHOW_TOKEN"}),
    ),
    "trackio-console": Command(
        "kmatrix.cli.console:console",
        "what was measured so far, as a table",
        frozenset({"RESULTS_DIR", "RUN", "TARGET"}),
    ),
    "tensorboard": Command(
        "kmatrix.cli.tensorboard:show",
        "serve TensorBoard's page of a matrix",
        frozenset({"HOST", "PORT", "RESULTS_DIR", "TARGET"}),
    ),
    "track-replay": Command(
        "kmatrix.cli.track:replay",
        "send to trackers what they lack of the runs of TARGET=",
        frozenset({"PROJECT", "RESULTS_DIR", "RUN", "TARGET", "TRACKER"}),
    ),
    "wandb-view": Command(
        "kmatrix.cli.wandb:view",
        "W&B's screen of a matrix's runs, in the terminal",
        frozenset({"RESULTS_DIR", "RUN", "TARGET"}),
    ),
    "list-checkpoints": Command(
        "kmatrix.cli.checkpoints:list_checkpoints",
        "list the checkpoints of a matrix or of RUN=",
        frozenset({"TARGET", "RUN", "RESULTS_DIR"}),
    ),
    "checkpoints-prune": Command(
        "kmatrix.cli.checkpoints:prune",
        "remove checkpoints that newer ones have replaced",
        frozenset({"TARGET", "RUN", "RESULTS_DIR", "YES"}),
    ),
    "sample": Command(
        "kmatrix.cli.models:sample",
        "write a text with a trained model",
        frozenset(
            {"CHECKPOINT", "PROMPT", "TOKENS", "TEMPERATURE", "TOP_K", "TOP_P", "SEED", "DEVICE"}
            | {"TARGET", "RESULTS_DIR"}
        ),
    ),
    "serve": Command(
        "kmatrix.cli.models:serve",
        "answer OpenAI's completions API with a trained model",
        frozenset({"CHECKPOINT", "PORT", "HOST", "DEVICE", "TARGET", "RESULTS_DIR"}),
    ),
    "export": Command(
        "kmatrix.cli.models:export",
        "write a model in Hugging Face's layout",
        frozenset({"CHECKPOINT", "OUTPUT", "TARGET", "RESULTS_DIR"}),
    ),
    "import-model": Command(
        "kmatrix.cli.models:import_model",
        "make a checkpoint OUTPUT= of MODEL=<folder in Hugging Face's layout>",
        frozenset({"MODEL", "OUTPUT"}),
    ),
}
ALIASES = {"test_matrix": "test-matrix"}


def find_command(target: str) -> Command:
    """Return the command of a target. defconfig-<name> and <name>_defconfig are forms of defconfig."""
    name = ALIASES.get(target, target)
    if name in COMMANDS:
        return COMMANDS[name]
    if name.startswith("defconfig-") or name.endswith("_defconfig"):
        return COMMANDS["defconfig"]
    near = difflib.get_close_matches(name, COMMANDS, 3)
    raise ConfigError(
        f"unknown command {target}", fix=f"did you mean {' or '.join(near)}?" if near else "see kmatrix help"
    )


def parse(target: str, words: Sequence[str], *, from_make: bool = False) -> tuple[Command, Arguments]:
    """Return the command and its arguments; a name that it does not take is refused, or left to Kconfig."""
    command = find_command(target)
    values: dict[str, str] = {}
    assignments: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{word!r} is not NAME=value", fix="see kmatrix help")
        if name in values or name in assignments:
            raise ConfigError(f"{name} is given twice")
        if name in command.names:
            values[name] = text
        elif from_make and name in MAKE_ONLY:
            continue
        elif is_key_name(name):
            raise _no_key(name)
        elif command.assigns:
            assignments[name] = text
        else:
            raise _not_taken(target, command, name)
    return command, Arguments(ALIASES.get(target, target), values, assignments, command.names)


def from_makeflags(flags: str) -> list[str]:
    """Return the NAME=value words of the user's make command line, in the order in which they were typed.

    make puts them behind " -- ", the last first, with backslashes before blanks and $ doubled.
    No shell reads them, so quotes and apostrophes are letters.
    """
    _, found, tail = (" " + flags).partition(" -- ")
    if not found:
        return []
    words = [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in re.findall(r"(?:\\.|[^\s\\])+", tail)]
    return [word for word in reversed(words) if "=" in word]


def _no_key(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not taken from the command line",
        why="every user of this machine can read a command line, and what is on it is kept with the results",
        fix=f"export {name} in your shell before make, or use the tracker's own login",
    )


def _not_taken(target: str, command: Command, name: str) -> ConfigError:
    takes = sorted(command.takes) or ["no arguments of its own"]
    near = difflib.get_close_matches(name, command.names, 1)
    return ConfigError(
        f"{target} does not take {name}",
        why=f"it takes {', '.join(takes)}",
        fix=f"did you mean {near[0]}?" if near else "",
    )
