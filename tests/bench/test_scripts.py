"""Each benchmark runs at its smallest size and prints its table; the arithmetic of a profile."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from factories import ROOT, environment

TINY = ("MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=64", "BLOCK_SIZE=32", "BATCH_SIZE=4")
PARTS = "--rounds 1 --steps 4 --warm-up 1 --threads 1 --option RECOMPUTE=y --peer {peer} --against {root}"
# In the place of nanoGPT's train.py: it reads the data of its place, and logs steps.
NANOGPT = """
import sys
from pathlib import Path

options = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
assert all((Path("data") / options["dataset"] / f"{kind}.bin").stat().st_size for kind in ("train", "val"))
assert options["n_embd"] == "64" and options["bias"] in ("True", "False")
for step in range(int(options["max_iters"])):
    print(f"iter {step}: loss 5.1234, time 20.00ms, mfu -100.00%")
"""
# arguments, and some first cells of the tables
SCRIPTS = {
    "step": (
        [*TINY, *PARTS.split()],
        {"nanoGPT fp32, BIAS=n", "kmatrix fp32, BIAS=y", "kmatrix bf16, BIAS=y RECOMPUTE=y", "{name} bf16, BIAS=n"},
    ),
    "kernels": (["copy", "products", "loss", "--device", "cpu"], {"copy", "head and loss, the trainer's"}),
    "profile": ([*TINY, "--first", "2", "--steps", "1"], {"products", "gaps"}),
    "checkpoint": ([*TINY, "TOKENIZER=byte", "--rounds", "1", "--threads", "1"], {"{name}"}),
    "runner": (["--rounds", "1"], {"to the first step, wall", "whole attempt, CPU"}),
    "config": (["--smallest", "--rounds", "1"], {"make help, wall", "dry run of 80 runs, CPU"}),
    "scale": (["--smallest", "--rounds", "1"], {"make summary of 4 runs, wall", "make test-matrix of 6 runs, CPU"}),
    "reports": (
        ["--smallest", "--rounds=1", "--against={root}"],
        {"pictures of 3 x 100 samples x 4 GPUs, JSON", "make summary of 4 runs, logs of 1,000 lines"},
    ),
    "monitor": (["--gpus=2", "--hz=20", "--seconds=1", "--rounds=1"], {"empty loop, 20 Hz", "recorder, 20 Hz"}),
    "verdict": (["--count", "10", "--sizes", "2"], {"2", "1 sigma"}),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs_and_prints_its_rows(name, tmp_path):
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "train.py").write_text(NANOGPT)
    places = {"peer": tmp_path / "nanoGPT", "root": ROOT, "name": ROOT.name}
    words, rows = SCRIPTS[name]
    command = [sys.executable, f"bench/{name}.py", *(word.format(**places) for word in words)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = {line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")}
    assert {row.format(**places) for row in rows} <= printed


@pytest.fixture(scope="module")
def profile():
    """Return the module, under another name than that of the standard library's."""
    sys.path.append(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("bench_profile", ROOT / "bench" / "profile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace(*events):
    return [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events]


def test_the_shares_of_a_profile_are_those_of_its_kernels_and_gaps(profile):
    events = trace(
        ("kernel", "nvjet_hsh_128x256", 0, 50),
        ("kernel", "triton_per_fused_native_layer_norm_0", 50, 20),
        ("kernel", "triton_red_fused__log_softmax_1", 70, 10),
        ("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 90, 10),
        ("cuda_runtime", "cudaStreamSynchronize", 0, 5),
        ("cpu_op", "aten::mm", 0, 500),
    )
    found = profile.shares(events, 1)
    expected = {"products": 0.5, "elementwise": 0.2, "loss": 0.1, "attention": 0.1, "gaps": 0.1}
    assert found["shares"] == pytest.approx(expected)
    assert (found["kernels"], found["waits"], found["ms"]) == (4, 1, 0.1)
    assert profile.longest(events, 1)[0] == ["nvjet_hsh_128x256", "1.0", "0.050"]


def test_without_kernels_an_operator_counts_without_those_in_it(profile):
    events = trace(("cpu_op", "aten::linear", 0, 100), ("cpu_op", "aten::mm", 10, 80))
    assert [event.duration for event in profile.own(profile.kernels_of(events))] == [20, 80]
    assert profile.shares(events, 1)["shares"] == {"products": 1.0, "gaps": 0.0}


def test_a_kernel_has_its_kind(profile):
    kinds = {
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "triton_poi_fused_gelu_view_8": "elementwise",
    }
    assert {name: profile.kind_of(name) for name in kinds} == kinds
