"""Commands that kmatrix prints work when they are pasted: with the results elsewhere and blanks in their path."""

from __future__ import annotations

import ast
import contextlib
import doctest
import re
import shlex
import shutil
from pathlib import Path

import pytest

from factories import make_data
from instant import instant_program
from kmatrix import paste
from kmatrix.cli.commands import COMMANDS, invocation, parse
from kmatrix.cli.status import plain
from kmatrix.cli.targets import find_target, results_dir
from kmatrix.errors import LaunchError
from kmatrix.paste import make_command
from kmatrix.records.files import read_json, write_json
from kmatrix.records.lock import held, in_use
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncState, SyncStatus, pending_messages
from kmatrix.runner.loop import EXIT_STOPPED, Outcome
from kmatrix.status.disk_space import what_to_do
from kmatrix.status.view.overview import Overview
from programs import ROOT, Program, run
from records_factory import FakeRun, make_matrix

# Commands of one matrix: printed with its path, never by name or without.
OF_A_MATRIX = "continue|status|logs|stop|track-sync|summary|test-rerun|update-graphs|estimate"


# Passed to each command, as a user does who keeps results and configuration elsewhere.
PLACES_GIVEN = ("RESULTS_DIR={}", "KCONFIG_CONFIG=my config")
# Commands that serve or ask until the user ends them: checked up to their arguments.
ENDLESS = frozenset({"trackio-view", "tensorboard", "serve", "menuconfig", "gputop", "gpu-exporter", "logs"})


@pytest.fixture
def matrix(tmp_path):
    """A matrix below a directory that .config does not name, with a blank in its path."""
    folder = tmp_path / "my results"
    folder.mkdir()
    runs = [FakeRun(status="stopped", optimizer="adamw"), FakeRun(status="finished", optimizer="muon")]
    return make_matrix(folder, runs)


def resolved(text, tmp_path):
    """Return the matrices that the commands in a text act on, as a shell and kmatrix read them."""
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")
    found = []
    for printed in commands(text):
        _, target, *words = shlex.split(printed)
        _, arguments = parse(target, [*words, f"O={tmp_path}"])
        found.append(find_target(arguments).path.resolve())
    return found


def commands(text):
    """Return the make commands with arguments in a text, up to the quote that closes their last argument."""
    return re.findall(r"make [a-z][\w-]*(?: [A-Z_]+=(?:[^\s'`;]|'[^']*')+)+", text)


def test_the_quotes_of_a_command_survive_a_shell(matrix):
    words = shlex.split(make_command("continue", matrix.path, RETRY_FAILED="1"))
    assert words[:2] == ["make", "continue"]
    assert words[2:] == [f"TARGET={matrix.path}", "RETRY_FAILED=1"]


def printed_by_status(matrix, capsys):
    return "\n".join(plain(Overview(matrix).poll()))


def printed_by_the_end(matrix, capsys):
    from kmatrix.cli.running.start import print_next_steps

    print_next_steps(matrix, Outcome(exit_code=EXIT_STOPPED, counts={Status.STOPPED: 1}, disk_full=False))
    print_next_steps(matrix, Outcome(exit_code=1, counts={Status.FAILED: 1}, disk_full=False))
    return capsys.readouterr().out


def printed_by_the_lock(matrix, capsys):
    with held(matrix):
        return str(in_use(matrix))


def printed_for_a_full_disk(matrix, capsys):
    return what_to_do(matrix.path)


def printed_for_pending_steps(matrix, capsys):
    waiting = SyncStatus(tracker="wandb", state=SyncState.FAILED, error="no connection")
    return "\n".join(pending_messages([("a", waiting)], matrix.path))


@pytest.mark.parametrize(
    "printed",
    [
        printed_by_status,
        printed_by_the_end,
        printed_by_the_lock,
        printed_for_a_full_disk,
        printed_for_pending_steps,
    ],
)
def test_a_printed_command_finds_the_matrix_that_it_was_printed_for(printed, matrix, tmp_path, capsys):
    text = printed(matrix, capsys)
    found = resolved(text, tmp_path)
    assert found, text
    assert set(found) == {matrix.path.resolve()}


