"""Losses on the device are those of the CPU in 32 bits, within the tolerance of each precision."""

from __future__ import annotations

import pytest
import torch

from checkpoints import final_of
from factories import make_data, make_run
from gpt2.checkpoint.files import load_checkpoint
from gpt2.model.fp8 import CAPABILITY
from kmatrix.records.files import read_json
from kmatrix.records.train_config import NANOCHAT_FIELDS
from on_gpu_runs import Place, losses

pytestmark = pytest.mark.gpu
STEPS = 20
RUN = {"max_iters": STEPS, "eval_interval": 10, "save_best": False, "log_interval": 1}
NANOCHAT = dict(
    zip(NANOCHAT_FIELDS, (1, True, True, True, True, "SL", 1.2, 10_000.0, 15.0, "rms", "relu2"), strict=True)
)
OF_NANOCHAT = {"bias": False, "weight_tying": False, **NANOCHAT}
OLDER = {"n_kv_head": 0, "value_embeddings": False, "smear": False, "backout": False, "residual_scales": False}
ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat", **OF_NANOCHAT},
    "nanochat2025": {"arch": "nanochat2025", **OF_NANOCHAT, **OLDER},
}
# The most that a loss may differ from the CPU's in 32 bits, in nats/token, after at most 20 updates, each of which
# moves every weight by about the learning rate, whatever its gradient. Losses fall from 5.6 to about 4.
PRECISIONS = {
    "fp32": ({"tf32": False}, 2e-3),  # 24 bits; only the order of additions differs
    "tf32": ({"tf32": True}, 1e-2),  # factors of 11 bits
    "bf16": ({"dtype": "bf16"}, 5e-2),  # factors and activations of 8 bits
}
BF16 = {"dtype": "bf16"}
OPTIONS = {
    "bf16 stream": ({**BF16, "bf16_stream": True}, 6e-2),
    "fp8": ({**BF16, "fp8": True}, 0.15),  # factors of 3 or 4 bits
    "chunked loss": ({"tf32": False, "loss_chunk": 64}, 2e-3),
    "chunked loss in bf16": ({**BF16, "loss_chunk": 64}, 5e-2),
    "recomputed blocks": ({"tf32": False, "recompute": True, "recompute_scope": "blocks"}, 2e-3),
    "recomputed elements": ({"tf32": False, "recompute": True, "recompute_scope": "elementwise"}, 2e-3),
}
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the fields of the tokens that all runs of this module read."""
    folder = tmp_path_factory.mktemp("numbers") / "data"
    return {"data_path": folder, "data_sha256": make_data(folder, train=200_000)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, data, sizes):
    """Return the losses of the CPU in 32 bits. They are computed once per architecture."""
    known = {}

    def of(arch):
        if arch not in known:
            folder = tmp_path_factory.mktemp("reference")
            run_dir = make_run(folder, arch, **{**RUN, **data, **sizes, **ARCHITECTURES[arch]})
            Place("cpu", 1).train(run_dir)
            known[arch] = losses(run_dir)
        return known[arch]

    return of


def check_against(run_dir, expected, within):
    found = losses(run_dir)
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, abs=within)
    assert found[-1] < found[0] - 0.1, "the run does not learn: equal losses would prove nothing"


def needs_fp8(device, options):
    if device.is_gpu and options.get("fp8"):
        found = torch.cuda.get_device_capability()
        if found < CAPABILITY:
            pytest.skip(f"{torch.cuda.get_device_name()} has capability {found[0]}.{found[1]}: FP8 needs 8.9")


@COMPILED
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_losses_are_those_of_the_cpu_in_32_bits(device, *, sizes, data, reference, tmp_path, arch, precision, compiled):
    options, within = PRECISIONS[precision]
    modes = device.compiled() if compiled else {}
    run_dir = device.trained(tmp_path, arch, **{**RUN, **data, **sizes, **ARCHITECTURES[arch], **options, **modes})
    check_against(run_dir, reference(arch), within)
    assert read_json(run_dir.result)["device"] == device.kind


@COMPILED
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("arch", ["gpt2", "nanochat"])
def test_losses_of_an_option_are_those_of_the_cpu_in_32_bits(
    device, *, sizes, data, reference, tmp_path, arch, option, compiled
):
    options, within = OPTIONS[option]
    needs_fp8(device, options)
    modes = device.compiled() if compiled else {}
    run_dir = device.trained(tmp_path, "run", **{**RUN, **data, **sizes, **ARCHITECTURES[arch], **options, **modes})
    check_against(run_dir, reference(arch), within)


@pytest.mark.parametrize("mode", ["reduce_overhead", "max_autotune_no_cudagraphs", "max_autotune"])
def test_losses_of_every_mode_of_the_compiler_are_those_of_the_cpu(device, *, sizes, data, reference, tmp_path, mode):
    options, within = PRECISIONS["fp32"]
    run_dir = device.trained(tmp_path, "run", **{**RUN, **data, **sizes, **options, **device.compiled(mode)})
    check_against(run_dir, reference("gpt2"), within)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "flash3", "flash4"])
@pytest.mark.parametrize("arch", ["gpt2", "nanochat"])
def test_losses_with_every_attention_kernel_are_those_of_the_cpu(
    device, *, sizes, data, reference, tmp_path, arch, kernel
):
    run = {**RUN, **data, **sizes, **ARCHITECTURES[arch], **BF16, "attention_kernel": kernel}
    run_dir = make_run(tmp_path, "run", **device.fields(**run))
    output = device.train(run_dir, ok=False)
    result = read_json(run_dir.result)
    if result["status"] != "finished" and f"attention kernel {kernel} cannot" in output:
        # Which kernels there are depends on the GPU and on installed packages; the trainer has to say so, and does.
        pytest.skip(f"{kernel}: {result['reason']}")
    assert result["status"] == "finished", output
    check_against(run_dir, reference(arch), PRECISIONS["bf16"][1])
    if device.is_gpu:
        assert read_json(run_dir.run_used)["attention"]["causal"] == kernel


@COMPILED
def test_four_accumulated_micro_batches_of_two_equal_one_of_eight(device, *, sizes, data, tmp_path, compiled):
    modes = device.compiled() if compiled else {}
    common = {**RUN, **data, **sizes, **modes, "tf32": False}
    whole = device.trained(tmp_path, "whole", **common)
    parts = device.trained(tmp_path, "parts", **{**common, "batch_size": 2, "gradient_accumulation": 4})
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-3)


@COMPILED
def test_a_model_with_dropout_learns_with_other_losses(device, *, sizes, data, reference, tmp_path, compiled):
    modes = device.compiled() if compiled else {}
    run_dir = device.trained(tmp_path, "run", **{**RUN, **data, **sizes, **modes, **BF16, "dropout": 0.1})
    found, without = losses(run_dir), reference("gpt2")
    assert found[-1] < found[0] - 0.1
    assert max(abs(a - b) for a, b in zip(found, without, strict=True)) > 1e-3
    assert found == pytest.approx(without, abs=0.5)


def twice(device, folder, common):
    """Train the same run twice; return losses and final weights of both."""
    runs = [device.trained(folder, name, **common) for name in ("first", "second")]
    weights = [load_checkpoint(final_of(run.path))["model"] for run in runs]
    return [losses(run) for run in runs], weights


@COMPILED
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_deterministic_runs_are_equal_bit_for_bit(device, *, sizes, data, tmp_path, arch, precision, compiled):
    modes = device.compiled() if compiled else {}
    common = {**RUN, **data, **sizes, **modes, **ARCHITECTURES[arch], **PRECISIONS[precision][0]}
    (first, second), weights = twice(device, tmp_path, {**common, "deterministic": True})
    assert first == second
    differing = [name for name, tensor in weights[0].items() if not torch.equal(tensor, weights[1][name])]
    assert not differing


def test_equal_runs_without_that_are_equal_within_a_hundredth(device, *, sizes, data, tmp_path):
    """Atomic additions in the gradient of the embedding and of attention have an order that varies."""
    (first, second), _ = twice(device, tmp_path, {**RUN, **data, **sizes, **BF16})
    assert second == pytest.approx(first, abs=1e-2)
