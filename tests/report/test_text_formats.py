"""junit.xml, results.csv and report.md: what programs and people read in them, also with hostile text."""

from __future__ import annotations

import csv
import io
import re
import shlex
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from kmatrix.cli.commands import parse
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import find_matrix
from kmatrix.records.runs import Status
from kmatrix.report.analyse import analyse
from kmatrix.report.page import render_page
from kmatrix.report.render import escaped, markdown_table, quoted
from kmatrix.report.tables import Table
from kmatrix.report.write import ending, junit, markdown, results_csv, summary, write_summary
from records_factory import FakeRun, make_matrix, runs_with_seeds

ANSI = "\x1b[31mred\x1b[0m \x1b]0;title\x07"
SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"=1+2 {SCRIPT} {ANSI}\x00\ufffe | ``` `x` @you #1 $x$ **bold** [a](http://b)\r\n# title " + "x" * 10_000


TAGS = {"html", "h1", "h2", "p", "strong", "code", "pre", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}


def every_status():
    return [
        *runs_with_seeds(2, [3.28, 3.29]),
        FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan", stop_at=47, log_tail=("a", "b")),
        FakeRun(optimizer="adam", status="stopped", reason="stopped by make stop", stop_at=62),
        FakeRun(optimizer="muon", gpus=4, status="skipped", reason="needs 4 GPUs, 2 are there"),
        FakeRun(optimizer="lion", status="planned"),
    ]


def hostile_runs():
    bad = {"status": "failed", "kind": HOSTILE[:50], "reason": HOSTILE, "stop_at": 40}
    return [
        FakeRun(final_loss=3.3, axes={"note": HOSTILE[:60].replace("/", "_").replace("\x00", "")}),
        FakeRun(optimizer="muon", axes={"note": "=cmd"}),
        FakeRun(optimizer="sgd", log_tail=(HOSTILE, "```", "<b>"), axes={"note": "plain"}, **bad),
    ]


# ------------------------------------------------------------------------------------------------------- junit.xml


def cases(matrix):
    root = ElementTree.fromstring(junit(analyse(matrix)))
    (suite,) = root.findall("testsuite")
    return suite, {case.get("name"): case for case in suite.findall("testcase")}


def test_runs_are_test_cases(tmp_path):
    suite, found = cases(make_matrix(tmp_path, every_status()))
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 6, "failures": 1, "errors": 0, "skipped": 3}
    assert {len(case) for name, case in found.items() if "adamw" in name} == {0}
    (failure,) = found["gpt2_sgd_1cpu"]
    assert (failure.tag, failure.get("message"), failure.text) == ("failure", "loss is nan", "a\nb")
    for optimizer, words in (("adam_1", "stopped: stopped by"), ("muon", "needs 4 GPUs"), ("lion", "planned")):
        (skipped,) = next(case for name, case in found.items() if optimizer in name)
        assert skipped.tag == "skipped"
        assert words in skipped.get("message")


def test_hostile_text_in_junit_is_text(tmp_path):
    matrix = make_matrix(tmp_path, hostile_runs())
    content = junit(analyse(matrix))
    assert "<script" not in content
    assert "\x1b" not in content
    _, found = cases(matrix)
    (failure,) = next(case for name, case in found.items() if "sgd" in name)
    assert SCRIPT in failure.get("message")
    assert len(failure.get("message")) <= 1_000
    assert failure.text.splitlines()[-2:] == ["```", "<b>"]


# ----------------------------------------------------------------------------------------------------- results.csv


def rows(matrix):
    return list(csv.DictReader(io.StringIO(results_csv(analyse(matrix)), newline="")))


def test_a_row_per_run_with_the_numbers_of_results_json(tmp_path):
    found = rows(make_matrix(tmp_path, every_status()))
    assert [row["status"] for row in found] == ["finished", "finished", "failed", "stopped", "skipped", "planned"]
    assert {row["configuration"] for row in found[:2]} == {"adamw, 1 rank"}
    assert [float(row["final_val_loss"]) for row in found[:2]] == [3.28, 3.29]
    assert (found[0]["axis optimizer"], found[0]["axis seed"], found[0]["seed"]) == ("adamw", "1", "1")
    assert (found[-1]["final_val_loss"], found[-1]["diverged"]) == ("", "false")


def test_no_cell_is_a_formula_and_negative_numbers_stay_numbers(tmp_path):
    runs = [*hostile_runs(), FakeRun(optimizer="adam", final_loss=-0.5, axes={"note": "@x"})]
    found = rows(make_matrix(tmp_path, runs))
    for row in found:
        for cell in row.values():
            assert not cell.startswith(("=", "+", "@", "\t", "\r")), cell
    by_optimizer = {row["optimizer"]: row for row in found}
    assert (by_optimizer["muon"]["axis note"], by_optimizer["adam"]["axis note"]) == ("'=cmd", "'@x")
    assert float(by_optimizer["adam"]["final_val_loss"]) == -0.5
    assert by_optimizer["sgd"]["reason"].startswith("'=1+2 <script>")
    assert "\x1b" not in "".join(by_optimizer["sgd"].values())


# ------------------------------------------------------------------------------------------------------- report.md


def report_md(matrix):
    return markdown(matrix, analyse(matrix))


