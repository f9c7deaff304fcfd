"""Several ranks over NCCL: the numbers of one GPU, sharded states, frozen ranks and collectives that hang."""

from __future__ import annotations

import sys

import pytest
import torch

from factories import make_data, make_run
from kmatrix.records.files import read_json
from kmatrix.status.classify import NETWORK
from on_gpu_runs import FAULTS, ended, losses, output_of, script

pytestmark = pytest.mark.gpu
GLOBAL_BATCH = 8
STEPS = 12
FOREVER = {"max_iters": 1_000_000, "eval_interval": 1_000_000}
COLLECTIVE_S = 20  # seconds until a collective fails; below the time in which a hanging rank is found
ADD = """
import sys
import torch
import torch.distributed as dist
backend, device = sys.argv[1:]
dist.init_process_group(backend, device_id=torch.device(device) if backend == "nccl" else None)
values = torch.arange(1000, dtype=torch.float32, device=device)
dist.all_reduce(values)
gathered = torch.empty(1000 * dist.get_world_size(), device=device)
dist.all_gather_into_tensor(gathered, values)
print("sum", float(values.sum()), float(gathered.sum()))
dist.destroy_process_group()
"""
OPTIONS = {
    "plain": ({}, 1e-3),
    "accumulation": ({"gradient_accumulation": 2}, 1e-3),
    "sharded states": ({"zero_stage": 1}, 1e-3),
    "gradients in bfloat16": ({"ddp_bf16_gradients": True}, 2e-2),
    "compiled": ({"compile": True, "compile_mode": "default"}, 1e-3),
    "compiled with CUDA graphs": ({"compile": True, "compile_mode": "reduce_overhead"}, 1e-3),
    "compiled and sharded": ({"compile": True, "compile_mode": "default", "zero_stage": 1}, 1e-3),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the fields of the tokens that all runs of this module read."""
    folder = tmp_path_factory.mktemp("ranks") / "data"
    return {"data_path": folder, "data_sha256": make_data(folder)}


@pytest.fixture
def ranks(device):
    """The number of ranks of a test of several."""
    if device.ranks < 2:
        pytest.skip("this machine has one GPU: a test of several ranks needs two")
    return device.ranks


@pytest.fixture(scope="module")
def alone(device, sizes, data, tmp_path_factory):
    """Return the losses of one rank with the whole global batch, in 32 bits."""
    common = {**data, **sizes, "batch_size": GLOBAL_BATCH, "max_iters": STEPS, "tf32": False}
    return losses(device.trained(tmp_path_factory.mktemp("alone"), "one", **common))


def test_the_backend_starts_on_one_device_and_adds(device):
    """A run on one GPU has no process group: this decides whether NCCL works on this machine at all."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    name = "cuda:0" if device.is_gpu else "cpu"
    printed = script(ADD, {**device.environment, **alone}, device.backend, name)
    assert "sum 499500.0 499500.0" in printed


def test_torchrun_with_one_rank_has_the_losses_of_the_trainer_alone(device, *, sizes, data, tmp_path, alone):
    """The local engine starts every run with torchrun."""
    import subprocess

    from factories import ROOT, trainer

    common = {**data, **sizes, "batch_size": GLOBAL_BATCH, "max_iters": STEPS, "tf32": False}
    run_dir = make_run(tmp_path, "one", **device.fields(**common))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*torchrun, *trainer(run_dir)], cwd=ROOT, env=device.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run_dir) == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("option", OPTIONS)
