"""Monitor simulated GPUs during a run whose trainer is scripted: recording, alerts, reports, pictures, gputop."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from PIL import Image

from gpu_stage import load_jsonl, scenario
from story import complete_lines, load_json
from waiting import wait_until

pytestmark = pytest.mark.story

GRAPHS = ("gpu_memory_comparison", "per_gpu_memory_breakdown", "gpu_load_balance_analysis", "gpu_memory_timeline")
SCENARIO = ("gpus 3", "0 * power 100", "0 * mem 10000", "6 1 all !lost")


def test_gpus_are_recorded_drawn_and_marked_and_a_lost_one_is_an_alert(story, tmp_path):
    """The second of three GPUs is lost while the run trains."""
    story.script({"adamw": [3.3]})
    story.hold()
    words = story.words(
        "OPTIMIZER=adamw", "GPU_MONITOR=y", "AUTO_GENERATE_GRAPHS=y", f"SIMULATE={scenario(tmp_path, *SCENARIO)}"
    )
    runner = story.start("test-matrix", *words)
    story.wait_for_start(1)
    matrix = story.newest()
    (run,) = matrix.runs()
    wait_until(lambda: any(one["event"] == "lost" for one in complete_lines(run.gpu_events)), "the GPU is lost")
    shown = story.make("status", f"TARGET={matrix.path}")
    assert "(simulated)" in shown
    story.let_go()
    assert runner.wait() == 0, (tmp_path / "output_0.txt").read_text()

    # The recording: unknown is null, never 0, and both layouts of the file agree.
    assert [one["gpu_index"] for one in load_jsonl(run.gpu_events) if one["event"] == "lost"] == [1]
    entries = load_json(run.path / f"gpu_stats_{run.name}_multi_gpu.json")
    lost = [entry["multi_gpu_data"][1]["memory_used"] is None for entry in entries]
    assert (lost[0], lost[-1]) == (False, True)
    assert all(after or not before for before, after in pairwise(lost)), "it stays lost"
    last = entries[-1]["aggregate_stats"]
    assert (last["gpu_count"], last["total_memory_used"], last["total_power"]) == (2, 20000, 200)
    assert not [entry for entry in entries if entry["multi_gpu_data"][1]["power"] == 0]
    recorded = load_json(run.gpu_summary)
    assert recorded["simulated"] is True
    assert [gpu["lost_at"] is not None for gpu in recorded["gpus"]] == [False, True, False]

    # Reports.
    summary = matrix.summary.read_text()
    for text in ("(simulated)", "GPU 1 was lost at", "! GPU 1: lost: "):
        assert text in summary
    alerts = [one for one in complete_lines(run.path / "alerts.jsonl") if one["kind"] == "gpu_lost"]
    assert {(one["about"], one["severity"]) for one in alerts} == {("GPU 1", "critical")}
    for name in GRAPHS:
        with Image.open(matrix.graphs / f"{name}.png") as picture:
            assert picture.width >= 800
    replay = story.clone.run(story.clone.python, "scripts/gputop.py", "--replay", str(run.path), "--once")
    assert replay.returncode == 0, replay.stderr
    assert "SIMULATED" in replay.stdout


def test_the_report_shows_the_energy_per_token_that_was_recorded(story, tmp_path):
    story.script({"adamw": [3.3]})
    story.hold()
    path = scenario(tmp_path, "gpus 4", "0 * power 100..250")
    runner = story.start("test-matrix", *story.words("OPTIMIZER=adamw", "GPU_MONITOR=y", f"SIMULATE={path}"))
    story.wait_for_start(1)
    (run,) = story.newest().runs()
    stats = run.path / f"gpu_stats_{run.name}.json"
    wait_until(lambda: stats.exists() and len(load_json(stats)) > 2, "some seconds are recorded")
    story.let_go()
    assert runner.wait() == 0, (tmp_path / "output_0.txt").read_text()
    recorded, result = load_json(run.gpu_summary), load_json(run.result)
    joules = [gpu["joules"] for gpu in recorded["gpus"]]
    assert recorded["energy_source"] == "counter"
    assert joules == sorted(joules)
    assert joules[0] > 0
    (reported,) = load_json(story.newest().results)["runs"]
    assert reported["gpu"]["whole"]["joules"] == pytest.approx(sum(joules), abs=0.01)
    assert reported["gpu"]["whole"]["joules_per_token"] == pytest.approx(sum(joules) / result["tokens"])
    printed = re.search(r"([\d.e-]+) J/token", story.newest().summary.read_text())
    assert float(printed[1]) == pytest.approx(sum(joules) / result["tokens"], rel=0.01)


def test_an_impossible_simulation_is_refused_before_any_file_is_written(story):
    for simulate, message in (("0", "invalid SIMULATE=0"), ("nothing", "neither a number nor a")):
        refused = story.clone.refused("test-matrix", *story.words("GPU_MONITOR=y", f"SIMULATE={simulate}"))
        assert message in refused
    assert list(story.results.iterdir()) == []
