"""The trainer with one injected fault: the program that tests start with torchrun.

The variable FAULT="<kind>:<rank>:<step>" selects the fault, the rank and the step. FAULTS has the kinds of one step;
others are: slow (each step of that rank takes <step> ms more), oom (micro-batches of more than FAULT_FITS sequences run
out of memory), full (no file may exceed 64 KiB), none.
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
IS_HERE = os.environ.get("RANK", "0") == RANK
DUMP = os.environ.get("FAULT_DUMP")


def fail() -> None:
    raise RuntimeError("the cable was pulled")


def hang() -> None:
    Path(os.environ["FAULT_HANGS"]).touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)


FAULTS = {
    "raise": fail,
    "hang": hang,  # the rank never comes back
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": lambda: re.match("(a*)*b", "a" * 40),  # code that holds the GIL and does not return
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),  # to that rank alone
    "nan": lambda: float("nan"),  # the loss
}


class FaultyGPT(GPT):
    """The model, with the fault in its forward pass of training."""

    calls = 0

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(idx, targets)
        if not self.training or not IS_HERE:
            return logits, loss
        if KIND == "slow":
            time.sleep(int(STEP) / 1000)
        if KIND == "oom" and len(idx) > int(os.environ["FAULT_FITS"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        found = FAULTS[KIND]() if KIND in FAULTS and self.calls == int(STEP) else None
        FaultyGPT.calls += 1
        return logits, loss * found if KIND == "nan" and found else loss


def build_model(config: Any) -> GPT:
    model = original_build_model(config)
    model.__class__ = FaultyGPT
    if DUMP:
        models_to_dump.append(model)
    return model


def finish(code: int) -> None:
    for model in models_to_dump:
        torch.save(model.state_dict(), Path(DUMP or "") / f"{os.environ.get('RANK', '0')}.pt")
    original_finish(code)


if __name__ == "__main__":
    models_to_dump: list[GPT] = []
    original_build_model, train.build_model = train.build_model, build_model
    original_finish, dist.finish = dist.finish, finish
    if KIND == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    watchdog.FLOOR_S = float(os.environ.get("FAULT_FLOOR_S", watchdog.FLOOR_S))
    train.main()
