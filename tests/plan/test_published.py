"""The plan of published runs (tests/fixtures/published.toml): each time is inside the band, and each memory right."""

from __future__ import annotations

import math
import shlex
import statistics
import tomllib
from functools import cache

import pytest

from factories import ROOT
from kmatrix.experiment.plan import make_plan
from kmatrix.plan.feasibility import (
    HALF,
    Fit,
    by_name,
    fit,
    large_mfu,
    mfu_band,
    middle_mfu,
    peak_of,
    rate_at,
)
from kmatrix.plan.memory import memory
from kmatrix.shapes import mfu
from kmatrix.text import GIB

RUNS = {run["name"]: run for run in tomllib.loads((ROOT / "tests/fixtures/published.toml").read_text("utf-8"))["run"]}
TIMED = [name for name, run in RUNS.items() if "seconds" in run]
SAFE = 0.15  # a planned peak may be lower than the measured one by this share
AS_GPT2 = ("MODEL", "HEAD_DIM", "BIAS", "WEIGHT_TYING")  # symbols that make a GPT-2 of nanochat's shape


@cache
def planned(arguments, folder=ROOT / "defconfigs"):
    """Return configuration, GPU and planned memory of a run, as `make plan` makes them."""
    words = dict(word.split("=", 1) for word in shlex.split(arguments))
    device = by_name(words.pop("GPU"))
    (run,) = make_plan(folder / "fragments" / "one-gpu.config", {**words, "DEVICE": "cuda"}, one=True).runs
    return run.config, device, memory(run.config.train)


def seconds_at(config, device, share):
    return config.tokens / rate_at(share, config.train, device)


def memory_is_right(run, need, device):
    """Return whether a plan is at most SAFE below the published peak, and has the published verdict."""
    low = "memory_mib" in run and need.total / 2**20 < (1 - SAFE) * run["memory_mib"]
    has_verdict = run.keys() & {"memory_mib", "fits", "not_on"}
    return not low and (not has_verdict or (fit(need, device) is Fit.NOT) == ("not_on" in run))


@pytest.mark.parametrize("name", RUNS)
def test_the_published_time_and_memory_agree_with_the_plan(name):
    run = RUNS[name]
    config, device, need = planned(run["arguments"])
    assert memory_is_right(run, need, device)
    if "seconds" in run:
        low, high = mfu_band(config.train, device)
        assert seconds_at(config, device, high) <= run["seconds"] <= seconds_at(config, device, low)


def test_the_expected_time_is_not_biased():
    errors = []
    for name in TIMED:
        config, device, _ = planned(RUNS[name]["arguments"])
        expected = seconds_at(config, device, middle_mfu(config.train, device))
        errors.append(expected / RUNS[name]["seconds"] - 1)
    assert abs(statistics.median(errors)) < 0.05


def test_the_middle_of_each_family_is_the_median_of_its_runs():
    """MFU = m N / (N + HALF): the m of each run, by family of GPUs."""
    found = {}
    for name in TIMED:
        config, device, _ = planned(RUNS[name]["arguments"])
        rate = config.tokens / RUNS[name]["seconds"]
        reached = mfu(rate, config.train.shape.flops_per_token, peak_of(device, config.train), config.train.num_gpus)
        found.setdefault(large_mfu(device), []).append(math.log(reached * (1 + HALF / config.train.shape.params)))
    for expected, logs in found.items():
        assert math.exp(statistics.median(logs)) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["code"] == "nanochat"])
def test_a_run_of_nanochat_has_the_published_memory_as_its_own_architecture_too(name):
    """d24 and d26 are of 2026, the others of 2025."""
    run = RUNS[name]
    arch = "nanochat" if "d24" in name or "d26" in name else "nanochat2025"
    words = [word for word in run["arguments"].split() if word.partition("=")[0] not in AS_GPT2]
    config, device, need = planned(" ".join([*words, f"ARCH={arch}"]))
    assert config.train.shape.is_nanochat
    assert memory_is_right(run, need, device)
    if arch == "nanochat2025":
        assert need.total == pytest.approx(planned(run["arguments"])[2].total, abs=0.2 * GIB)
