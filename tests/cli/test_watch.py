"""The live display of a matrix that is being run: a table on a terminal, a line per event elsewhere."""

from __future__ import annotations

import io
import re
import signal

import pytest

from kmatrix.cli.watch.status import EVERY_S, Display, _signals, ended_line, running_line
from kmatrix.records.attempts import Attempt, End, path_of
from kmatrix.records.decode import as_json
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.alerts import Alert, AlertKind, Severity, ended_at
from kmatrix.status.look import look
from kmatrix.status.view import RunView, Viewer
from records_factory import CREATED, FakeRun, make_matrix
from times import Times, pulse

RUNNING = RunView(
    name="gpt2_muon_2cpu", status=Status.RUNNING, step=120, max_iters=300, loss=2.714, val_loss=2.8,
    tokens_per_second=41234.0, elapsed_s=71.0, left_s=12.3,
)  # fmt: skip
ALERT = Alert(kind=AlertKind.MFU, severity=Severity.WARNING, since=CREATED, value=9.5, threshold=15.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


class Story:
    """A matrix of two runs whose files change, and a display that looks at it."""

    def __init__(self, root, times):
        runs = [FakeRun(optimizer=name) for name in ("adamw", "muon")]
        self.times, self.matrix = times, MatrixDir(make_matrix(root, [], planned=runs).path)

    def attempt(self, optimizer, end=None, seconds=0.0):
        folder = self.matrix.run(f"gpt2_{optimizer}_1cpu")
        one = Attempt(number=1, host="n", seconds=seconds, end=end and End(kind=end, reason="why", seconds=seconds))
        write_json(path_of(folder.path, 1), as_json(one))
        return folder

    def show(self, display, seconds=1.0):
        self.times.sleep(seconds)
        pulse(self.matrix, self.times.unix)
        display(Viewer(path=self.matrix.path).view(look(self.matrix.path)))


@pytest.fixture
def story(tmp_path, monkeypatch):
    return Story(tmp_path, Times(CREATED, monkeypatch))


def told(story, stream):
    """Tell a story of two runs, of which one fails; return what is shown."""
    with Display(stream=stream) as display:
        story.show(display)
        folder = story.attempt("adamw")
        story.show(display)
        append_jsonl(folder.metrics, {"step": 40, "time": CREATED, "attempt": 1, "train/loss": 2.5})
        story.show(display)
        story.attempt("adamw", "died", seconds=3.0)
        story.attempt("muon")
        story.show(display)
    return stream.getvalue()


def test_the_line_of_a_running_run_has_every_known_value_and_no_zero_for_others():
    line = "gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41.2k tok/s  left 12.3s"
    assert running_line(RUNNING) == line
    unknown = RunView(name="a", status=Status.RUNNING)
    assert running_line(unknown) == "a  starting"
    resumed = RunView(name="a", status=Status.RUNNING, start=200, max_iters=300, alerts=("x",))
    assert running_line(resumed) == "a  resuming at step 200/300  1 alert"


def test_the_line_of_a_run_that_ended_has_status_result_duration_and_reason():
    finished = RunView(name="a", status=Status.FINISHED, val_loss=2.80123, elapsed_s=83.0)
    assert ended_line(finished) == "a  finished  val 2.8012  1m23s"
    failed = RunView(name="a", status=Status.FAILED, elapsed_s=5.0, reason="loss is nan at step 7")
    assert ended_line(failed) == "a  failed  5.0s  loss is nan at step 7"


def test_without_a_terminal_a_run_prints_one_line_at_start_and_one_at_end(story):
    assert told(story, io.StringIO()).splitlines() == [
        "gpt2_adamw_1cpu  starting",
        "gpt2_adamw_1cpu  failed  3.0s  why",
        "gpt2_muon_1cpu  starting",
    ]


def test_without_a_terminal_a_long_run_prints_a_line_periodically(story):
    stream = io.StringIO()
    story.attempt("adamw")
    with Display(stream=stream) as display:
        for _ in range(5):
            story.show(display, seconds=EVERY_S / 2)
    assert len(stream.getvalue().splitlines()) == 3


def test_what_had_ended_before_is_not_news(story):
    stream = io.StringIO()
    story.attempt("adamw", "died")
    with Display(stream=stream) as display:
        story.show(display)
    assert stream.getvalue() == ""


def test_each_alert_is_printed_once_also_one_that_has_ended_meanwhile(story):
    stream = io.StringIO()
    folder = story.attempt("adamw")
    with Display(stream=stream) as display:
        story.show(display)
        append_jsonl(folder.alerts, as_json(ALERT))
        story.show(display)
        append_jsonl(folder.alerts, as_json(ended_at(ALERT, CREATED + 9.0)))
        story.show(display)
    assert [line for line in stream.getvalue().splitlines() if line.startswith("!")] == [
        "! gpt2_adamw_1cpu  MFU 9.5%, below 15% (use bf16, torch.compile and a larger micro-batch; check data loading)"
    ]


def test_there_are_no_escape_codes_without_a_terminal_that_can_draw(story, terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert not set("\x1b\r") & set(told(story, terminal))


def test_on_a_terminal_the_table_is_redrawn_in_place_and_the_last_one_stays(story, terminal):
    output = told(story, terminal)
    assert "40/100" in output
    assert "\x1b[2K" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor is shown again"
    last = re.sub(r"\x1b\[[0-9;?]*\w", "", output.rpartition("\x1b[?25h")[2])
    assert f"{story.matrix.name}: running" in last
    assert "gpt2_adamw_1cpu failed: why" in last


@pytest.mark.parametrize(("text", "styled"), [("", True), ("1", False)])  # no-color.org: an empty value does not count
def test_no_color_disables_colors_even_on_a_terminal(story, terminal, monkeypatch, text, styled):
    monkeypatch.setenv("NO_COLOR", text)
    assert bool(re.search(r"\x1b\[[0-9;]*m", told(story, terminal))) == styled


def test_an_output_that_is_closed_ends_the_display_but_not_the_runs(story):
    class Gone(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    told(story, stream)
    assert stream.writes == 1


def test_sigterm_that_make_passes_on_does_not_kill_what_saves() -> None:
    with _signals(True) as asked:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert asked == [signal.SIGTERM, signal.SIGINT]
