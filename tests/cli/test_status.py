"""The screen of `make status`: sizes, GPUs of the machine, and the most urgent facts first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from factories import ROOT
from kmatrix.cli.commands import Arguments
from kmatrix.cli.running.limits import asked_budget
from kmatrix.cli.status import as_json, gpu_lines, headline, plain, screen
from kmatrix.cli.status import lines as estimate_lines
from kmatrix.gpu.formats.json_array import JsonArrayFile, last_entry
from kmatrix.records.files import read_json, write_json
from kmatrix.records.lock import held
from kmatrix.records.runs import Status
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.view.overview import Overview
from kmatrix.text import money
from records_factory import CREATED, FakeRun, make_matrix

NOW = CREATED + 50.0


def recording_entry(*indices, at=NOW - 1, memory=17000.0):
    gpus = [
        {
            "gpu_index": index,
            "gpu_name": "NVIDIA A10G",
            "uuid": f"GPU-{index}",
            "utilization": 97.0,
            "memory_used": memory,
            "memory_total": 23028.0,
            "power": 228.0,
            "temperature": 63.0,
        }
        for index in indices
    ]
    return {"timestamp": datetime.fromtimestamp(at, UTC).isoformat(), "multi_gpu_data": gpus}


def record(folder, value):
    file = JsonArrayFile(folder.gpu_stats_multi)
    file.append(value)
    file.close()


@pytest.fixture
def busy_matrix(tmp_path):
    """Two runs on three of four GPUs, one pending and one failed run; GPU 3 is free."""
    runs = [
        FakeRun(device="cuda", status="running", stop_at=40),
        FakeRun(device="cuda", gpus=2, status="running", stop_at=20),
        FakeRun(device="cuda", gpus=4, status="planned"),
        FakeRun(device="cuda", optimizer="sgd", status="failed", reason="loss is nan at step 47 " + "and so on " * 9),
    ]
    made = make_matrix(tmp_path, runs, took=None)
    for run, gpus in ((runs[0], (0,)), (runs[1], (1, 2))):
        folder = made.run(run.name)
        attempt = {"attempt": 1, "status": "running", "started": CREATED, "gpus": [f"GPU-{gpu}" for gpu in gpus]}
        write_json(folder.status, read_json(folder.status) | {"attempts": [attempt]})
        record(folder, recording_entry(*gpus))
    return made


def current_view(made, now=NOW):
    with held(made):
        return Overview(made).poll(now=now)


def test_each_gpu_line_shows_its_run_and_utilization(busy_matrix):
    gpus = current_view(busy_matrix).gpus
    assert [(gpu.index, gpu.run) for gpu in gpus] == [
        (0, "gpt2_adamw_1gpu"),
        (1, "gpt2_adamw_2gpu"),
        (2, "gpt2_adamw_2gpu"),
        (3, ""),
    ]
    assert (gpus[0].utilization, gpus[0].memory_used, gpus[0].power, gpus[0].temperature) == (
        97.0,
        17000.0,
        228.0,
        63.0,
    )
    assert gpus[3].utilization is None


def test_the_gpu_table_shows_runs_and_free_gpus(busy_matrix):
    lines = [line.text for line in gpu_lines(current_view(busy_matrix), None)]
    assert lines[:3] == [
        "",
        "GPU            run              util            memory  power  temp",
        "0 NVIDIA A10G  gpt2_adamw_1gpu   97%  16.6 of 22.5 GiB   228W   63C",
    ]
    assert lines[5].split() == ["3", "NVIDIA", "A10G", "free", "-", "-", "-", "-"]


def test_a_running_run_lists_its_gpus(busy_matrix):
    assert "gpu 1,2" in "\n".join(plain(current_view(busy_matrix)))


def test_an_outdated_recording_gives_no_current_values(busy_matrix):
    gpus = current_view(busy_matrix, now=NOW + 600).gpus
    assert [gpu.utilization for gpu in gpus] == [None] * 4
    assert gpus[0].run == "gpt2_adamw_1gpu"  # it has the GPU all the same


def test_a_gpu_that_the_runner_excluded_is_listed_with_the_reason(busy_matrix):
    gpus = [{"index": gpu, "name": "NVIDIA A10G", "uuid": f"GPU-{gpu}"} for gpu in range(4)]
    gpus[3]["out"] = "quarantined: GPU is lost"
    write_json(busy_matrix.status, read_json(busy_matrix.status) | {"gpus": gpus})
    assert current_view(busy_matrix).gpus[3].out == "quarantined: GPU is lost"
    assert gpu_lines(current_view(busy_matrix), None)[-1].text.split()[:4] == ["3", "NVIDIA", "A10G", "quarantined"]
    assert "GPU 3 NVIDIA A10G: quarantined: GPU is lost" in plain(current_view(busy_matrix))
    assert "GPU 3 NVIDIA A10G: quarantined: GPU is lost" in plain(Overview(busy_matrix).poll())  # and after its end


def test_memory_of_other_processes_is_shown_only_while_the_matrix_runs(busy_matrix):
    gpus = [{"index": 0, "name": "NVIDIA A10G", "uuid": "GPU-9", "out": "in use by others: 9.0 GiB held by x"}]
    write_json(busy_matrix.status, read_json(busy_matrix.status) | {"gpus": gpus})
    assert "in use by others: 9.0 GiB" in "\n".join(plain(current_view(busy_matrix)))
    assert "in use by others" not in "\n".join(plain(Overview(busy_matrix).poll()))


def test_simulated_gpus_of_a_cpu_run_are_listed(tmp_path):
    made = make_matrix(tmp_path, [FakeRun(status="running", stop_at=40)], took=None)
    record(made.run(FakeRun().name), recording_entry(0, 1))
    assert [gpu.run for gpu in current_view(made).gpus] == ["gpt2_adamw_1cpu"] * 2


def test_ranks_on_the_cpu_are_not_listed_as_gpus(tmp_path):
    made = make_matrix(tmp_path, [FakeRun(status="running", stop_at=40)], took=None)
    value = recording_entry(0)
    value["multi_gpu_data"][0]["uuid"] = "cpu-rank-0"
    record(made.run(FakeRun().name), value)
    assert current_view(made).gpus == ()


def test_json_has_the_gpus_the_end_and_the_alerts(busy_matrix):
    value = json.loads(json.dumps(as_json(current_view(busy_matrix))))
    assert [gpu["run"] for gpu in value["gpus"]] == ["gpt2_adamw_1gpu", "gpt2_adamw_2gpu", "gpt2_adamw_2gpu", ""]
    assert {"ends", "left_s", "dollars", "all_dollars"} <= value.keys()
    assert {"alerts", "memory_mib", "mfu", "tokens_per_second", "loss", "step", "left_s", "gpus"} <= value["runs"][
        0
    ].keys()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 20), (80, 10), (60, 6)])
def test_the_screen_is_never_larger_than_the_terminal(busy_matrix, width, height):
    lines = screen(current_view(busy_matrix), width=width, height=height)
    assert len(lines) <= height
    if width >= 60:
        assert max(len(line.text) for line in lines) <= width


def test_a_small_screen_shows_running_and_failed_runs_first(busy_matrix):
    text = "\n".join(line.text for line in screen(current_view(busy_matrix), width=80, height=12))
    assert "gpt2_adamw_1gpu" in text
    assert "loss is nan at step 47" in text
    assert "GPUs: 3 in use, 1 free" in text


def test_a_reason_is_complete_if_there_is_space(busy_matrix):
    text = " ".join(line.text.strip() for line in screen(current_view(busy_matrix), width=80, height=40))
    assert read_json(busy_matrix.run("gpt2_sgd_1gpu").status)["reason"].strip() in text


def test_failures_are_listed_before_other_runs(busy_matrix):
    folder = busy_matrix.run("gpt2_adamw_1gpu")
    attempts = [{"attempt": number, "status": status} for number, status in ((1, "stopped"), (2, "running"))]
    write_json(folder.status, read_json(folder.status) | {"attempt": 2, "attempts": attempts})
    lines = plain(current_view(busy_matrix))
    failed = next(index for index, text in enumerate(lines) if text.startswith("gpt2_sgd_1gpu failed"))
    assert failed < lines.index("gpt2_adamw_1gpu: attempt 2")


def test_the_headline_shows_the_estimated_end_and_cost(busy_matrix):
    view = current_view(busy_matrix)
    runs = tuple(replace(run, dollars=1.0) for run in view.runs)
    view = replace(view, runs=runs, left_s=3725.0, ends=NOW + 3725, dollars=4.0, all_dollars=9.5)
    (line,) = headline(view)
    assert re.search(r"left 1h02m, until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, cost \$4\.00 of \$9\.50$", line)
    first, *more = headline(view, 60)
    assert first == f"{view.name}: running"
    assert all(len(text) <= 60 for text in more)


@pytest.mark.parametrize(
    ("read", "total", "shown"),
    [(0.00003, 0.0009, "<0.0001/0.0009"), (0.0, 0.012, "0.00/0.01"), (1.5, 3.0, "1.50/3.00")],
)
def test_few_epochs_are_shown_without_an_exponent(busy_matrix, read, total, shown):
    view = current_view(busy_matrix)
    runs = tuple(replace(run, epochs=read, all_epochs=total) for run in view.runs)
    rows = estimate_lines(replace(view, runs=runs), NOW)[2 : 2 + len(runs)]
    assert all(f" {shown} " in row for row in rows), rows


def test_nothing_is_wrapped_or_omitted_without_a_screen(busy_matrix):
    lines = plain(current_view(busy_matrix))
    assert sum("loss is nan" in line for line in lines) == 1
    assert len([line for line in lines if line.startswith("gpt2_") and ":" not in line.split()[0]]) >= len(
        current_view(busy_matrix).runs
    )


# The newest entry of a recording


def test_the_last_complete_entry_is_read_from_the_end_of_a_file_of_any_length(tmp_path):
    file = JsonArrayFile(tmp_path / "a.json")
    for number in range(5000):
        file.append({"number": number, "text": "x" * 100})
    assert last_entry(tmp_path / "a.json")["number"] == 4999
    file.close()


def test_an_incomplete_entry_is_ignored(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n{"number": 1},\n{"numb')
    assert last_entry(path) == {"number": 1}


@pytest.mark.parametrize("text", [None, "", "[\n\n]\n", "nonsense"])
def test_an_empty_recording_has_no_entry(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert last_entry(path) is None


def test_a_finished_run_has_no_gpus(busy_matrix):
    folder = busy_matrix.run("gpt2_adamw_1gpu")
    attempt = {"attempt": 1, "status": "failed", "started": CREATED, "ended": NOW, "gpus": ["GPU-0"]}
    write_json(folder.status, read_json(folder.status) | {"status": Status.FAILED, "attempts": [attempt]})
    assert current_view(busy_matrix).gpus[0].run == ""


@pytest.mark.process
def test_status_and_estimate_do_not_import_the_driver_the_report_or_the_screen():
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import kmatrix.cli.status"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "lib")},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert "kmatrix.status.view.overview" in imported
    heavy = ("kmatrix.gpu.nvml", "kmatrix.report", "kmatrix.gputop", "pynvml", "rich", "psutil")
    assert not [name for name in imported if name.startswith(heavy)]


def test_a_spent_budget_is_named_with_a_command_that_is_not_refused(tmp_path):
    price = {"gpu_hour_price": 3600.0}
    stopped = FakeRun(optimizer="muon", device="cuda", status="stopped", stop_at=20, train=price)
    matrix = make_matrix(tmp_path, [FakeRun(device="cuda", train=price), stopped])
    before = Overview(matrix).poll(now=NOW)
    assert before.spent is None
    assert not any("BUDGET" in line for line in plain(before))
    for run in matrix.runs():
        write_json(run.run_json, read_json(run.run_json) | {"symbols": {"BUDGET_DOLLARS": "1"}})
    view = Overview(matrix).poll(now=NOW)
    spent = f"{money(view.dollars)} of $1.00"
    (command,) = [line for line in plain(view) if line.startswith("continue: ")]
    assert f"the budget of the matrix is spent: {spent}" in plain(view)
    more = int(command.rpartition(" BUDGET_DOLLARS=")[2])
    assert view.dollars < more <= view.dollars + 2  # as much again, in whole dollars
    (left,) = [line for line in estimate_lines(view, NOW) if line.startswith("left: ")]
    assert f"the budget of the matrix is spent ({spent}), not running: " in left
    assert left.endswith(f" BUDGET_DOLLARS={more}")
    # A budget that an execution had in place of the configured one holds, until it is spent, too.
    write_json(matrix.status, read_json(matrix.status) | {"budget": {"hours": 0, "dollars": 1000.0}})
    raised = Overview(matrix).poll(now=NOW)
    assert raised.spent is None
    assert asked_budget(matrix, Arguments("continue")) == MatrixBudget(dollars=1000.0)
    assert asked_budget(matrix, Arguments("continue", {"BUDGET_HOURS": "5"})) == MatrixBudget(hours=5.0, dollars=1000.0)
    assert asked_budget(matrix, Arguments("add", {}, {"BUDGET_DOLLARS": "7"})) == MatrixBudget(dollars=7.0)
