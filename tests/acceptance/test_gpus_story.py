"""Monitor simulated GPUs and real ranks during a real training, through make."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from PIL import Image

from gpu_stage import load_json, load_jsonl, only, scenario
from kmatrix.gpu.formats.binary import read_samples
from slow_training import SlowTraining
from story import complete_lines
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

GRAPHS = (
    "gpu_memory_comparison",
    "per_gpu_memory_breakdown",
    "gpu_load_balance_analysis",
    "gpu_memory_timeline",
)
SHORT = ("OPTIMIZER=adamw", "NUM_GPUS=2", "MAX_ITERS=40", "EVAL_SAMPLES=20")
WATTS = (100.0, 150.0, 200.0, 250.0)
PERIOD_S = 0.1  # update period of the simulated GPUs
STRAGGLER = 2
SLOW = f"0.6 if os.environ['RANK'] == '{STRAGGLER}' else 0.0"  # s per step: more than a step takes under load


def matrix_of(clone, folder, *arguments, target="test-matrix", **variables):
    """Run a short matrix in the clone; return its directory and that of its only run."""
    if target != "quickstart":
        assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.make(target, *SHORT, f"RESULTS_DIR={folder}", *arguments, **variables)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    matrix = only(folder.glob("test_matrix_results_*"))
    return matrix, only(matrix.glob("gpt2_*"))


def test_simulated_gpus_are_recorded_drawn_and_marked(clone, tmp_path):
    matrix, run = matrix_of(clone, tmp_path, "SIMULATE=4", target="quickstart")
    summary = (matrix / "summary_report.txt").read_text()
    assert "(simulated)" in summary
    assert "J/token" in summary
    assert "kWh" in summary
    assert "Time: set-up " in summary
    assert "Balance (training): CV = " in summary
    recorded = load_json(run / "gpu_summary.json")
    assert recorded["simulated"] is True
    assert len(recorded["gpus"]) == 4
    assert all("(simulated)" in gpu["gpu_name"] for gpu in recorded["gpus"])
    for name in GRAPHS:
        with Image.open(matrix / "graphs" / f"{name}.png") as picture:
            assert picture.width >= 800

    compared = clone.run(clone.python, "scripts/generate_gpu_memory_comparison.py", str(matrix))
    assert compared.returncode == 0, compared.stderr
    report = clone.run(clone.python, "scripts/generate_consolidated_gpu_summary.py", str(matrix))
    assert report.returncode == 0, report.stderr
    assert "ADAMW Training - Per-GPU Breakdown:" in report.stdout
    assert "GPU 3: " in report.stdout

    replay = clone.run(clone.python, "scripts/gputop.py", "--replay", str(run), "--once")
    assert replay.returncode == 0, replay.stderr
    assert "SIMULATED" in replay.stdout


def test_the_monitor_symbol_turns_recording_off_and_keeps_run_ids(clone, tmp_path):
    """Without GPUs the recorder records the ranks, their memory and their balance."""
    results, summaries = {}, {}
    for choice in ("y", "n"):
        matrix, run = matrix_of(clone, tmp_path / choice, f"GPU_MONITOR={choice}")
        result = load_json(run / "result.json")
        results[choice] = (result["run_id"], result["final_val_loss"])
        summaries[choice] = (matrix / "summary_report.txt").read_text()
        assert bool(list(run.glob("gpu_*"))) == (choice == "y")
    assert results["y"] == results["n"]
    assert "CPU ranks" in summaries["y"]
    assert "Balance (training): CV = " in summaries["y"]
    assert "Balance (training): CV = " not in summaries["n"]


def test_the_report_shows_the_scripted_energy_per_token(clone, tmp_path):
    scenario_path = scenario(tmp_path, "gpus 4", f"0 * power {WATTS[0]:g}..{WATTS[-1]:g}")
    matrix, run = matrix_of(clone, tmp_path / "results", f"SIMULATE={scenario_path}")
    recorded, result = load_json(run / "gpu_summary.json"), load_json(run / "result.json")
    assert recorded["energy_source"] == "counter"
    samples = read_samples(run / "gpu_samples.bin")
    assert (recorded["started"], recorded["ended"]) == (samples.times[0], samples.times[-1])
    # A counter is read before the time of its sample is taken, on a busy machine long before, but after the sample
    # before it; before the first one, the header was made.
    shortest = samples.times[-2] - samples.times[0] - PERIOD_S
    longest = samples.times[-1] - samples.header["started"]["wall"] + PERIOD_S
    for gpu, watts in zip(recorded["gpus"], WATTS, strict=True):
        assert watts * shortest <= gpu["joules"] <= watts * longest
    joules = sum(gpu["joules"] for gpu in recorded["gpus"])
    assert recorded["totals"]["joules"] == pytest.approx(joules, abs=0.01)
    (reported,) = load_json(matrix / "results.json")["runs"]
    assert reported["gpu"]["totals"]["joules_per_token"] == pytest.approx(joules / result["tokens"])
    printed = re.search(r"whole run, ([\d.e-]+) J/token", (matrix / "summary_report.txt").read_text())
    assert printed
    assert float(printed[1]) == pytest.approx(joules / result["tokens"], rel=0.01)


def test_a_gpu_lost_in_mid_run_is_null_and_the_run_continues(clone, background, tmp_path):
    """The GPU is lost six seconds after the recorder was started: after its first sample on a slow machine, too."""
    scenario_path = scenario(tmp_path, "gpus 3", "0 * power 100", "0 * mem 10000", "6 1 all !lost")
    slow = SlowTraining(tmp_path / "slow", "inf")
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = (*SHORT, f"RESULTS_DIR={tmp_path / 'results'}", f"SIMULATE={scenario_path}")
    runner = background("test-matrix", *arguments, **slow.environment)

    def is_lost() -> bool:
        recorded = (tmp_path / "results").glob("*/gpt2_*/gpu_events.jsonl")
        return any(event["event"] == "lost" for path in recorded for event in complete_lines(path))

    wait_until(lambda: is_lost() and slow.has_begun(), "the GPU is lost, and the run trains")
    slow.free()
    assert runner.wait(600) == 0, (tmp_path / "output_0.txt").read_text()
    matrix = only((tmp_path / "results").glob("test_matrix_results_*"))
    run = only(matrix.glob("gpt2_*"))
    assert load_json(run / "result.json")["status"] == "finished"
    events = load_jsonl(run / "gpu_events.jsonl")
    assert [event["gpu_index"] for event in events if event["event"] == "lost"] == [1]
    entries = load_json(run / f"gpu_stats_{run.name}_multi_gpu.json")
    lost = [entry["multi_gpu_data"][1]["memory_used"] is None for entry in entries]
    assert not lost[0]
    assert lost[-1]
    assert all(after or not before for before, after in pairwise(lost)), "it stays lost"
    assert entries[-1]["aggregate_stats"]["gpu_count"] == 2
    assert entries[-1]["aggregate_stats"]["total_memory_used"] == 20000
    assert entries[-1]["aggregate_stats"]["total_power"] == 200
    assert [entry["multi_gpu_data"][1]["power"] for entry in entries if entry["multi_gpu_data"][1]["power"] == 0] == []
    gpus = load_json(run / "gpu_summary.json")["gpus"]
    assert [gpu["lost_at"] is not None for gpu in gpus] == [False, True, False]
    summary = (matrix / "summary_report.txt").read_text()
    assert "GPU 1 was lost at" in summary
    alerts = [alert for alert in load_json(run / "status.json")["alerts"] if alert["kind"] == "gpu_lost"]
    assert [(alert["about"], alert["severity"]) for alert in alerts] == [("GPU 1", "critical")]
    assert "! GPU 1: lost: " in summary.partition("Alerts\n------")[2]


def test_a_straggler_among_four_ranks_is_named_although_memory_is_balanced(clone, tmp_path):
    """Rank 2 needs longer for each step: every step waits for it, and the CV of memory does not show it."""
    slow = SlowTraining(tmp_path / "slow", SLOW)
    scenario_path = scenario(tmp_path, "gpus 4", "0 * mem 17300")
    arguments = (
        f"SIMULATE={scenario_path}",
        "NUM_GPUS=4",
        "MAX_ITERS=24",
        "LOG_INTERVAL=4",
        "BATCH_SIZE=1",
        "GLOBAL_BATCH=4",
    )
    matrix, _ = matrix_of(clone, tmp_path / "results", *arguments, **slow.environment)
    assert slow.has_begun()
    summary = (matrix / "summary_report.txt").read_text()
    assert "Balance (training): CV = 0.0% (Excellent)" in summary
    named = re.search(r"Most often slowest: rank (\d+), in (\d+)% of", summary)
    assert named, summary
    assert int(named[1]) == STRAGGLER
    assert int(named[2]) >= 50
    share = re.search(r"straggler time share ([\d.]+)% of", summary)
    assert share
    assert float(share[1]) > 5
    assert f"the CV does not show rank {STRAGGLER}" in " ".join(summary.split())


def test_without_a_gpu_the_screen_reports_it_and_succeeds(clone):
    for arguments in (("--once",), ("--json",)):
        completed = clone.run(clone.python, "scripts/gputop.py", *arguments)
        assert completed.returncode == 0, completed.stderr
        assert "Traceback" not in completed.stdout + completed.stderr
    completed = clone.run(
        clone.python,
        "-c",
        "import scripts.gputop; m=scripts.gputop.GPUMonitor(); m.initialize(); print(f'GPUs: {m.gpu_count}')",
    )
    assert completed.stdout.strip() == "GPUs: 0", completed.stderr


@pytest.mark.parametrize(("simulate", "message"), [("0", "invalid SIMULATE=0"), ("nothing", "neither a number nor a")])
def test_an_impossible_simulation_is_refused_before_any_file_is_written(clone, tmp_path, simulate, message):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.make("test-matrix", f"SIMULATE={simulate}", f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 2
    assert message in completed.stderr
    assert list(tmp_path.iterdir()) == []
