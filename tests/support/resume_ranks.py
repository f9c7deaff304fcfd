"""Train each case without interruption and in two parts, with one process group for all cases. Run by test_resume.py.

`python resume_ranks.py FOLDER CASE ...`, on each rank, trains FOLDER/<case>/straight and /parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from factories import make_data, train_fields
from gpt2 import dist, train
from gpt2.log import RunLog
from gpt2.optim.builders import BUILDERS
from gpt2.watchdog import Watchdog
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import RunDir
from optim_factory import Settings
from training import StopAfter

STEPS, EPOCH = 12, 5  # steps of a run, and of an epoch
SPECIAL = {"spam_interval": 4, "spam_warmup_steps": 2, "soap_frequency": 3}
PRUNED = {"target_sparsity": 0.5, "pruning_warmup": 0.1, "pruning_ramp_end": 0.75, "pruning_frequency": 2}


class Case(NamedTuple):
    """One run in parts. stop: updates after which the first part is asked to stop; it ends one step later."""

    name: str
    fields: dict[str, Any]
    stop: int = 6


def cases() -> Iterator[Case]:
    """Yield every optimizer with dropout, and stops at the border of an epoch."""
    plain = {"dropout": 0.1}
    for name in sorted(BUILDERS):
        for base in ("adam", "adamw", "adamwadv", "adamwspam") if name == "adamwprune" else ("",):
            pruned = {"adamwprune_base": base, "pruning": "state", **PRUNED} if base else {}
            fields = asdict(Settings(optimizer=name, learning_rate=1e-3)) | SPECIAL | pruned | plain
            yield Case(f"{name}{base and '-'}{base}", fields)
            if name in ("adamw", "muon"):  # with several ranks, each holds a share of the states
                yield Case(f"{name}-sharded", fields | {"zero_stage": 1})
    for method in ("magnitude", "movement"):
        yield Case(method, {"pruning": method, **PRUNED, **plain})
    yield Case("border", plain, stop=2 * EPOCH - 1)
    yield Case("start", plain, stop=0)


def prepare(folder: Path, world: int, case: Case, sha256: str) -> None:
    for name in ("straight", "parts"):
        run_dir = RunDir(folder / case.name / name)
        run_dir.path.mkdir(parents=True)
        settings = {"batch_size": 2, "gradient_accumulation": 2, "num_gpus": world, "max_iters": STEPS}
        fields = train_fields(folder / "data", sha256, **case.fields | settings | {"save_best": False})
        write_json(run_dir.run_json, {"run_id": "0123456789", "name": name, "train": fields})


def run_attempt(run_dir: RunDir, *, attempt: int = 1, stop: int | None = None, resume: str = "none") -> None:
    """Execute one attempt in this process."""
    log = RunLog(run_dir, "0123456789", attempt, main=dist.environment()[0] == 0)
    torch.manual_seed(99 + dist.environment()[0] + 10 * attempt)  # a resume must not depend on it
    watchdog = Watchdog(log, dist.environment()[0])
    train.train(read_json(run_dir.run_json), log, StopAfter(log, stop), watchdog, resume=resume)  # type: ignore[arg-type]
    watchdog.end()


def main(folder: Path, names: list[str]) -> None:
    chosen = [case for case in cases() if case.name in names]
    rank, _, size, *_ = dist.environment()
    if rank == 0:
        windows = EPOCH * 4 * size
        sha256 = make_data(folder / "data", train=windows * 32 + 1, val=4_000)
        for case in chosen:
            prepare(folder, size, case, sha256)
    start = dist.start
    worlds: list[dist.World] = []

    def shared_world(config: Any) -> dist.World:
        """One group of ranks for all runs."""
        if not worlds:
            worlds.append(start(config))
        return worlds[0]

    if size > 1:  # the others wait for the folders
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        worlds.append(dist.World(rank=rank, size=size, device=torch.device("cpu"), backend="gloo"))
        torch.set_num_threads(1)
    dist.start = shared_world
    for case in chosen:
        straight, parts = (RunDir(folder / case.name / name) for name in ("straight", "parts"))
        run_attempt(straight)
        run_attempt(parts, stop=case.stop)
        run_attempt(parts, attempt=2, resume="latest")
    dist.finish(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
