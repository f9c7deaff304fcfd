"""A run of somebody else is repeated without the commands, hosts, accounts and paths of their machine."""

from __future__ import annotations

import kconfiglib as kc
import pytest

from kmatrix.errors import ConfigError
from kmatrix.experiment.foreign import check_values
from kmatrix.experiment.plan import make_plan
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.expand import apply_run
from programs import ROOT, Program

TEXTS = {  # strings that are ordinary texts
    "GPT2_TEXT_COLUMN",
    "GPT2_SAMPLE_PROMPT",
    "GPT2_PROFILE",  # steps
    "GPT2_WINDOW_PATTERN",  # letters
    *("SLURM_TIME", "SLURM_MEMORY"),
}
LOCAL = {
    *("RESULTS_DIR", "DATA_DIR", "CHECKPOINT_DIR", "ON_FINISH", "GPU_PROMETHEUS_PORT"),
    *("TRACKER_WANDB", "TRACKER_TRACKIO", "TRACKER_TENSORBOARD", "TRACKER_PROJECT", "WANDB_ENTITY", "WANDB_OFFLINE"),
    *("GPT2_DATA_PATH", "GPT2_DATA_MIX", "GPT2_HELLASWAG"),
    "GPT2_INIT_FROM",
}
HOSTILE = {
    "ON_FINISH": "touch /tmp/hacked",
    "RESULTS_DIR": "/etc/results",
    "DATA_DIR": "/etc/data",
    "CHECKPOINT_DIR": "/etc/checkpoints",
    "PROJECT": "theirs",
}


@pytest.fixture
def config(tmp_path):
    """The .config of a run whose owner set everything that is local."""
    program = Program(tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    program.check("defconfig-gpt2-cpu-quick", *(f"{name}={text}" for name, text in HOSTILE.items()), "TRACKER=wandb")
    return program.config


def plan(config, user, **assignments):
    return make_plan(config, assignments, one=True, user=user)


def test_every_text_of_the_configuration_is_local_or_harmless():
    tree = Tree.parse(srctree=ROOT)
    typed = {*tree.floats, *tree.oneofs, *tree.durations, *tree.wholes, *tree.forms, *tree.local}
    strings = {symbol.name for symbol in tree.symbols if symbol.orig_type == kc.STRING}

    unknown = {name for name in strings - typed - TEXTS if not name.startswith("MATRIX_")}

    assert not unknown, f"mark {unknown} with $(local) if they name a command, a host or a path; else add them to TEXTS"
    assert set(tree.local) >= LOCAL


def test_nothing_local_is_taken_from_a_run_and_everything_is_listed(config, tmp_path):
    found = plan(config, tmp_path / "none")

    assert {item.name for item in found.left_out} == {
        *("ON_FINISH", "RESULTS_DIR", "DATA_DIR", "CHECKPOINT_DIR", "TRACKER_PROJECT", "TRACKER_WANDB")
    }
    control = found.config
    assert (control.on_finish, control.results_dir, control.data_dir, control.checkpoint_dir) == ("", ".", "data", "")
    assert control.trackers == ()
    for text in HOSTILE.values():
        assert text not in found.config_text


def test_the_settings_of_the_user_apply_instead(config, tmp_path):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", f"DATA_DIR={tmp_path}", "ON_FINISH=true", "TRACKER=tensorboard")

    found = plan(config, program.config, RESULTS_DIR="here")

    assert found.config.data_dir == str(tmp_path)
    assert found.config.on_finish == "true"
    assert found.config.results_dir == "here"
    assert found.config.trackers == ("tensorboard",)
    assert "RESULTS_DIR" not in {item.name for item in found.left_out}


def test_the_id_of_the_run_stays_the_same(config, tmp_path):
    theirs = make_plan(config, {}, one=True)
    apply_run(theirs.tree, theirs.base, theirs.runs[0].run)
    config.write_text(theirs.tree.config_text(), encoding="utf-8")  # as in the directory of a run

    assert plan(config, tmp_path / "none").runs[0].run.run_id == theirs.runs[0].run.run_id


@pytest.mark.parametrize(
    ("assignments", "name"),
    [
        (("DATASET=folder", "DATA_PATH=/etc"), "DATA_PATH"),
        (("HELLASWAG=/etc/passwd",), "HELLASWAG"),
        (("DATASET=mix", "DATA_MIX=folder=/etc:5 stdlib:1"), "DATA_MIX"),
    ],
)
def test_a_path_that_changes_the_result_has_to_be_named_by_the_user(tmp_path, assignments, name):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", *assignments)

    with pytest.raises(ConfigError, match=rf"(?s)the run reads GPT2_{name}=.*pass {name}=<yours>") as refused:
        plan(program.config, tmp_path / "none")

    assert "/etc" in str(refused.value)


def coupled(config, rule):
    """Return a .config of a run with a rule, as somebody could write it, and the line of the header that keeps it."""
    text = config.read_text(encoding="utf-8").replace("# CONFIG_MATRIX is not set", "CONFIG_MATRIX=y")
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("# asked", "CONFIG_MATRIX_COUPLED")))
    path = config.with_name(".config.coupled")
    path.write_text(f'{text}\nCONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => {rule}"\n', encoding="utf-8")
    return path


