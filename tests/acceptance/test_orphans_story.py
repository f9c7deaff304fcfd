"""Kill runner, guard and recorder and continue at once: two attempts of one run never train at the same time.

Each kill costs seconds; KMATRIX_KILLS=10 kills more often.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from slow_training import SlowTraining
from story import complete_lines, load_json, matrices, only, processes_of
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("KMATRIX_KILLS", "2"))
STEPS = max(300, 25 * KILLS)  # an attempt trains at most twenty before it is killed
SAMPLE_S = 0.05
WAITING = r"waiting for an earlier attempt to exit: (.*)\n"
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=16", "BLOCK_SIZE=16", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=4", "EVAL_INTERVAL=1000", "LOG_INTERVAL=10", "REUSE=n", "OPTIMIZER=adamw"),
    *("AUTO_GENERATE_GRAPHS=n", f"MAX_ITERS={STEPS}", "CHECKPOINT_INTERVAL=50", "NUM_GPUS=2"),
)


class Sampler:
    """Samples the processes of a run every 50 ms: the attempts that are alive at the same time."""

    def __init__(self, run: Path) -> None:
        self.run, self.together, self.samples, self.attempts = run, [], 0, set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            found = {}
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal() and (attempt := self._attempt(entry)):
                    found[int(entry.name)] = attempt
            self.samples += 1
            self.attempts |= set(found.values())
            if len(set(found.values())) > 1:
                self.together.append(found)

    def _attempt(self, process: Path) -> str:
        """Return the attempt of a guard, torchrun or rank of the run, "" for another process or a dead one."""
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            dead = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return ""
        # By its path: other programs of this machine may train a run of this name.
        if dead or "gpt2.train" not in words or str(self.run.resolve()) not in words:
            return ""
        return words[words.index("--attempt") + 1]


def test_two_attempts_of_a_run_never_train_at_the_same_time(clone, background, tmp_path):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    slow = SlowTraining(tmp_path / "slow", "0.05 if steps < 20 else inf")  # no attempt finishes before it is killed
    results = tmp_path / "results"
    runner = background("test-matrix", *TINY, f"RESULTS_DIR={results}", **slow.environment)
    run = wait_until(lambda: next(iter(results.glob("*/gpt2_*/metrics.jsonl")), None), "the run trains").parent
    matrix = only(matrices(results))
    with Sampler(run) as sampler:
        for number in range(1, KILLS + 1):
            wait_until(lambda number=number: trains(run, number), f"attempt {number} trains")
            processes = processes_of(run)
            assert processes["trainer"]
            assert processes["guard"]
            assert processes["rank"]
            orphans = [*processes["trainer"], *processes["rank"]]
            for orphan in orphans:
                orphan.suspend()  # it is asked to stop, and cannot yet, however long `continue` takes to start
            for victim in (*processes["guard"], *processes["recorder"]):
                victim.kill()
            runner.kill()
            runner.wait()
            runner = background("continue", f"TARGET={matrix}", **slow.environment)
            output = tmp_path / f"output_{number}.txt"
            who = wait_until(lambda output=output: re.search(WAITING, output.read_text()), "it waits")
            for orphan in orphans:
                orphan.resume()
            assert any(f"(pid {orphan.pid})" in who[1] for orphan in orphans), who[1]
        wait_until(lambda: trains(run, KILLS + 1), "the last attempt trains")
        slow.free()
        assert runner.wait(600) == 0, output.read_text()
    assert sampler.samples > 20
    assert sampler.attempts == {str(number) for number in range(1, KILLS + 2)}
    assert sampler.together == []
    result = load_json(run / "result.json")
    assert (result["status"], result["attempt"], result["step"]) == ("finished", KILLS + 1, STEPS)
    waits = [line for line in complete_lines(matrix / "journal.jsonl") if line["event"] == "run waits"]
    assert len(waits) == KILLS
    assert not any(processes_of(matrix).values())


def trains(run: Path, attempt: int) -> bool:
    """Return whether an attempt has logged a step."""
    lines = complete_lines(run / "metrics.jsonl")
    return any(line.get("attempt") == attempt and "train/loss" in line for line in lines)