PASTED = re.compile(  # a make command in a sentence, as a user copies it
    r"make (?:-C (?P<root>'[^']*'|\S+) )?(?P<target>[a-z][\w+-]*)(?P<words>(?: [A-Z_]+=(?:'[^']*'|[^\s'`,;()])+)*)"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder with a configuration, data and a matrix of two finished runs, all below names with blanks."""
    folder = tmp_path_factory.mktemp("user") / "a checkout"
    folder.mkdir()
    make_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        instant_program(folder, patch)
        (folder / ".config").rename(folder / "my config")
        patch.chdir(folder)
        words = ["NUM_GPUS=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n", "MAX_ITERS=30", "SEED=1,2"]
        words += [
            "OPTIMIZER=adamw",
            "DATASET=shards",
            "BLOCK_SIZE=32",
            "EVAL_SAMPLES=10",
            f"DATA_PATH={folder / 'data'}",
        ]
        assert (
            run("test-matrix", *words, "KCONFIG_CONFIG=my config", f"RESULTS_DIR={folder / 'my results'}").status == 0
        )
    return folder


@pytest.fixture(params=["in the checkout", "elsewhere"])
def user(request, finished, tmp_path, monkeypatch):
    """Return a function that runs commands in a copy of that folder: it is the checkout, or make -C is needed."""
    folder = tmp_path / "a checkout"
    shutil.copytree(finished, folder)
    instant_program(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    results = str(folder / "my results")
    if request.param == "in the checkout":
        monkeypatch.setattr(paste, "ROOT", folder)
        monkeypatch.setattr("kmatrix.records.paths.ROOT", folder)
        results = "my results"  # relative ones start at the checkout
    given = [word.format(results) for word in PLACES_GIVEN]
    return lambda target, *words: run(target, *words, *given)


def pasted(text, monkeypatch):
    """Run each make command of a text as it was printed; return the targets, sorted."""
    found = []
    for command in PASTED.finditer(text):
        target, words = command["target"], shlex.split(command["words"])
        if target not in COMMANDS:
            continue
        root = Path(*shlex.split(command["root"])) if command["root"] else Path.cwd()
        assert root == paste.ROOT, command[0]  # there is a Makefile
        found.append(target)
        parsed = parse(target, words)[1]
        assert (root / parsed.config).samefile("my config"), command[0]
        if target not in ENDLESS:
            with monkeypatch.context() as inside:
                inside.chdir(root)
                result = run(target, *words)
            assert result.status == 0, f"{command[0]}\n{result.out}{result.err}"
    return sorted(set(found))


def the_matrix():
    return MatrixDir(max(Path("my results").glob("test_matrix_results_*")))


def stopped_matrix():
    """Stop a run of the matrix after the fact, as the runner writes it."""
    matrix = the_matrix()
    run_dir = matrix.runs()[0]
    run_dir.result.unlink()
    write_json(run_dir.status, read_json(run_dir.status) | {"status": "stopped", "attempts": None})
    return matrix


def hold(monkeypatch):
    """Hold the matrix until it is asked to stop."""
    runner = contextlib.ExitStack()
    runner.enter_context(held(the_matrix()))
    monkeypatch.setattr("kmatrix.cli.control.stop.signal_runner", lambda *_: runner.close())


def a_running_matrix(user, monkeypatch):
    hold(monkeypatch)
    return user("continue", f"TARGET={the_matrix().path}").err


def a_stopped_one(user, monkeypatch):
    stopped_matrix()
    monkeypatch.setenv("COLUMNS", "40")  # a command is not wrapped
    return user("status").out + user("estimate").out


def a_lost_run(user, _):
    the_matrix().runs()[0].run_json.unlink()
    return user("summary").err + user("status").out


def the_background(user, monkeypatch):
    stopped_matrix()
    monkeypatch.setattr("kmatrix.cli.running.start.detach", lambda matrix, words: hold(monkeypatch))
    return user("continue", "DETACH=1").out


def a_missing_checkpoint(user, _):
    the_matrix().runs()[0].result.unlink()
    return user("continue", "RESUME=there_is_none").err


def no_evaluated_run(user, _):
    for run_dir in the_matrix().runs():
        shutil.rmtree(run_dir.checkpoints)
    return user("sample", f"TARGET={the_matrix().name}").err


@pytest.mark.parametrize(
    ("printed", "targets"),
    [
        (a_running_matrix, ["stop"]),
        (a_stopped_one, ["continue"]),
        (a_lost_run, ["continue"]),
        (the_background, ["logs", "status", "stop"]),
        (a_missing_checkpoint, ["list-checkpoints"]),
        (no_evaluated_run, ["list-checkpoints"]),
    ],
)
def test_a_printed_command_works_when_it_is_pasted(printed, targets, user, monkeypatch):
    text = printed(user, monkeypatch)
    assert pasted(text, monkeypatch) == targets, text


def test_commands_of_a_matrix_have_one_owner():
    """A literal such as `make continue TARGET=...` would miss quotes, or name the matrix only."""
    written = re.compile(rf"make (?:{OF_A_MATRIX}) TARGET=(?!<)")
    found = []
    for path in sorted((ROOT / "lib").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and written.search(node.value):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_the_example_of_a_command_is_right():
    assert doctest.testmod(paste).failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run `make test-matrix` to create one", "run `make test-matrix LR=1 RESULTS_DIR=/r` to create one"),
        ("make setup, then make track-sync TARGET=<matrix>", "make setup, then make track-sync TARGET=<matrix>"),
        ("`make status TARGET='a b'`; make it so", "`make status TARGET='a b'`; make it so"),
        ("make defconfig-<name> menuconfig", "make defconfig-<name> RESULTS_DIR=/r menuconfig"),
    ],
)
def test_a_command_in_a_message_gets_the_places_of_this_command(text, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    with paste.called_as(invocation("plan", ["LR=1", "GPU=H100", "RESULTS_DIR=/r"], from_make=False)):
        assert paste.pasteable(text) == expected


def test_the_error_of_a_running_matrix_is_a_launch_error(matrix):
    with held(matrix):
        assert isinstance(in_use(MatrixDir(matrix.path)), LaunchError)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["make", "-C", "/checkout", "status"], True),
        (["/usr/bin/gmake", "-sC/checkout", "status"], True),
        (["make", "--no-print-directory", "--directory=/checkout"], True),
        (["make", "-j8", "-s", "status", "RESULTS_DIR=-C"], False),
        (["make", "-fC", "--debug", "--dry-run"], False),
        (["python", "-C"], False),
    ],
)
def test_a_make_that_was_given_a_folder_is_recognized(words, expected, tmp_path):
    for process, parent, line in ((9, 8, ["python"]), (8, 7, ["/bin/sh", "-c", "x"]), (7, 1, words), (1, 0, ["init"])):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "stat").write_text(f"{process} (a) b) S {parent} 0")
        (tmp_path / str(process) / "cmdline").write_text("\0".join(line) + "\0")
    assert paste.called_with_folder(9, tmp_path) is expected


def test_a_relative_results_dir_starts_at_the_checkout_for_every_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert results_dir(parse("status", ["RESULTS_DIR=my results"])[1]) == ROOT / "my results"
    assert results_dir(parse("status", ["RESULTS_DIR=~/r"])[1]) == Path.home() / "r"
