"""Cost, phases and alerts of a run in the summary, the JSON and the graph."""

import json

import pytest

from gpu_factory import STARTED, FakeGpus, record, write_phases
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.report.analysis import analyse
from kmatrix.report.gpu.numbers import (
    CostFactors,
    RecordedPhase,
    cost_of,
)
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.gpu.text import cost_lines
from kmatrix.report.write import write_summary
from kmatrix.status.alerts import Alert, AlertKind, Severity
from records_factory import FakeRun, make_matrix, replan, write_alerts

COUNTER = FakeGpus(power=(150.0, 150.0, 150.0, 150.0))


@pytest.fixture
def matrix(tmp_path):
    """A matrix of two recorded runs on four GPUs."""
    matrix = make_matrix(
        tmp_path,
        [FakeRun(gpus=4, device="cuda", tokens_per_s=6900.0), FakeRun(optimizer="muon", gpus=4, device="cuda")],
    )
    for name in ("gpt2_adamw_4gpu", "gpt2_muon_4gpu"):
        record(matrix.run(name), COUNTER)
    return matrix


def configure(run, symbols, **train):
    def change(record):
        if record["name"] != run.name:
            return record
        return record | {"symbols": symbols, "train": record["train"] | train}

    replan(MatrixDir(run.path.parent), change)


# ---- cost --------------------------------------------------------------------------------------------------------


def test_energy_and_gpu_hours_are_converted_to_cost_with_their_factors():
    cost = cost_of(3.6e6, 2.0, 3.0, CostFactors(energy_price=0.25, co2=400.0))
    assert (cost.kwh, cost.energy_cost, cost.co2_g, cost.gpu_hours, cost.gpu_cost) == (1, 0.25, 400, 2, 3)


def test_the_summary_prints_each_figure_with_its_factor(matrix):
    configure(matrix.run("gpt2_adamw_4gpu"), {"ENERGY_PRICE": "0.15", "CO2_FACTOR": "380"}, gpu_hour_price=1.25)
    text = write_summary(analyse(matrix))
    assert "Cost: energy $0.0015 at $0.15/kWh, 3.8 g CO2 at 380 g/kWh, 0.0667 GPU-hours $0.08 at $1.25" in text, text
    assert text.count("Cost: energy") == 1, "the other run names no factor"
    first, second = json.loads(matrix.results.read_text())["runs"]
    assert first["gpu"]["totals"]["kwh"] == pytest.approx(0.01)
    assert first["gpu"]["totals"]["gpu_cost"] == pytest.approx(4 * 60 / 3600 * 1.25)
    assert first["gpu"]["factors"]["co2"] == 380
    assert second["gpu"]["totals"]["energy_cost"] is None
    assert first["gpu"]["totals"]["tokens_per_joule"] == pytest.approx(1 / first["gpu"]["totals"]["joules_per_token"])


# ---- phases ------------------------------------------------------------------------------------------------------


def test_phases_have_a_duration_and_an_energy(tmp_path):
    counted = FakeGpus(power=(150.0, 150.0), memory=(1.0, 1.0), utilization=(1.0, 1.0), counter=True)
    record(RunDir(tmp_path), counted)
    write_phases(
        RunDir(tmp_path), ("set-up", -9, 5), ("evaluation", 10, 16), ("checkpoint", 16, 18), ("evaluation", 50, 80)
    )
    gpu = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert [(phase.name, phase.begin, phase.end) for phase in gpu.phases] == [
        ("set-up", 0, 5),
        ("evaluation", 10, 16),
        ("checkpoint", 16, 18),
        ("evaluation", 50, 59),
    ], "cut to the recording"
    assert gpu.phase_seconds("evaluation") == 15
    assert gpu.phase_joules("evaluation") == pytest.approx(300 * 15)
    (line,) = cost_lines(gpu)
    assert line == "Time: set-up 5.0s (1,500 J), evaluation 15.0s (4,500 J), checkpoint 2.0s (600 J) of 1m00s recorded"


def test_unknown_energy_of_a_phase_is_not_zero(tmp_path):
    record(RunDir(tmp_path), FakeGpus())  # its samples have no counter
    write_phases(RunDir(tmp_path), ("evaluation", 10, 16))
    assert read_gpu(RunDir(tmp_path), TrainingTotals()).phases == (
        RecordedPhase(name="evaluation", begin=10, end=16, joules=None),
    )


# ---- alerts ------------------------------------------------------------------------------------------------------

HOT = Alert(
    kind=AlertKind.TEMPERATURE,
    severity=Severity.WARNING,
    since=STARTED,
    until=STARTED + 95,
    about="GPU 3",
    value=91.0,
    threshold=87.0,
)
GONE = Alert(
    kind=AlertKind.LOST,
    severity=Severity.CRITICAL,
    since=STARTED + 60,
    about="GPU 1",
    reason="no response (values are null)",
)


def test_the_report_lists_the_alerts_of_a_run_with_advice(matrix):
    run = matrix.run("gpt2_muon_4gpu")
    write_alerts(run, HOT, GONE)
    lines = write_summary(analyse(matrix)).split("Alerts\n------\n")[1].split("\n\n")[0].splitlines()
    assert lines[0] == "gpt2_muon_4gpu"
    assert lines[1].startswith("    ! GPU 1: lost: no response (values are null) (from "), "the critical first"
    assert "to the end): check the kernel log" in lines[1]
    assert "GPU 3: 91 C, limit 87 C (from " in lines[-1] + lines[-2]
    assert "for 1m35s): check cooling" in " ".join(line.strip() for line in lines)
    (_, muon) = json.loads(matrix.results.read_text())["runs"]
    assert [alert["kind"] for alert in muon["alerts"]] == ["temperature", "gpu_lost"]