def test_several_ranks_have_the_losses_and_weights_of_one_with_the_global_batch(
    device, *, sizes, data, tmp_path, alone, ranks, option
):
    changes, within = OPTIONS[option]
    micro = GLOBAL_BATCH // ranks
    changes = {"batch_size": micro, **changes}
    if changes.get("gradient_accumulation"):
        if micro < 2:
            pytest.skip(f"{ranks} ranks have one sequence each: there is nothing to accumulate")
        changes["batch_size"] = micro // 2
    common = {**data, **sizes, "max_iters": STEPS, "tf32": False, "num_gpus": ranks, **changes}
    run_dir = make_run(tmp_path, "several", **device.fields(**common))
    if changes.get("compile"):  # the trainer of faults would put Python between the layers of the graph
        device.train(run_dir)
    else:
        device.train(run_dir, program=FAULTS, FAULT="none:0:0", FAULT_DUMP=tmp_path)
        copies = [torch.load(tmp_path / f"{r}.pt", weights_only=True, map_location="cpu") for r in range(ranks)]
        for other in copies[1:]:
            assert all(torch.equal(tensor, other[name]) for name, tensor in copies[0].items()), "replicas differ"
    assert losses(run_dir) == pytest.approx(alone, abs=within)
    result = read_json(run_dir.result)
    assert (result["world_size"], result["device"]) == (ranks, device.kind)
    if changes.get("zero_stage"):
        assert max(result["optimizer_state_mib"]) < 1.2 * sum(result["optimizer_state_mib"]) / ranks


def test_sharded_states_survive_a_stop_and_continue_with_the_same_losses(device, *, sizes, data, tmp_path, ranks):
    common = {**data, **sizes, "batch_size": GLOBAL_BATCH // ranks, "max_iters": STEPS, "num_gpus": ranks}
    common |= {"zero_stage": 1, "deterministic": True, "eval_interval": 6}
    whole = device.trained(tmp_path, "whole", **common)
    parts = make_run(tmp_path, "parts", **device.fields(**common))
    device.train(parts, "--until", "6")
    device.train(parts, "--resume", "auto", attempt=2)
    assert losses(parts) == losses(whole)


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(device, *, sizes, data, tmp_path, ranks):
    common = {**data, **sizes, **FOREVER, "batch_size": 1, "num_gpus": ranks}
    run_dir = make_run(tmp_path, **device.fields(**common))
    output = device.train(run_dir, ok=False, program=FAULTS, FAULT="signal:1:7")
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("stopped", "signal"), output
    assert result["step"] in (8, 9)


@pytest.mark.parametrize("fault", ["freeze:1:4", "hang:1:4"])
def test_a_rank_that_makes_no_progress_is_named(device, *, sizes, data, tmp_path, ranks, fault):
    """Frozen by SIGSTOP, or in Python that does not return; the others wait for it in a collective."""
    floor = 15 if device.is_gpu else 4
    common = {**data, **sizes, **FOREVER, "batch_size": 1, "num_gpus": ranks, "stall_factor": 5.0, "stall_floor": floor}
    run_dir = make_run(tmp_path, **device.fields(**common))
    process = device.start(run_dir, program=FAULTS, FAULT=fault, FAULT_HANGS=tmp_path / "hangs")
    output = output_of(process)
    assert process.returncode != 0
    assert ended(run_dir) == ("failed", "stall", None), output
    reason = read_json(run_dir.result)["reason"]
    assert "rank 1 is late" in reason
    assert ("(its process is stopped)" in reason) == ("freeze" in fault)


def test_a_collective_that_hangs_times_out_and_the_log_says_so(device, *, sizes, data, tmp_path, ranks):
    """The time of the collective is shorter than that of the watchdog, which would name the rank otherwise."""
    common = {**data, **sizes, **FOREVER, "batch_size": 1, "num_gpus": ranks, "stall_floor": 3000}
    run_dir = make_run(tmp_path, **device.fields(**common))
    process = device.start(
        run_dir,
        program=FAULTS,
        FAULT="hang:1:4",
        FAULT_HANGS=tmp_path / "hangs",
        FAULT_COLLECTIVE_S=COLLECTIVE_S if device.is_gpu else 8,
        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60,
    )
    output = output_of(process)
    assert process.returncode != 0
    assert (tmp_path / "hangs").exists()
    if device.is_gpu:  # NCCL's own watchdog aborts the process, so the log has the reason, and the runner reads it
        assert NETWORK.search(output), output[-4000:]
    else:
        assert "timed out" in output.lower() or "timeout" in output.lower(), output[-4000:]
