"""The live line and the plain progress lines."""

import io
import re
from dataclasses import replace

import pytest

from kmatrix.cli.progress import ProgressDisplay, ended_line, running_line
from kmatrix.records.runs import Status
from kmatrix.status.watch import RunProgress

SEEN = {"run": "gpt2_muon_2cpu", "index": 2, "total": 4}
RUNNING = RunProgress(
    **SEEN,
    status=Status.RUNNING,
    step=120,
    max_iters=300,
    loss=2.714,
    val_loss=2.8,
    tokens_per_second=41234.0,
    elapsed_s=71.0,
    left_s=12.3,
)
FINISHED = RunProgress(**SEEN, status=Status.FINISHED, val_loss=2.80123, elapsed_s=83.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_the_live_line_shows_every_known_value():
    assert running_line(RUNNING) == "run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41.2k tok/s  left 12.3s"


def test_unknown_values_are_omitted_and_never_zero():
    assert running_line(RunProgress(**SEEN, status=Status.RUNNING)) == "run 2/4 gpt2_muon_2cpu  starting"
    resumed = RunProgress(**SEEN, status=Status.RUNNING, start=200, max_iters=300)
    assert running_line(resumed) == "run 2/4 gpt2_muon_2cpu  resuming at step 200/300"
    assert running_line(replace(resumed, step=210)) == "run 2/4 gpt2_muon_2cpu  step 210/300"


def test_the_line_of_a_finished_run_shows_status_result_duration_and_reason():
    assert ended_line(FINISHED) == "run 2/4 gpt2_muon_2cpu  finished  val 2.8012  1m23s"
    failed = RunProgress(**SEEN, status=Status.FAILED, elapsed_s=5.0, reason="loss is nan at step 7")
    assert ended_line(failed) == "run 2/4 gpt2_muon_2cpu  failed  5.0s  loss is nan at step 7"


def test_without_a_terminal_a_run_prints_one_line_at_start_and_one_at_end():
    stream = io.StringIO()
    with ProgressDisplay(stream) as show:
        for progress in (RUNNING, RUNNING, RUNNING, FINISHED):
            show(progress)
    assert stream.getvalue().splitlines() == [running_line(RUNNING), ended_line(FINISHED)]


def test_without_a_terminal_a_long_run_prints_a_line_periodically(monkeypatch):
    stream, now = io.StringIO(), 1000.0
    monkeypatch.setattr("kmatrix.cli.progress.time.monotonic", lambda: now)
    with ProgressDisplay(stream) as show:
        for now in range(1000, 1065):  # noqa: B007 (the clock reads it)
            show(RUNNING)
    assert len(stream.getvalue().splitlines()) == 3  # at 0, 30 and 60 s


def test_without_a_terminal_there_are_no_escape_codes_whatever_the_environment(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    stream = io.StringIO()
    with ProgressDisplay(stream) as show:
        show(RUNNING)
        show(FINISHED)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with ProgressDisplay(terminal) as show:
        show(RUNNING)
    assert terminal.getvalue() == running_line(RUNNING) + "\n"


def test_on_a_terminal_the_line_is_redrawn_in_place_and_the_final_line_stays(terminal):
    with ProgressDisplay(terminal) as show:
        show(RUNNING)
        show(FINISHED)
    output = terminal.getvalue()
    assert "step 120/300" in output
    assert "━" in output
    assert output.index("\x1b[2K") > output.index("step 120/300")  # the line is erased
    assert re.sub(r"\x1b\[[0-9;?]*\w", "", output.rsplit("\x1b[2K", 1)[1]).strip() == ended_line(FINISHED)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is shown again


def test_the_live_line_is_redrawn_at_a_limited_rate(terminal):
    with ProgressDisplay(terminal) as show:
        for _ in range(200):
            show(RUNNING)
    assert terminal.getvalue().count("step 120/300") <= 4


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (81, "run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  41.2k tok/s  left 12.3s"),
        (62, "run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  left 12.3s"),
        (52, "run 2/4 gpt2_muon_2cpu  step 120/300  left 12.3s"),
        (38, "run 2/4 gpt2_muon_2cpu  step 120/300"),
        (34, "run 2/4 gpt2_muon_2cpu  step 120/…"),
        (20, "run 2/4 gpt2_muon_2…"),
    ],
)
def test_a_narrow_terminal_drops_the_least_important_columns_first(width, text):
    assert running_line(RUNNING, width) == text
    assert len(running_line(RUNNING, width)) <= width


def test_the_middle_of_a_long_name_is_dropped_before_the_step():
    long_name = replace(RUNNING, run="gpt2_adamw_seed3_lr6e-4_wd0.1_4gpu")
    assert running_line(long_name, 50).endswith("gpu  step 120/300")
    assert "…" in running_line(long_name, 50)


@pytest.mark.parametrize("width", [12, 40, 60, 80, 200])
def test_the_live_line_is_one_line_on_every_terminal(terminal, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with ProgressDisplay(terminal) as show:
        show(RUNNING)
    output = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.getvalue())
    assert max(len(line) for line in output.replace("\r", "\n").split("\n")) <= width
    assert output.count("\n") <= 1
    assert ("━" in output) == (width > 80)  # the bar takes the space that the text leaves


def test_finished_and_pending_runs_are_listed_below_the_live_lines(terminal):
    with ProgressDisplay(terminal) as show:
        show(replace(RUNNING, counts={"finished": 3, "failed": 1, "running": 1, "planned": 2}))
    assert "3 finished, 1 failed, 2 pending" in terminal.getvalue()


@pytest.mark.parametrize(("text", "styled"), [("", True), ("1", False)])  # no-color.org: an empty value does not count
def test_no_color_disables_colors_even_on_a_terminal(terminal, monkeypatch, text, styled):
    monkeypatch.setenv("NO_COLOR", text)
    with ProgressDisplay(terminal) as show:
        show(RUNNING)
        show(FINISHED)
    assert bool(re.search(r"\x1b\[[0-9;]*m", terminal.getvalue())) == styled


def test_a_terminal_that_disappears_ends_the_display_but_not_the_runs():
    class Gone(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    with ProgressDisplay(stream) as show:
        show(RUNNING)
        show(FINISHED)
    assert stream.writes == 1


def test_brackets_in_a_name_are_shown_literally(terminal):
    with ProgressDisplay(terminal) as show:
        show(RunProgress(run="gpt2_[bold]x_1cpu", index=1, total=1, status=Status.FINISHED))
    assert "gpt2_[bold]x_1cpu" in terminal.getvalue()
