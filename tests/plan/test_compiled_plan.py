"""With COMPILE=y on GPUs, the largest micro-batch, the verdict and the advice are those of the compiled step."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from factories import ROOT
from kmatrix.experiment.cluster import resolve
from kmatrix.gpu.nvml.detect import Detected, Gpu
from kmatrix.plan.feasibility import OVERHEAD, Fit, detected, fit
from kmatrix.plan.memory import memory
from kmatrix.text import GIB, memory_size
from programs import Program, give_gpus

TRACED = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))
A10G = detected("NVIDIA A10G", 23028)  # as give_gpus makes it
COMMON = ("DEVICE=cuda", "NUM_GPUS=1", "OPTIMIZER=adamw", "TOKENIZER=gpt2", "DTYPE=bf16")
# Its compiled step needs less: norms and scales are computed again, and the loss is fused with its soft-cap.
NANOCHAT = (*COMMON, "ARCH=nanochat", "DEPTH=12", "BLOCK_SIZE=2048")
GPT2 = (*COMMON, "MODEL=774m", "BLOCK_SIZE=1024", "BATCH_SIZE=8", "PARALLEL_BATCH_SIZE=8", "LOSS_CHUNK=-1")


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 1)
    made = Program(tmp_path)
    made.check("olddefconfig", f"RESULTS_DIR={tmp_path}/results")
    return made


def of(program, *arguments):
    """Return the shape and the fields of the only run."""
    (planned,) = program.plan(*arguments).runs
    return planned.config.shape, planned.config.train


def fits(shape, train, batch):
    """Return whether a micro-batch fits on an A10G with the same global batch."""
    changed = replace(train, batch_size=batch, gradient_accumulation=train.global_batch // batch)
    return fit(memory(shape, changed), A10G) is not Fit.NOT


def traced(kind, **point):
    """Return the traced peak of a point in bytes."""
    (found,) = (one["gib"] for one in TRACED[kind] if point.items() <= one.items())
    return found * GIB


def largest_of(out):
    """Return the largest micro-batch of the only row of a plan."""
    return int(re.search(r"(?:fits|does not fit|tight) +(\d+) ", out)[1])


def test_a_gpu_with_room_for_the_traced_compiled_step_alone_fits_only_that(program, monkeypatch):
    """774M with 8 sequences: 23.6 GiB compiled, 27.4 GiB eager, traced."""
    compiled, eager = traced("compiled", model="774m", batch=8), traced("eager", model="774m", micro_batch=8)
    room = (compiled + eager) / 2
    gpu = Gpu(index=0, name="NVIDIA A10G", uuid="GPU-0", memory_total=int((room + OVERHEAD) / 2**20))
    monkeypatch.setattr(resolve, "detect", lambda: Detected(gpus=(gpu,)))
    outs = [program.check("plan", *GPT2, f"COMPILE={choice}").out for choice in "yn"]
    assert ["does not fit" in out for out in outs] == [False, True]
    largest = [largest_of(out) for out in outs]
    assert largest[0] >= 8 > largest[1]


def test_the_refusal_has_the_memory_and_the_advice_of_the_step_that_would_run(program):
    advised = {}
    for choice in "yn":
        arguments = (*NANOCHAT, "BATCH_SIZE=96", "PARALLEL_BATCH_SIZE=96", f"COMPILE={choice}")
        text = program.refused("plan", *arguments)
        shape, train = of(program, *arguments)
        assert train.compile is (choice == "y")
        other = replace(train, compile=not train.compile)
        needs, others = (memory_size(memory(shape, each).total) for each in (train, other))
        assert f"needs {needs}, " in text
        assert needs != others
        advised[choice] = int(re.search(r"pass BATCH_SIZE=(\d+) PARALLEL_BATCH_SIZE=96", text)[1])
        larger = (batch for batch in range(advised[choice] + 1, 97) if 96 % batch == 0)
        assert fits(shape, train, advised[choice])
        assert not any(fits(shape, train, batch) for batch in larger)
    assert advised["y"] > advised["n"]
