"""Each option of the trainer on the device: losses near the CPU's in 32 bits, no late compilation, exact resume."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from gpt2.model.fp8 import CAPABILITY
from gpt2.optim.builders import BUILDERS
from kmatrix.engines.failures import first_failure
from kmatrix.records.files import read_json
from kmatrix.records.train_config import TrainConfig
from on_gpu_runs import FAULTS, WAITS, Place, losses
from optim_factory import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
STEPS = 20
RUN = {"max_iters": STEPS, "eval_interval": 10, "checkpoint_interval": 10, "save_best": False}
NANOCHAT = {
    **{"n_kv_head": 1, "value_embeddings": True, "smear": True, "backout": True, "residual_scales": True},
    **{"window_pattern": "SL", "qk_scale": 1.2, "logit_softcap": 15.0, "norm": "rms", "activation": "relu2"},
}
OLDER = {"n_kv_head": 0, "value_embeddings": False, "smear": False, "backout": False, "residual_scales": False}
ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat", "bias": False, "weight_tying": False, **NANOCHAT},
    "nanochat2025": {"arch": "nanochat2025", "bias": False, "weight_tying": False, **NANOCHAT, **OLDER},
}
BF16 = {"dtype": "bf16"}
COMPILED = {"compile": True, "compile_mode": "default"}
GRAPHS = {"compile": True, "compile_mode": "reduce_overhead"}
ACCUMULATED = {"batch_size": 2, "gradient_accumulation": 4}
TWO = {"num_gpus": 2, "batch_size": 4}
PRUNED = {"pruning_warmup": 0.0, "pruning_ramp_end": 0.8, "pruning_frequency": 2, "target_sparsity": 0.5}
# The fields, and the most that a loss may differ from the CPU's in 32 bits, in nats/token, after at most 20 updates.
# Each moves every weight by about the learning rate, whatever its gradient. Losses fall from 5.6 to about 4.
OPTIONS = {
    "fp32": ({}, 1e-2),  # TF32: factors of 11 bits
    "bf16": (BF16, 5e-2),  # factors and activations of 8 bits
    "bf16 stream": ({**BF16, "bf16_stream": True}, 6e-2),
    "fp8": ({**BF16, "fp8": True}, 0.15),  # factors of 3 or 4 bits
    "fp8, bf16 stream, compiled": ({**BF16, "fp8": True, "bf16_stream": True, **COMPILED}, 0.15),
    "accumulation": (ACCUMULATED, 1e-2),
    "chunked loss": ({"loss_chunk": 64}, 1e-2),
    "recomputed": ({"recompute": True}, 1e-2),
    "dropout": ({"dropout": 0.1}, 0.5),
    "compiled": (COMPILED, 1e-2),
    "compiled bf16": ({**COMPILED, **BF16}, 5e-2),
    "compiled, recomputed, accumulation": ({**COMPILED, **ACCUMULATED, "recompute": True}, 1e-2),
    "CUDA graphs": (GRAPHS, 1e-2),
    "CUDA graphs, bf16 stream, accumulation": ({**GRAPHS, **BF16, "bf16_stream": True, **ACCUMULATED}, 6e-2),
    "2 ranks": (TWO, 1e-2),
    "2 ranks, sharded states": ({**TWO, "zero_stage": 1}, 1e-2),
    "2 ranks, gradients in bf16": ({**TWO, "ddp_bf16_gradients": True}, 2e-2),
    "2 ranks, compiled, sharded states": ({**TWO, **COMPILED, "zero_stage": 1}, 1e-2),
    "2 ranks, CUDA graphs": ({**TWO, **GRAPHS}, 1e-2),
    **{f"attention {kernel}": ({**BF16, "attention_kernel": kernel}, 5e-2) for kernel in ("cudnn", "flash", "flash4")},
    **{f"pruning {name}": ({"pruning": name, **PRUNED}, 2e-2) for name in ("magnitude", "movement")},
}
RATES = {"sgd": 0.1, "muon": 0.02, "adafactor": 0.02}  # with which they learn in so few steps; the others: 1e-3
OF_NANOCHAT = (
    "fp32",
    "bf16",
    "bf16 stream",
    "fp8",
    "compiled bf16",
    "CUDA graphs",
)  # which its models are trained with, too
DOUBLED = ("adamw", "muon", "adamwprune")  # whose steps on the CPU do not read tensors either
OPTIMIZERS = [name for name in BUILDERS if "nanochat" not in name]
CASES = [
    *(("gpt2", "adamw", option) for option in OPTIONS),
    *((arch, "adamw", option) for arch in ("nanochat", "nanochat2025") for option in OF_NANOCHAT),
    *(
        ("gpt2", optimizer, option)
        for optimizer in OPTIMIZERS
        if optimizer != "adamw"
        for option in ("fp32", "compiled bf16")
    ),
]


def fields_of(arch, optimizer):
    """Return the fields of a run with an optimizer at its defaults."""
    rate = RATES.get(optimizer, 1e-3)
    values = asdict(Settings(optimizer=optimizer, learning_rate=rate, spam_interval=4, spam_warmup_steps=2))
    values |= {"pruning": "state", **PRUNED} if optimizer == "adamwprune" else {"pruning": "none"}
    values |= {"max_iters": STEPS, "device": None}
    return ARCHITECTURES[arch] | {n: v for n, v in values.items() if n in TrainConfig.names() and n != "device"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, small):
    """Return the losses of the CPU in 32 bits. They are computed once per model, optimizer and pruning."""
    known = {}

    def of(arch, optimizer, options):
        pruning = {name: value for name, value in options.items() if name == "pruning" or name in PRUNED}
        key = (arch, optimizer, *pruning.items())
        if key not in known:
            cpu = Place("cpu", 1)
            run = cpu.made(
                tmp_path_factory.mktemp("reference"), **{**small, **fields_of(arch, optimizer), **RUN, **pruning}
            )
            cpu.train(run)
            known[key] = losses(run)
        return known[key]

    return of


def weights(run):
    """Return the weights of the last checkpoint."""
    newest = max(run.checkpoints.glob("step_*.pt"), key=lambda path: path.stat().st_mtime)
    return torch.load(newest, map_location="cpu", weights_only=True)["model"]


@pytest.mark.parametrize(("arch", "optimizer", "option"), CASES, ids=lambda value: value)
def test_an_option_has_the_losses_of_the_cpu_compiles_once_and_resumes_exactly(
    device, *, small, reference, tmp_path, arch, optimizer, option
):
    options, within = OPTIONS[option]
    # Signs, iterations in bfloat16 and larger rates make more of a difference in the last bits.
    within = within if optimizer == "adamw" else max(within, 3e-2)
    if options.get("num_gpus", 1) > device.gpus:
        pytest.skip("this machine has one GPU: a test of several ranks needs two")
    if device.is_gpu and options.get("fp8") and torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("this GPU has no FP8 products")
    exact = "attention_kernel" not in options  # not every kernel has a deterministic form
    run = device.made(tmp_path, **{**small, **fields_of(arch, optimizer), **RUN, "deterministic": exact, **options})
    status, output = device.train(run, ok=False)
    result = read_json(run.result)
    if "attention_kernel" in options and "attention kernel" in str(result["reason"]):
        pytest.skip(f"not on this machine: {result['reason']}")  # the trainer says so, and is right
    assert (status, result["status"], result["device"]) == (0, "finished", device.kind), output[-6000:]
    found, expected = losses(run), reference(arch, optimizer, options)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, abs=within)
    assert found[-1] < found[0] - 0.1, "the run does not learn: equal losses would prove nothing"
    # Evaluation and training are two graphs: one compilation follows the first.
    assert "Recompiling function" not in output.partition("Iter 1 |")[2]

    middle = next(path for path in run.checkpoints.glob("step_*10.pt"))
    before = weights(run)
    device.train(run, "--resume", str(middle), attempt=2)
    assert losses(run) == (found if exact else pytest.approx(found, abs=1e-2))
    assert not exact or all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_does_not_wait_for_the_device(device, small, tmp_path, optimizer):
    if not device.is_gpu and optimizer not in DOUBLED:
        pytest.skip("its step on the CPU is another one")
    run = device.made(tmp_path, **{**small, **fields_of("gpt2", optimizer), **RUN, **BF16})
    device.train(run, program=WAITS)
    assert read_json(run.result)["step"] == STEPS


@pytest.mark.parametrize(
    ("fault", "ranks", "ended"),
    [
        ("signal:0:7", 1, ("stopped", "signal")),
        ("signal:1:7", 2, ("stopped", "signal")),
        ("nan:0:5", 1, ("failed", "nan")),
        ("raise:1:5", 2, ("failed", "error")),
    ],
)
def test_a_run_ends_with_its_reason(device, *, small, tmp_path, fault, ranks, ended):
    if ranks > device.gpus:
        pytest.skip("this machine has one GPU: a test of several ranks needs two")
    run = device.made(tmp_path, **{**small, **RUN, "num_gpus": ranks, "max_iters": 1_000_000})
    _, output = device.train(run, ok=False, program=FAULTS, FAULT=fault)
    result = read_json(run.result)
    assert (result["status"], result["kind"]) == ended, output[-6000:]
    if ended[0] == "stopped":
        assert result["step"] in (8, 9)
        assert list(run.checkpoints.glob(f"step_*{result['step']}.pt"))


def test_a_rank_that_hangs_ends_the_run(device, small, tmp_path):
    """The other one waits for it in a collective."""
    if device.gpus < 2:
        pytest.skip("this machine has one GPU: a test of several ranks needs two")
    run = device.made(tmp_path, **{**small, **RUN, "stall_factor": 5.0, "num_gpus": 2, "max_iters": 1_000_000})
    fault = {"FAULT": "hang:1:12", "FAULT_HANGS": tmp_path / "hangs", "FAULT_FLOOR_S": 15 if device.is_gpu else 4}
    status, output = device.train(run, ok=False, program=FAULTS, **fault)
    assert status != 0
    assert (first_failure(run, 1) or (0, "", ""))[1] == "stall", output[-6000:]
