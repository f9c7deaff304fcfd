"""No step waits for the GPU, except where the method of its optimizer needs it.

The double of a GPU is the device "meta": its tensors have no values, so that everything fails that would read one.
Counters that optimizers keep in CPU memory are read as on a GPU, without a wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import no_waits
from factories import make_run
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from kmatrix.records.files import read_json
from kmatrix.records.train_config import TrainConfig
from optim_factory import SHAPE, Settings, run_steps
from training import train_here

DEVICE = torch.device("meta")
STEPS = 9  # with resets by SPAM, clipped spikes, and several decompositions by SOAP
SETTINGS = Settings(spam_interval=4, spam_warmup_steps=2, spam_theta=1.5, soap_frequency=3)

# Operators that read on the host whether they have converged or met a singular matrix: "synchronizes" in PyTorch's
# documentation of torch.linalg.
CONVERGING = ("linalg_eig", "linalg_svd", "linalg_inv", "linalg_cholesky", "linalg_solve", "linalg_lu")
# One kernel that reads nothing on the host, and has no form for tensors without values.
FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")

WAITS = {  # steps that wait, by optimizer; 0-based
    "soap": {0: "the first eigenbasis: torch.linalg.eigh reads on the host whether it has converged"},
}


class Waits(TorchDispatchMode):
    """Collects the operators that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(function).removeprefix("aten.").split(".")[0]
        if name in FUSED:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name.lstrip("_").startswith(CONVERGING) and tensors[0].device == DEVICE:
            self.found.append(name)
        result = function(*args, **(kwargs or {}))
        # A copy from or to ordinary memory of the CPU: the host waits until it is done.
        if name in ("copy_", "_to_copy") and len({tensor.device for tensor in (*tensors, result)}) > 1:
            self.found.append(name)
        return result


@pytest.fixture(autouse=True)
def _fused_as_on_a_gpu(monkeypatch):
    """Let optimizers choose their fused form, and so the place of their counters, as on a GPU."""
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the attribute
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])


def waiting_steps(optimizers, parameters, steps=STEPS):
    """Return the steps that wait, with the operators or the error."""
    found = {}
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with Waits() as waits:
            try:
                optimizers.step()
            except (RuntimeError, NotImplementedError) as error:  # a read of a value; the error depends on the operator
                waits.found.append(str(error).splitlines()[0])
        if waits.found:
            found[step] = waits.found
    return found


QUICK = ("adamw", "adamwprune", "muon")  # the others nightly
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in sorted(BUILDERS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_nothing_from_the_device_also_after_a_state_was_loaded(name):
    """Counters of steps stay in CPU memory if the optimizer reads them there."""
    for base in ("adam", "adamw", "adamwadv", "adamwspam") if name == "adamwprune" else ("adamw",):
        settings = replace(SETTINGS, optimizer=name, adamwprune_base=base)
        trained, model = GPT(SHAPE), GPT(SHAPE).to(DEVICE)
        optimizers, saved = build_optimizers(settings, model), build_optimizers(settings, trained)
        found = waiting_steps(optimizers, list(model.parameters()))
        assert found.keys() == WAITS.get(name, {}).keys(), found

        run_steps(trained, saved, 2)
        optimizers.load_state_dict(saved.state_dict())
        assert not waiting_steps(optimizers, list(model.parameters()))


class Reading(torch.optim.SGD):
    """An optimizer that reads a value."""

    def __init__(self, params: Any, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__(params, lr=0.1)
        self.read = read

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.read(self.param_groups[0]["params"][0].grad[0])


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item,
        torch.Tensor.cpu,
        lambda tensor: tensor if tensor > 0 else None,
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.linalg.eigh(tensor.expand(2, 2)),
    ],
)
def test_the_double_notices_a_read(read):
    parameter = nn.Parameter(torch.empty(3, device=DEVICE))
    assert waiting_steps(Reading([parameter], read), [parameter], steps=1)


# The whole step of the loop

RUN = {"batch_size": 2, "gradient_accumulation": 2, "log_interval": 3, "eval_interval": 4, "max_iters": 7}
RUN |= {"n_layer": 1, "eval_samples": 2, "save_checkpoint": False, "save_best": False, "schedule": "constant"}
PRUNED = {"pruning_warmup": 0.0, "pruning_ramp_end": 0.9, "pruning_frequency": 2, "target_sparsity": 0.5}


def of_optimizer(name):
    """Return the fields of a run with an optimizer at its defaults."""
    values = asdict(Settings(optimizer=name, learning_rate=1e-3, spam_interval=4, spam_warmup_steps=2))
    fields = {field: value for field, value in values.items() if field in TrainConfig.names()}
    return fields | {"max_iters": RUN["max_iters"]}


@pytest.mark.parametrize(
    "fields",
    [
        of_optimizer("muon"),
        of_optimizer("adamwprune") | {"pruning": "state", **PRUNED},
        {"pruning": "movement", **PRUNED},
        {"pruning": "magnitude", **PRUNED},
    ],
    ids=["muon", "state", "movement", "magnitude"],
)
def test_a_step_reads_no_tensor(tmp_path, monkeypatch, fields):
    no_waits.install(monkeypatch.setattr)
    run_dir = make_run(tmp_path, **RUN | fields)
    trained = train_here(run_dir)
    assert (trained.returncode, read_json(run_dir.result)["reason"]) == (0, None)
    assert read_json(run_dir.result)["step"] == RUN["max_iters"]


def test_a_step_that_reads_one_is_noticed(tmp_path, monkeypatch):
    no_waits.install(monkeypatch.setattr)
    monkeypatch.setattr("gpt2.train.clip", lambda parameters, _: parameters[0].grad.norm().item())
    run_dir = make_run(tmp_path, **RUN)
    train_here(run_dir)
    assert "in <lambda>" in read_json(run_dir.result)["reason"]
