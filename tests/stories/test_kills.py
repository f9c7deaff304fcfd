"""Kill each kind of process in the middle of a run, and continue: the numbers are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from held_training import HeldTraining
from kmatrix.records.attempts import read_all
from story import complete_lines, kill, matrices, numbers_of, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

STEPS, INTERVAL = 24, 4
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=8", "LOG_INTERVAL=1", "REUSE=n", "CPU_THREADS=1"),
    *("OPTIMIZER=muon", "NUM_GPUS=2", "DROPOUT=0.1", "AUTO_GENERATE_GRAPHS=n"),
    *(f"MAX_ITERS={STEPS}", f"CHECKPOINT_INTERVAL={INTERVAL}"),
)


def test_each_process_is_killed_in_mid_run_and_the_bits_stay_equal(clone, background, tmp_path):
    """Each attempt waits in its sixth step, after its first checkpoint, until something is killed."""
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("test-matrix", *TINY, f"RESULTS_DIR={tmp_path / 'calm'}")
    calm = only(only(matrices(tmp_path / "calm")).glob("gpt2_*"))

    held = HeldTraining(tmp_path / "held", f"steps == {INTERVAL + 2}")
    results = tmp_path / "rough"
    runner = background("test-matrix", *TINY, f"RESULTS_DIR={results}", **held.environment)

    def wait_for(attempt: int) -> Path:
        wait_until(lambda: held.holds(attempt) or runner.poll() is not None, f"attempt {attempt} is in mid-run")
        assert runner.poll() is None
        return only(results.glob("*/gpt2_*"))

    run = wait_for(1)
    assert kill(processes_of(run)["recorder"]) == 1
    wait_until(lambda: processes_of(run)["recorder"], "a new recorder")
    assert kill(processes_of(run)["rank"][:1]) == 1
    assert runner.wait() == 1
    assert [one.end.kind for one in read_all(run)] == ["killed"]
    runner = background("continue", f"TARGET={run.parent}", **held.environment)
    wait_for(2)
    assert kill(processes_of(run)["program"]) == 1  # the kernel kills its ranks, and the run goes on
    wait_for(3)
    assert kill(processes_of(run.parent)["runner"]) == 1
    runner.wait()
    wait_until(lambda: not processes_of(run)["rank"], "its ranks have ended with it")
    clone.check("continue", f"TARGET={run.parent}")
    assert numbers_of(run) == numbers_of(calm)
    assert len(read_all(run)) == 4
    resumes = [line["step"] for line in complete_lines(run / "events.jsonl") if line["event"] == "resume"]
    assert len(resumes) == 3
    assert resumes == sorted(resumes)
    assert resumes[0] >= INTERVAL
    assert not any(processes_of(run.parent).values())
    finished = (run / "result.json").read_bytes()
    assert "nothing to run" in clone.check("continue", f"TARGET={run.parent}")
    assert (run / "result.json").read_bytes() == finished
