"""The trainer with one injected fault: the program that tests start with torchrun.

The variable FAULT="<kind>:<rank>:<step>" selects the fault, the rank and the step. Kinds:
nan (that rank's loss), raise (an error),
signal (SIGTERM to that rank alone), kill (SIGKILL to itself), hang (the rank never comes back),
freeze (SIGSTOP to itself), spin (code that holds the GIL and does not return),
slow (each step of that rank takes <step> ms more), oom (micro-batches of more than FAULT_FITS sequences run
out of memory), full (no file may exceed 64 KiB), leave (the rank is killed before it leaves with the others), none.
FAULT_DUMP: folder for the final weights of each rank.  FAULT_FLOOR_S: shortest time that counts as a hang.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch

from gpt2 import dist, train, watchdog
from gpt2.model.gpt2 import GPT

KIND, RANK, STEP = os.environ.get("FAULT", "none:0:0").split(":")
DUMP = os.environ.get("FAULT_DUMP")


class FaultyGPT(GPT):
    """The model, with the fault in its forward pass of training."""

    calls = 0

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(idx, targets)
        if not self.training:
            return logits, loss
        is_faulty_step = KIND != "none" and os.environ.get("RANK", "0") == RANK and self.calls == int(STEP)
        FaultyGPT.calls += 1
        if KIND == "slow" and os.environ.get("RANK", "0") == RANK:
            time.sleep(int(STEP) / 1000)
        if KIND == "oom" and os.environ.get("RANK", "0") == RANK and len(idx) > int(os.environ["FAULT_FITS"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if is_faulty_step and KIND == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_faulty_step and KIND == "spin":
            re.match("(a*)*b", "a" * 40)
        if is_faulty_step and KIND == "nan":
            return logits, loss * float("nan")
        if is_faulty_step and KIND == "raise":
            raise RuntimeError("the cable was pulled")
        if is_faulty_step and KIND == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if is_faulty_step and KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_faulty_step and KIND == "hang":
            (Path(os.environ["FAULT_HANGS"])).touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(600)
        return logits, loss


def build_model(config: Any) -> GPT:
    model = original_build_model(config)
    model.__class__ = FaultyGPT
    if DUMP:
        models_to_dump.append(model)
    return model


def leave_together(world: Any, log: Any) -> None:
    if KIND == "leave" and os.environ.get("RANK", "0") == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    original_leave_together(world, log)


def finish(code: int) -> None:
    for model in models_to_dump:
        torch.save(model.state_dict(), Path(DUMP or "") / f"{os.environ.get('RANK', '0')}.pt")
    original_finish(code)


if __name__ == "__main__":
    models_to_dump: list[GPT] = []
    original_build_model, train.build_model = train.build_model, build_model
    original_finish, dist.finish = dist.finish, finish
    original_leave_together, train.leave_together = train.leave_together, leave_together
    if KIND == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    watchdog.FLOOR_S = float(os.environ.get("FAULT_FLOOR_S", watchdog.FLOOR_S))
    dist.TIMEOUT_S = int(os.environ.get("FAULT_COLLECTIVE_S", dist.TIMEOUT_S))
    train.main()
