"""Kill, stop, freeze and starve the real trainer at named places: one reason each time, and equal bits in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmatrix.records.attempts import read_all
from story import kill, matrices, numbers_of, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.nightly

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=6", "CHECKPOINT_INTERVAL=4", "LOG_INTERVAL=1", "REUSE=n"),
    *("CPU_THREADS=1", "OPTIMIZER=muon", "NUM_GPUS=2", "DROPOUT=0.1", "AUTO_GENERATE_GRAPHS=n", "MAX_ITERS=70"),
    "STALL_FACTOR=5",
)
# Attempt n is held at place n: as ranks/<r>/state.json names it, or in the thread that writes a checkpoint.
PLACES = (*("set-up", "data", "forward", "backward", "update", "numbers", "evaluation", "checkpoint", "write", "end"),)
VICTIMS = {
    "rank 0": lambda found: [process for process in found["rank"] if process.environ()["RANK"] == "0"],
    "rank 1": lambda found: [process for process in found["rank"] if process.environ()["RANK"] == "1"],
    "program": lambda found: found["program"],
    "the whole group": lambda found: [*found["program"], *found["rank"]],
}
# In every rank, because the ranks import it from a folder in PYTHONPATH.
HOOKS = '''
"""Hold the ranks at a place until they are killed or asked to stop, or make one of them fail."""
import os, resource, signal, sys, time
if "gpt2.train" in sys.orig_argv:
    import torch
    from gpt2 import dist, watchdog
    from gpt2.model.gpt2 import GPT
    folder, places, fault, rank = {folder!r}, {places!r}, {fault!r}, os.environ["RANK"]
    attempt = int(sys.orig_argv[sys.orig_argv.index("--attempt") + 1])
    watchdog.FLOOR_S = 20.0 if fault == "freeze" else watchdog.FLOOR_S
    place, steps, asked = dict(enumerate(places, 1)).get(attempt), 0, []

    def reach(name):
        if name == place and (steps > 5 or name in ("set-up", "end")):
            open(f"{{folder}}/{{attempt}}-{{rank}}", "a").close()
            while not asked:
                time.sleep(0.02)
        if name == "forward" and attempt == 1 and rank == "1" and steps == 6:
            if fault == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            if fault == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
        if name == "step" and attempt == 1 and fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    def work(self, kind, step):
        global steps
        steps += kind == "step"
        former[0](self, kind, step)
        reach(kind)

    def at(self, name):
        former[1](self, name)
        reach(name)

    def start(config):
        world = former[2](config)
        reach("set-up")
        return world

    def note(self, number, frame):
        asked.append(number)
        former[3](self, number, frame)

    def save(*given):
        former[4](*given)
        reach("write")

    def forward(self, *given):
        logits, loss = former[5](self, *given)
        is_broken = fault == "nan" and self.training and (attempt, rank, steps) == (1, "1", 6)
        return logits, loss * float("nan") if is_broken else loss

    former = watchdog.Watchdog.work, watchdog.Watchdog.at, dist.start, dist.Stop._handle, torch.save, GPT.forward
    watchdog.Watchdog.work, watchdog.Watchdog.at, dist.start, dist.Stop._handle = work, at, start, note
    torch.save, GPT.forward = save, forward
'''


def hooks(folder: Path, places: tuple[str, ...] = (), fault: str = "") -> dict[str, str]:
    """Write the hooks into a new folder, and return the environment of a trainer that has them."""
    folder.mkdir()
    text = HOOKS.format(folder=str(folder), places=places, fault=fault)
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def finished(clone, folder: Path, *words: str) -> dict:
    """Return the numbers of an uninterrupted run."""
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("test-matrix", *TINY, *words, f"RESULTS_DIR={folder}")
    return numbers_of(only(only(matrices(folder)).glob("gpt2_*")))


@pytest.fixture(scope="module")
def calm(module_clone, tmp_path_factory):
    return finished(module_clone, tmp_path_factory.mktemp("calm"))


def kinds_of(run: Path) -> list[str]:
    return [one.end.kind if one.end else "lost" for one in read_all(run)]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_that_is_killed_at_each_of_ten_places_ends_with_equal_bits(clone, background, tmp_path, calm, victim):
    clone.check("defconfig-gpt2-cpu-quick")
    held, results = tmp_path / "held", tmp_path / "rough"
    environment = hooks(held, PLACES)
    runner = background("test-matrix", *TINY, f"RESULTS_DIR={results}", **environment)
    for attempt, place in enumerate(PLACES, 1):
        expected = {f"{attempt}-{rank}" for rank in (range(1) if place == "write" else range(2))}

        def is_held(expected=expected) -> bool:
            return expected <= {path.name for path in held.iterdir()}

        wait_until(lambda: is_held() or runner.poll() is not None, f"{place}: held, or the runner has ended")  # noqa: B023
        run = only(results.glob("*/gpt2_*"))
        if not is_held():
            runner = background("continue", f"TARGET={run.parent}", **environment)
            wait_until(lambda: is_held() or runner.poll() is not None, f"{place}: held")  # noqa: B023
            assert is_held(), place
        assert kill(VICTIMS[victim](processes_of(run))) >= 1
    runner.wait()
    clone.check("continue", f"TARGET={run.parent}")
    # A run is finished if rank 0 can write its result after a kill at its end.
    assert len(kinds_of(run)) - len(PLACES) in (0, 1)
    assert set(kinds_of(run)[:-1]) <= {"killed", "lost", "preempted"}
    assert kinds_of(run)[-1] == "finished"
    assert numbers_of(run) == calm
    wait_until(lambda: not any(processes_of(run.parent).values()), "a runner that has let go ends soon")


ENDINGS = {  # fault, kinds of the attempts, and a part of the first reason
    "a stop": ("stop", ["signal", "finished"], "SIGTERM"),
    "a frozen rank": ("freeze", ["stall", "finished"], "rank 1 is in "),
    "a full disk": ("full", ["error", "finished"], "could not be written"),
    "a loss that is not finite on one rank": ("nan", ["nan", "finished"], "loss is nan at step"),
    "out of memory on one rank": ("oom", ["oom", "finished"], "CUDA out of memory"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_that_ended_has_one_reason_and_continues_to_equal_bits(clone, background, tmp_path, calm, name):
    fault, kinds, reason = ENDINGS[name]
    clone.check("defconfig-gpt2-cpu-quick")
    held, results = tmp_path / "held", tmp_path / "rough"
    environment = hooks(held, ("forward",) if fault == "stop" else (), fault)
    runner = background("test-matrix", *TINY, f"RESULTS_DIR={results}", **environment)
    if fault == "stop":
        wait_until(lambda: (held / "1-0").exists() and (held / "1-1").exists(), "it is held")
        only(processes_of(only(results.glob("*/gpt2_*")))["program"]).terminate()
    runner.wait()
    run = only(results.glob("*/gpt2_*"))
    if fault != "oom":  # which goes on with half the micro-batch
        clone.check("continue", f"TARGET={run.parent}", "RETRY_FAILED=1")
    assert kinds_of(run) == kinds
    assert reason in read_all(run)[0].end.reason
    now = numbers_of(run)
    if fault == "oom":  # dropout draws other numbers for smaller micro-batches, after the last checkpoint
        assert now["final_val_loss"] == pytest.approx(calm["final_val_loss"], abs=0.1)
        now, calm = ([line for line in found["steps"].items() if line[0] < 4] for found in (now, calm))
    assert now == calm