RULES = [
    *("ON_FINISH=hack", "RESULTS_DIR=/etc", "DATA_DIR=/etc", "CHECKPOINT_DIR=/etc", "GPU_PROMETHEUS_PORT=99"),
    *("TRACKER_WANDB=y", "TRACKER_TENSORBOARD=y", "INIT_FROM=/etc/passwd", "HELLASWAG=/etc/passwd"),
]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_a_foreign_configuration_sets_nothing_local(tmp_path, rule):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", "OPTIMIZER=adamw", "MATRIX=n")
    config, name = coupled(program.config, rule), rule.partition("=")[0]
    tree, value = Tree.parse(srctree=ROOT), rule.partition("=")[2]
    (symbol,) = ({name, f"GPT2_{name}"} & set(tree.local)) or {f"GPT2_{name}"}

    # Of a run, no rule is read. Of a matrix, it is refused.
    assert plan(config, tmp_path / "none").runs[0].values.texts.get(symbol) != value
    with pytest.raises(ConfigError, match=rf"(?s)the run reads {symbol}=.*pass {name}=<yours>"):
        make_plan(config, {}, user=tmp_path / "none")


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_a_plan_with_a_foreign_value_is_refused(name):
    """Whatever way it came: the values of the finished plan are compared with those of the user."""
    tree = Tree.parse(srctree=ROOT)
    own = dict.fromkeys(tree.local, frozenset({"mine"}))

    check_values(tree, {name: "mine", "GPT2_SEED": "7"}, own)
    with pytest.raises(ConfigError, match=rf"the run reads {name}='a=b'"):
        check_values(tree, {name: "a=b"}, own)


def test_a_mix_of_named_datasets_is_not_a_path(tmp_path):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", "DATASET=mix", "DATA_MIX=tinystories:5 stdlib:1")

    assert plan(program.config, tmp_path / "none").runs[0].config.train.data_mix == "tinystories:5 stdlib:1"


@pytest.mark.parametrize("words", [("ENGINE=slurm", "SLURM_TIME=5m"), ("ENGINE=kubernetes", "K8S_RESTARTS=1")])
def test_a_run_is_repeated_where_the_user_says(config, words):
    run = config.parent

    result = Program(run)("reproduce", f"RUN={run}", *words, "NUM_NODES=2")

    assert "reproduce does not take NUM_NODES=" in result.err, "the first one that is refused"


@pytest.mark.parametrize("argument", ["SEED=7", "OPTIMIZER=muon", "MAX_ITERS=3"])
def test_other_assignments_would_make_another_run(config, argument):
    run = config.parent

    result = Program(run)("reproduce", f"RUN={run}", argument)

    assert result.status == 2
    assert f"reproduce does not take {argument.partition('=')[0]}=" in result.err
