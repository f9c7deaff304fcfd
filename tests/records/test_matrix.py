"""matrix.json has what all runs share once, and gives each run.json back as it was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.errors import RecordError
from kmatrix.experiment.create import common_of, planned
from kmatrix.records.files import read_json, write_json, write_text
from kmatrix.records.matrix import make_files, read_plan, whole

SYMBOLS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["0", "1", "x"]), max_size=4)
TRAIN = st.fixed_dictionaries(dict.fromkeys("ab", st.sampled_from([0, 1, None, "x"])))  # a run has all fields
RUN = st.fixed_dictionaries(
    {"run_id": st.just("id"), "name": st.just("run"), "symbols": SYMBOLS, "train": TRAIN},
    optional={"timeout_s": st.sampled_from([0, 5]), "asked": st.just(["A"]), "expected_s": st.just(1.0)},
)


@given(st.lists(RUN, min_size=1, max_size=4), RUN)
def test_each_run_comes_back_as_it_was_planned(runs: list[dict[str, Any]], added: dict[str, Any]) -> None:
    common = common_of(runs)
    for run in runs:
        assert whole(common, planned(common, run)) == run
    extended = whole(common, planned(common, added))
    assert {name: extended[name] for name in added} == added


def test_a_deleted_folder_of_a_run_comes_back(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {
            "run_id": f"id{seed}",
            "name": f"run_{seed}",
            "symbols": {"SEED": str(seed)},
            "train": {"seed": seed, "depth": 2},
        }
        for seed in (1, 2)
    ]
    common = common_of(runs)
    entries = [planned(common, run) for run in runs]
    entries[1]["config"] = {"CONFIG_GPT2_SEED=1": "CONFIG_GPT2_SEED=2"}
    write_json(tmp_path / "matrix.json", {"name": "m", "common": common, "runs": entries})
    write_text(tmp_path / "config.txt", "CONFIG_GPT2_DEPTH=2\nCONFIG_GPT2_SEED=1\n")
    make_files(tmp_path, "run_2")
    assert read_json(tmp_path / "run_2/run.json") == {"schema": 1, "matrix": "m", **runs[1]}
    assert (tmp_path / "run_2/.config").read_text("utf-8") == "CONFIG_GPT2_DEPTH=2\nCONFIG_GPT2_SEED=2\n"
    plan = read_plan(tmp_path)
    assert plan.train_of(plan.runs[1]) == runs[1]["train"]
    with pytest.raises(RecordError, match="no run run_3"):
        make_files(tmp_path, "run_3")
