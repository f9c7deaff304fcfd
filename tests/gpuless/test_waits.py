"""The training loop on the double of an H100: the process waits for the device at the documented lines only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from gpuless import answer

pytestmark = pytest.mark.gpuless

OPTIMIZERS = (
    *("sgd", "adam", "adamw", "adamwadv", "adamwspam", "adamwprune", "muon", "muon_nanochat", "muon_nanochat2025"),
    *("adafactor", "lion", "adopt", "soap", "schedulefree"),
)
NANOCHAT: dict[str, Any] = {
    **{"bias": False, "weight_tying": False, "n_kv_head": 1, "value_embeddings": True, "smear": True, "backout": True},
    **{"residual_scales": True, "window_pattern": "SL", "qk_scale": 1.2, "rope_base": 10_000.0, "logit_softcap": 15.0},
    **{"norm": "rms", "activation": "relu2", "block_size": 512},
}
PLAIN = {"value_embeddings": False, "smear": False, "backout": False, "residual_scales": False, "window_pattern": "L"}
ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat", **NANOCHAT},
    "nanochat2025": {"arch": "nanochat2025", **NANOCHAT, **PLAIN},
}
STEPS = 6  # of a run; its first step sets up states, and its last one is followed by the end of the loop
EVENT = "Event.synchronize @ gpt2/steps.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait for the device that is known and allowed."""

    what: str  # the reason and the file
    reason: str  # why it is there
    steps: str = ".*"  # pattern of the numbers of steps that may have it
    most: int = 1000  # waits per step


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on the double, with the waits that it may have besides those of every run."""

    fields: dict[str, Any] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    killed_at: int | None = None  # step; the run is continued, and the waits are those of the second attempt


# Two waits for one event: the duration of the step, and of its computation. The device is a step ahead by then.
OF_EVERY_RUN = Wait(
    what=EVENT, reason="the numbers of the step before; the device computes this one", steps=r"[1-9]\d*", most=4
)
SPARSITY = Wait(what="read @ gpt2/prune.py", reason="the sparsity, when it is logged", most=2)
SKIP = Wait(what="read @ gpt2/steps.py", reason="the policy decides before the update", most=2)
NORMS = Wait(what="read @ gpt2/norms.py", reason="norms per layer, when they are logged")
SOAP = Wait(what="_linalg_eigh @ gpt2/optim/optimizers.py", reason="the first eigenvectors", steps="0")

CASES: dict[str, Case] = {
    **{name: Case(fields={"optimizer": name}) for name in OPTIMIZERS if name != "soap"},
    "soap": Case(fields={"optimizer": "soap", "soap_frequency": 2}, waits=(SOAP,)),
    "spam by norm": Case(fields={"optimizer": "adamwspam", "spam_rule": "norm", "spam_sigma": 3.0}),
    **{f"architecture {name}": Case(fields=fields) for name, fields in ARCHITECTURES.items()},
    "nanochat by Muon": Case(fields={**ARCHITECTURES["nanochat"], "optimizer": "muon_nanochat"}),
    "dropout": Case(fields={"dropout": 0.1}),
    "recompute": Case(fields={"recompute": True}),
    "elementwise recomputation": Case(fields={"recompute": True, "recompute_scope": "elementwise", "dropout": 0.1}),
    "bf16 stream": Case(fields={"bf16_stream": True}),
    "fp8": Case(fields={"fp8": True}),
    "loss chunks": Case(fields={"loss_chunk": 128}),
    "32 bits": Case(fields={"dtype": "fp32"}),
    "plain attention": Case(fields={"flash_attention": False}),
    "accumulation": Case(fields={"gradient_accumulation": 2}),
    "skipped steps": Case(fields={"nan_policy": "skip"}, waits=(SKIP,)),
    "compiled": Case(fields={"compile": True}),
    "CUDA graphs": Case(fields={"compile": True, "compile_mode": "reduce_overhead", "gradient_accumulation": 2}),
    "continued": Case(fields={"max_iters": 8, "checkpoint_interval": 3, "async_checkpoint": False}, killed_at=5),
    "logged norms": Case(fields={"log_norms": True}, waits=(NORMS,)),
    "checkpoints": Case(fields={"checkpoint_interval": 2, "save_checkpoint": True}),
    "blocking checkpoints": Case(fields={"checkpoint_interval": 2, "save_checkpoint": True, "async_checkpoint": False}),
    **{
        f"pruning by {name}": Case(fields={"max_iters": 12, "pruning": method, **more}, waits=(SPARSITY,))
        for name, method, more in (
            ("magnitude", "magnitude", {}),
            ("movement", "movement", {}),
            ("published movement", "movement", {"movement_rule": "published"}),
            ("state", "state", {"optimizer": "adamwprune"}),
        )
    },
}


@cache
def found(name: str) -> dict[str, Any]:
    """Return the report of a run on the double."""
    case = CASES[name]
    return answer("fake_gpu_run.py", {"max_iters": STEPS, **case.fields}, case.killed_at)


def of_steps(report: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Return the number of waits by step and place, without lines."""
    steps: dict[int, dict[str, int]] = {}
    for phase, waits in report["waits"].items():
        if match := re.fullmatch(r"step (\d+)", phase):
            places = steps.setdefault(int(match[1]), {})
            for text, count in waits.items():
                place = re.sub(r":\d+.*", "", text)
                places[place] = places.get(place, 0) + count
    return steps