def rendered(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def text_of(html):
    return "".join(ElementTree.fromstring(f"<html>{html}</html>").itertext())


@pytest.mark.parametrize(
    "text", ["a|b", "`x`", "``", "` ", "<b>", "*a*", "_a_", "a\\b", "&amp;", SCRIPT, "[a](b)", "@you", "~~x~~", "|"]
)
def test_a_quoted_text_renders_as_itself(text):
    shown = " ".join(text.split())
    assert text_of(rendered(f"before {quoted(text)} after")).strip() == f"before {shown} after"
    table = markdown_table(Table(titles=["a"], rows=[[text]]))
    assert ElementTree.fromstring(f"<html>{rendered(table)}</html>").find(".//td/code").text == shown


@pytest.mark.parametrize("text", ["a|b * c_d_e `x` <b> [a](b) & # ~~x~~ $y$ \\"])
def test_an_escaped_text_renders_as_itself(text):
    assert text_of(rendered(f"before {escaped(text)} after")).strip() == f"before {text} after"


def test_hostile_text_in_the_markdown_is_text(tmp_path):
    html = rendered(report_md(make_matrix(tmp_path, hostile_runs()))).replace("\ufffe", "")
    tree = ElementTree.fromstring(f"<html>{html}</html>")
    used = {element.tag for element in tree.iter()}
    assert used <= TAGS
    assert "\x1b" not in html
    assert SCRIPT in "".join(tree.itertext())
    assert max(map(len, "".join(tree.itertext()).splitlines())) < 3_000


# ------------------------------------------------------------------------------------------- summary and terminal


@pytest.mark.parametrize("shown", [summary, lambda results: ending(results, ["Report: x"])])
def test_hostile_text_on_a_terminal_is_text_on_its_own_line(tmp_path, shown):
    spoof = f"\u202e{ANSI}\rsgd wins\n\nVerdict\n-------\nsgd wins\n" + "x" * 10_000
    bad = {"status": "failed", "kind": "exit", "reason": spoof, "stop_at": 40, "log_tail": (spoof,)}
    runs = [FakeRun(), FakeRun(optimizer="sgd", train={"model": spoof, "dataset": spoof}, **bad)]
    text = shown(analyse(make_matrix(tmp_path, runs, cuts=[(3, spoof)])))
    lines = text.splitlines()
    assert not set(text) & {"\x1b", "\x07", "\r", "\x00", "\u202e"}
    assert "sgd wins" not in lines
    assert lines.count("Verdict") <= 1
    assert max(map(len, lines)) < 400
    assert "sgd" in text


def codes_of(matrix, results):
    """Return the pieces of code on the page."""
    return [unescape(text) for text in re.findall(r"<code[^>]*>(.*?)</code>", render_page(matrix, results), re.DOTALL)]


PROMPT = """a b; touch x "c" 'd' $(date)"""


def test_the_command_of_a_matrix_is_quoted_for_a_shell_in_each_format(tmp_path, monkeypatch):
    _, arguments = parse("test-matrix", [f"SAMPLE_PROMPT={PROMPT}", "SEED=1,2", "DETACH=1"])
    words = ["make", "test-matrix", "DETACH=1", f"SAMPLE_PROMPT={PROMPT}", "SEED=1,2"]
    assert shlex.split(arguments.command) == words
    matrix = make_matrix(tmp_path, [FakeRun()])
    plan = {**read_json(matrix.matrix_json), "command": arguments.command, "overrides": arguments.words}
    write_json(matrix.matrix_json, plan)
    results = analyse(matrix)
    assert (shlex.split(results.command), shlex.split(" ".join(results.overrides))) == (words, words[3:])
    assert f"Command   {arguments.command}\n" in summary(results)
    assert text_of(rendered(markdown(matrix, results))).count(arguments.command) == 1
    assert arguments.command in codes_of(matrix, results)


def test_printed_commands_find_a_matrix_that_is_anywhere(tmp_path, monkeypatch):
    (there := tmp_path / "my results").mkdir()
    (here := tmp_path / "elsewhere").mkdir()
    matrix = make_matrix(there, [FakeRun(), FakeRun(optimizer="muon")])
    monkeypatch.chdir(here)
    results = analyse(matrix)
    page = "\n".join(codes_of(matrix, results))
    texts = summary(results), text_of(rendered(markdown(matrix, results))), page
    found = [
        word.partition("=")
        for text in texts
        for line in text.splitlines()
        if line.strip().startswith("make ")
        for word in shlex.split(line)
    ]
    places = [(name, Path(value)) for name, _, value in found if name in ("TARGET", "RUN")]
    assert {name for name, _ in places} == {"TARGET", "RUN"}
    for name, path in places:
        assert find_matrix(here, str(path.parent if name == "RUN" else path)).path == matrix.path.resolve()
        assert name == "TARGET" or path.is_dir()


def test_the_files_are_written_with_the_summary(tmp_path):
    matrix = make_matrix(tmp_path, every_status())
    write_summary(matrix, analyse(matrix))
    for path in (matrix.junit, matrix.results_csv):
        assert path.stat().st_size > 0
    assert {status for status in Status if status in matrix.results_csv.read_text()} >= {"finished", "failed"}
