"""Initial weights are found, compared with the runs, and identified by their hash before anything is made."""

from __future__ import annotations

import pytest

from factories import train_config
from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.initial import InitialWeights, check_fit, initial_fields, read_initial
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import plan_axes
from kmatrix.matrix.expand import expand
from kmatrix.records.train_config import SAME_AS_INITIAL
from programs import ROOT

RUN = train_config(init_from="a.pt")
WEIGHTS = InitialWeights(
    path="/a.pt", sha256="ab" * 32, settings={name: getattr(RUN, name) for name in SAME_AS_INITIAL}
)


def test_a_missing_checkpoint_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        read_initial([str(tmp_path / "none.pt")])
    with pytest.raises(ConfigError, match="is a directory"):
        read_initial([str(tmp_path)])


@pytest.mark.parametrize("field", SAME_AS_INITIAL)
def test_a_difference_is_refused_by_name(field):
    other = InitialWeights(path="/a.pt", sha256="", settings={**WEIGHTS.settings, field: "other"})

    check_fit({"a.pt": WEIGHTS}, {"gpt2": RUN}, prepared=True)
    with pytest.raises(ConfigError, match=rf"(?s)gpt2 cannot start from INIT_FROM=a\.pt.*{field} is other there and"):
        check_fit({"a.pt": other}, {"gpt2": RUN}, prepared=True)


def test_the_vocabulary_of_a_trained_tokenizer_is_compared_when_it_is_known():
    run = train_config(init_from="a.pt", tokenizer="char", vocab_size=256)
    weights = InitialWeights(
        path="/a.pt", sha256="", settings={**WEIGHTS.settings, "tokenizer": "char", "vocab_size": 99}
    )

    check_fit({"a.pt": weights}, {"gpt2": run}, prepared=False)
    with pytest.raises(ConfigError, match="vocab_size is 99 there and 256 here"):
        check_fit({"a.pt": weights}, {"gpt2": run}, prepared=True)


def test_the_fields_of_a_run_name_its_initial_weights():
    assert initial_fields({"a.pt": WEIGHTS}, RUN) == {"init_from": "/a.pt", "init_sha256": "ab" * 32}
    assert initial_fields({}, train_config()) == {"init_from": "", "init_sha256": ""}


def ids(contents, **lines):
    """Return the ids of a matrix with the names of its runs. contents: hashes of the checkpoints by path."""
    tree = Tree.parse(srctree=ROOT)
    base = [Assignment(name, value, "test") for name, value in {"GPT2_DEVICE_CPU": "y", **lines}.items()]
    axes = plan_axes(tree, base, {})
    tree.contents["GPT2_INIT_FROM"] = contents
    return {run.run_id: run.name for run in expand(tree, base, axes).runs}


def test_the_hash_identifies_a_run_and_not_the_path():
    known = {"none": "", "a.pt": "hash", "moved.pt": "hash", "runs/b.pt": "another"}

    (scratch,), (none,) = ids(known), ids(known, GPT2_INIT_FROM="none")
    (here,), (there,), (other,) = (ids(known, GPT2_INIT_FROM=name) for name in ("a.pt", "moved.pt", "runs/b.pt"))

    assert scratch == none
    assert here == there
    assert len({scratch, here, other}) == 3
    swept = ids(known, MATRIX="y", MATRIX_GPT2_INIT_FROM="none a.pt moved.pt runs/b.pt")
    assert [*swept] == [scratch, here, other]
    assert swept[other] == "gpt2_adamw_initruns-b.pt_0cpu"
