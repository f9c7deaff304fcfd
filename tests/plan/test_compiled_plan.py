"""With COMPILE=y on GPUs, the largest micro-batch and the verdict are those of the compiled step."""

from __future__ import annotations

import json
import re

import pytest

from factories import ROOT
from kmatrix.experiment.cluster import resolve
from kmatrix.gpu.nvml.detect import Detected, Gpu
from kmatrix.plan.feasibility import OVERHEAD
from kmatrix.text import GIB
from programs import Program, give_gpus

TRACED = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))
COMMON = ("DEVICE=cuda", "NUM_GPUS=1", "OPTIMIZER=adamw", "TOKENIZER=gpt2", "DTYPE=bf16")
GPT2 = (*COMMON, "MODEL=774m", "BLOCK_SIZE=1024", "BATCH_SIZE=8", "PARALLEL_BATCH_SIZE=8", "LOSS_CHUNK=-1")


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 1)
    made = Program(tmp_path)
    made.check("olddefconfig", f"RESULTS_DIR={tmp_path}/results")
    return made


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