def test_every_optimizer_and_architecture_is_a_case():
    from gpt2.model.registry import MODELS
    from gpt2.optim.builders import BUILDERS

    assert set(BUILDERS) <= set(CASES)
    assert set(MODELS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_at_documented_lines_only(name):
    """The first step may set up states, and the last one is followed by the end of the loop."""
    report, allowed = found(name), (OF_EVERY_RUN, *CASES[name].waits)
    assert report["code"] == 0
    undocumented = [
        f"step {step}: {place}, {count} times"
        for step, places in of_steps(report).items()
        for place, count in places.items()
        if not any(
            wait.what == place and re.fullmatch(wait.steps, str(step)) and count <= wait.most for wait in allowed
        )
    ]
    assert not undocumented, "\n".join([*undocumented, str(report["waits"])])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.waits])
def test_a_documented_wait_still_exists(name):
    """Otherwise remove it from the list, which would hide it if it came back."""
    places = {place for places in of_steps(found(name)).values() for place in places}
    assert {wait.what for wait in CASES[name].waits} <= places


def test_the_process_waits_for_the_step_before_and_not_for_its_own():
    """The first step has none to wait for; every later one waits for the two marks of one step."""
    events = {step: places.get(EVENT, 0) for step, places in of_steps(found("adamw")).items()}
    assert events == {**dict.fromkeys(range(1, STEPS - 1), 2), STEPS - 1: 4}


def test_an_evaluation_waits_for_its_sums_only():
    """After all batches it reads two numbers of one dataset: the sum of losses and the number of sequences."""
    waits = found("adamw")["waits"]["evaluation 0"]
    assert {re.sub(r":\d+.*", "", text): count for text, count in waits.items()} == {"read @ gpt2/evaluate.py": 2}


def test_a_continued_run_starts_at_its_checkpoint_without_a_wait_in_its_first_step():
    report = found("continued")
    steps = [int(phase.split()[1]) for phase in report["operators"] if phase.startswith("step ")]
    assert steps == [3, 4, 5, 6, 7]
    assert 3 not in of_steps(report)


@pytest.mark.parametrize("name", ["compiled", "CUDA graphs"])
def test_a_compiled_run_has_one_graph_per_pass(name):
    assert found(name)["graphs"] == [["evaluation", []], ["forward", []], ["backward", []]]
