"""docs/status.md: the state of a run follows from its files, and four commands agree on it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil

import pytest

from kmatrix.cli.running import resume as cli_run
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.plan import RunTexts, write_plan
from kmatrix.status.state import RunState
from pages import DOCS
from programs import run
from records_factory import FakeRun, make_matrix

pytestmark = pytest.mark.process

RUN = FakeRun()
FINISHED = RUN.name
ENDS = {"failed": "loss is nan", "stopped": "asked to stop", "skipped": "too few GPUs"}
UNREADABLE = ("missing", "truncated", "newer")
NEWER = 99  # schema of a version to come
LINE = {"step": 3, "time": 1795155845.0, "elapsed_s": 3.0, "tokens": 99, "train/loss": 5.0}
COLUMNS = [
    "matrix",
    "run.json",
    "status.json",
    "result.json",
    "attempt",
    "runner",
    "place",
    "state",
    "reason",
    "continue",
]


def cases():
    """Return the rows of the table as dictionaries."""
    text = (DOCS / "status.md").read_text(encoding="utf-8").partition("## Who runs a matrix")[0]
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == COLUMNS
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Return a matrix with one finished run."""
    matrix = make_matrix(tmp_path_factory.mktemp("made"), [RUN])
    folder = matrix.run(FINISHED)
    write_json(folder.run_used, {"attempt": 1, "train": read_json(folder.run_json)["train"], "adjusted": []})
    return matrix.path


def damage(path, how):
    """Delete a file or cut it in half."""
    if how == "missing":
        path.unlink(missing_ok=True)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "newer":
        path.write_text(json.dumps((read_json(path) if path.exists() else {}) | {"schema": NEWER}))


def damage_matrix(matrix, how):
    """Damage the files of a matrix."""
    if how == "rerun.json":
        write_json(matrix.rerun, {"runs": [FINISHED]})
    elif how == "no matrix.json":
        matrix.matrix_json.unlink()
    elif how == "damaged matrix.json":
        damage(matrix.matrix_json, "truncated")
    elif how == "damaged plan":
        damage(matrix.plan, "truncated")
    elif how == "newer status.json":
        damage(matrix.status, "newer")


def make(template, folder, case):
    """Make the matrix of a case."""
    home = folder / "made" / template.name
    shutil.copytree(template, home)
    run_dir = home / FINISHED
    plan = RunTexts(FINISHED, ("", "", (run_dir / "run.json").read_text()))
    status, result = case["status.json"], case["result.json"]
    known = {} if status in ("planned", "skipped") else {"attempt": 1, "started": 1.0, "ended": 2.0}
    attempts = [known | {"status": status, "reason": ENDS.get(status)}] if known else []
    if status not in UNREADABLE:
        write_json(run_dir / "status.json", {"status": status, "reason": ENDS.get(status), "attempts": attempts})
    if result not in UNREADABLE:
        changed = {"status": result, "reason": ENDS.get(result), "kind": "nan" if result == "failed" else None}
        write_json(run_dir / "result.json", read_json(run_dir / "result.json") | changed | {"attempt": 1})
    lines = "" if case["attempt"] == "none" else json.dumps(LINE | {"attempt": int(case["attempt"])}) + "\n"
    (run_dir / "metrics.jsonl").write_text(lines)
    for name in ("run.json", "status.json", "result.json"):
        damage(run_dir / name, case[name])
    if case["reason"] == "its directory is missing":
        shutil.rmtree(run_dir)
    write_plan(MatrixDir(home), [plan])
    damage_matrix(MatrixDir(home), case["matrix"])
    if case["place"] == "here":
        return home
    (folder / "moved").mkdir()
    return home.rename(folder / "moved" / home.name)


@pytest.mark.parametrize("case", cases(), ids=lambda case: " ".join(case.values()))
def test_status_estimate_summary_and_continue_agree_with_the_table(case, template, tmp_path, monkeypatch):
    matrix = make(template, tmp_path, case)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    lock = os.open(matrix / ".lock", os.O_RDWR | os.O_CREAT)
    if case["runner"] == "alive":
        fcntl.flock(lock, fcntl.LOCK_EX)
    plans = []
    monkeypatch.setattr(cli_run, "run_and_report", lambda matrix, plan, **options: plans.append(plan) or 0)
    monkeypatch.setattr(cli_run, "need_torch", lambda: None)
    monkeypatch.setattr(cli_run, "is_up_to_date", lambda matrix: False)
    before = {path: path.read_bytes() for path in matrix.rglob("*.json*")}
    if case["state"] == "refused":
        for command in ("status", "estimate", "summary", "continue", "test-rerun"):
            result = run(command, f"TARGET={matrix}")
            assert (result.status, f"has schema {NEWER}" in result.err) == (2, True), command
        os.close(lock)
        assert {path: path.read_bytes() for path in matrix.rglob("*.json*")} == before
        return

    seen = {command: run(command, f"TARGET={matrix}", "JSON=1") for command in ("status", "estimate")}
    (status,), (estimate,) = (json.loads(result.out)["runs"] for result in seen.values())
    run("summary", f"TARGET={matrix}")
    (summary,) = read_json(matrix / "results.json")["runs"]
    assert {one["status"] for one in (status, estimate, summary)} == {case["state"]}
    assert {(one["reason"] or "").startswith(case["reason"]) for one in (status, summary)} == {True}
    if case["state"] == "planned":  # it has no numbers, also while its old ones are being archived
        (original,) = json.loads((matrix / "all_results.json").read_text())
        found = {one[name] for one in (status, summary, original) for name in one if name.endswith("val_loss")}
        assert (found, status["memory"]) == ({None}, [])
    assert all(path.read_bytes() == data for path, data in before.items() if path.name not in REPORT)

    continued = run("continue", f"TARGET={matrix}")
    os.close(lock)
    if case["continue"] == "refuses":
        assert continued.status == 2
        assert ("is being run by" if case["runner"] == "alive" else "is damaged") in continued.err
        return
    if case["continue"] in ("makes", "names"):
        assert FINISHED in continued.out
        made = case["continue"] == "makes"
        pending = made and case["result.json"] == "missing"
        assert [one.name for one in plans[0].plans] == ([FINISHED] if pending else [])
        assert (continued.status, "plan.jsonl.gz is damaged" in continued.err) == ((0, False) if made else (2, True))
        return
    (plan,) = plans
    assert [one.name for one in plan.plans] == ([FINISHED] if case["continue"] == "runs" else [])
    stays = plan.stays.get(FINISHED, RunState())
    assert case["continue"] == "runs" or stays.status == case["state"]


REPORT = ("results.json", "all_results.json", "summary_report.txt")
