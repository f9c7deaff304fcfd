"""Expand a configuration into runs: exclusions with reasons, names and ids."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmatrix.kconfig.assignments import apply_assignments, read_assignments
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, plan_axes
from kmatrix.matrix.expand import AS_BEFORE, expand, visit
from programs import ROOT, Program

CPU = "CONFIG_GPT2_DEVICE_CPU=y"
ON = "CONFIG_MATRIX=y"
TWO = (CPU, ON, "CONFIG_MATRIX_GPT2_OPTIMIZER_ADAMW=y", "CONFIG_MATRIX_GPT2_OPTIMIZER_MUON=y")
DRY = "test-matrix-dry-run"


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def dry_run(program, *lines, arguments=()):
    """Return the dry run of a configuration with these lines."""
    program.write(*lines)
    return program.check(DRY, *arguments)


def axes_line(result):
    return result.out.splitlines()[0]


def test_every_cell_of_the_product_is_a_run_in_the_order_of_the_axes(program):
    result = dry_run(program, *TWO, 'CONFIG_MATRIX_GPT2_SEED="3 1 2"')

    assert axes_line(result) == "axes optimizer(2) x seed(3) = 6 cells: 6 runs (0 duplicates, 0 excluded)"
    assert result.names == [f"gpt2_{o}_seed{s}_1cpu" for o in ("adamw", "muon") for s in (3, 1, 2)]


def test_the_command_line_narrows_the_matrix_exactly(program):
    program.check("defconfig-gpt2-cpu-quick")
    before = program.config.read_bytes()

    result = program.check(DRY, "MAX_ITERS=20", "OPTIMIZER=sgd,adamw", "NUM_GPUS=1")

    assert result.names == ["gpt2_sgd_1cpu", "gpt2_adamw_1cpu"]
    assert "did you mean MAX_ITERS" in program.refused(DRY, "MAX_ITER=20")
    assert program.config.read_bytes() == before


def test_a_command_line_value_removes_its_axis_and_a_list_replaces_it(program):
    assert dry_run(program, *TWO, arguments=["OPTIMIZER=sgd"]).names == ["gpt2_sgd_1cpu"]
    assert dry_run(program, *TWO, arguments=["OPTIMIZER_SGD=y"]).names == ["gpt2_sgd_1cpu"]
    assert dry_run(program, *TWO, arguments=["OPTIMIZER=sgd,adam"]).names == ["gpt2_sgd_1cpu", "gpt2_adam_1cpu"]
    assert len(dry_run(program, *TWO, arguments=["DROPOUT=0.1,0.2"]).runs) == 4


def test_an_axis_without_effect_is_dropped_and_equal_cells_are_deduplicated(program):
    result = dry_run(program, *TWO, arguments=["MUON_NS_STEPS=3,4"])

    assert "4 cells: 3 runs (1 duplicate, 0 excluded)" in axes_line(result)
    assert result.names == ["gpt2_adamw_1cpu", "gpt2_muon_muonnssteps3_1cpu", "gpt2_muon_muonnssteps4_1cpu"]


def test_a_bool_axis_names_only_the_runs_that_it_applies_to(program):
    result = dry_run(program, CPU, arguments=["OPTIMIZER=adamw,adamwspam", "AMSGRAD=n,y"])

    assert result.names == ["gpt2_adamw_1cpu", "gpt2_adamwspam_amsgradn_1cpu", "gpt2_adamwspam_amsgrady_1cpu"]


def test_adamwprune_without_pruning_is_a_configuration_of_its_own(program):
    result = dry_run(program, CPU, arguments=["OPTIMIZER=adamwprune", "PRUNING=none,state"])

    assert result.names == ["gpt2_adamwprune_pruningnone_1cpu", "gpt2_adamwprune_pruningstate_1cpu"]
    assert "FORBID_PRUNING_BY_OTHER_SCORES" in program.refused(DRY, "OPTIMIZER=adamwprune", "PRUNING=magnitude")
    assert "adamwadv is AdamW with AMSGrad" in program.refused(
        DRY, "OPTIMIZER=adamwprune", "ADAMWPRUNE_BASE=adamwadv", "AMSGRAD=n"
    )


def test_cells_that_a_rule_forbids_are_excluded_with_the_reason(program):
    result = dry_run(program, CPU, ON, 'CONFIG_MATRIX_GPT2_NUM_GPUS="1 2 5"', arguments=["GLOBAL_BATCH=24"])

    assert len(result.runs) == 2
    assert (
        "excluded 1: PARALLEL_BATCH_SIZE=24 is not a multiple of BATCH_SIZE=12 x NUM_GPUS=5" in result.out.splitlines()
    )


def test_cells_that_kconfig_forbids_are_excluded_with_the_help_of_the_forbid_symbol(program):
    result = dry_run(program, "CONFIG_GPT2_NUM_GPUS=1", arguments=["DEVICE=cpu,cuda", "DDP_BACKEND=nccl,gloo"])

    assert len(result.runs) == 3
    assert "excluded 1: FORBID_NCCL_ON_CPU: nccl requires GPUs: set DDP_BACKEND=gloo on the CPU." in result.out


def test_explicitly_excluded_cells_have_the_given_reason(program):
    lines = (*TWO, 'CONFIG_MATRIX_GPT2_LEARNING_RATE="1e-3 2e-3"')
    result = dry_run(program, *lines, 'CONFIG_MATRIX_EXCLUDE="OPTIMIZER=muon LR=0.001: it diverges; SEED=5: never"')

    assert result.names == ["gpt2_adamw_lr1e-3_1cpu", "gpt2_adamw_lr2e-3_1cpu", "gpt2_muon_lr2e-3_1cpu"]
    assert "excluded 1: MATRIX_EXCLUDE: it diverges" in result.out
    assert "CONFIG_MATRIX_EXCLUDE: 'SEED=5: never': no effect in any run" in result.out


def test_coupled_values_apply_to_the_runs_that_match_their_rule(program):
    rules = 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1e-3,2e-3; OPTIMIZER=muon => LR=0.05 WEIGHT_DECAY=0"'
    result = dry_run(program, *TWO, rules)

    assert result.names == ["gpt2_adamw_lr1e-3_1cpu", "gpt2_adamw_lr2e-3_1cpu", "gpt2_muon_1cpu"]
    assert "learning_rate=0.05 weight_decay=0" in result.runs[2]


def test_of_two_rules_for_one_symbol_the_later_one_wins(program):
    rules = 'CONFIG_MATRIX_COUPLED="DEVICE=cpu => LR=1e-3; OPTIMIZER=muon => LR=0.05"'
    found = {run.values["GPT2_OPTIMIZER"]: run.values["GPT2_LEARNING_RATE"] for run in planned(program, *TWO, rules)}

    assert found == {"adamw": "1e-3", "muon": "0.05"}


def planned(program, *lines):
    """Return the runs of a configuration with these lines."""
    program.write(*lines)
    return program.plan().matrix.runs


def test_an_excluded_cell_has_the_reason_that_a_single_run_would_get(program):
    program.write("CONFIG_GPT2_NUM_GPUS=1", ON, 'CONFIG_MATRIX_GPT2_NUM_GPUS="1 5"')
    for several, single in (
        (("DEVICE=cpu", "GLOBAL_BATCH=24"), ("DEVICE=cpu", "GLOBAL_BATCH=24", "NUM_GPUS=5")),
        (("NUM_GPUS=1", "DEVICE=cpu,cuda", "DDP_BACKEND=nccl,gloo"), ("DEVICE=cpu", "DDP_BACKEND=nccl")),
    ):
        (excluded,) = program.plan(*several).matrix.excluded
        assert excluded.reason in program.refused(DRY, *single)


def test_the_command_line_overrides_a_coupled_rule_with_a_note(program):
    result = dry_run(program, *TWO, 'CONFIG_MATRIX_COUPLED="OPTIMIZER=muon => LR=0.05"', arguments=["LR=1e-3"])

    assert "learning_rate=0.05" not in result.out
    assert "'OPTIMIZER=muon => LR=0.05': GPT2_LEARNING_RATE is set on the command line" in result.out


def test_a_value_that_rules_set_in_every_run_is_refused_with_the_rule(program):
    program.write(*TWO, 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1; OPTIMIZER=muon => LR=2"')

    assert "LEARNING_RATE=1e-3: set by " in program.refused("olddefconfig", "LR=1e-3")


def test_a_coupled_rule_that_matches_no_run_gives_a_note(program):
    program.write(*TWO, 'CONFIG_MATRIX_COUPLED="OPTIMIZER=sgd => LR=1"')

    note = ": CONFIG_MATRIX_COUPLED: 'OPTIMIZER=sgd => LR=1': no effect in any run: GPT2_LEARNING_RATE=1"
    assert note in program.check("olddefconfig").out
    assert note in program.check(DRY).out


def test_the_condition_of_a_rule_is_about_effective_values(program):
    lines = (CPU, ON, "CONFIG_MATRIX_GPT2_MODEL_TINY=y", "CONFIG_MATRIX_GPT2_MODEL_124M=y")
    result = dry_run(program, *lines, 'CONFIG_MATRIX_COUPLED="BLOCK_SIZE=1024 => LR=1e-3,2e-3"')

    with_rate = [name for name in result.names if "_lr" in name]
    assert len(result.names) == 3
    assert with_rate == [f"gpt2_adamw_model124m_lr{rate}_1cpu" for rate in ("1e-3", "2e-3")]


def test_a_rule_that_sets_what_a_rule_asks_for_is_refused(program):
    rules = 'CONFIG_MATRIX_COUPLED="OPTIMIZER=muon => LR=0.05; LR=0.05 => WEIGHT_DECAY=0"'
    program.write(*TWO, rules)

    message = program.refused(DRY)
    assert "'LR=0.05 => WEIGHT_DECAY=0'" in message
    assert "the left side depends on a value that a rule sets" in message


def test_a_line_without_effect_due_to_the_command_line_is_noted_and_any_other_is_refused(program):
    lines = (*TWO, "CONFIG_GPT2_MUON_NS_STEPS=3")
    assert "GPT2_MUON_NS_STEPS" in dry_run(program, *lines, arguments=["OPTIMIZER=adamw,sgd"]).out
    assert "MUON_NS_STEPS=7" in Program(program.folder).refused(DRY, "OPTIMIZER=adamw", "MUON_NS_STEPS=7")


@pytest.mark.parametrize("defconfig", sorted(p.name for p in (ROOT / "defconfigs").iterdir() if p.is_file()))
def test_a_run_reproduced_from_its_own_configuration_has_the_same_id(tmp_path, defconfig):
    program = Program(tmp_path)
    program.check(f"defconfig-{defconfig}", "DEVICE=cuda" if "cpu" not in defconfig else "DEVICE=cpu")
    ids = program.check(DRY).ids
    tree = Tree.parse(srctree=ROOT)
    base = read_assignments(tree, program.config)
    apply_assignments(tree, base)
    from kmatrix.kconfig.assignments import explicit

    base = explicit(tree, program.config, base)
    matrix = expand(tree, base, plan_axes(tree, base, {}))

    for number, run in enumerate(visit(tree, base, matrix.runs)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / ".config").write_text(tree.config_text(), encoding="utf-8")
        (directory / "defconfig").write_text(tree.minimal_text(), encoding="utf-8")
        assert "CONFIG_MATRIX=y" not in tree.config_text()
        assert Program(directory).check(DRY).ids == [run.run_id]
        Program(directory).check("defconfig", f"DEFCONFIG={directory}/defconfig")
        assert Program(directory).check(DRY).ids == [run.run_id]

    assert ids == [run.run_id for run in matrix.runs]


SAME = (
    ("RESULTS_DIR=/elsewhere", "LOG_INTERVAL=3", "CHECKPOINT_INTERVAL=9", "RUN_TIMEOUT=60"),  # neutral
    ("LEARNING_RATE=0.0006", "DROPOUT=-0.0"),  # another spelling
    ("SEED=1337", "BATCH_SIZE=12", "OPTIMIZER=adamw"),  # the defaults
    ("MATRIX=y", "MATRIX_GPT2_SEED=1337"),  # an axis of one value
)
OTHER = ("SEED=2", "LEARNING_RATE=6.1e-4", "BIAS=n", "OPTIMIZER=sgd", "NUM_GPUS=2", "CPU_THREADS=1")


def test_the_id_depends_on_everything_that_can_change_a_result_and_on_nothing_else(program):
    ids = dry_run(program, CPU).ids
    assert ids == ["89c4705340"]  # on every machine
    for arguments in SAME:
        assert dry_run(program, CPU, "CONFIG_GPT2_NUM_GPUS=1", arguments=arguments).ids == ids, arguments
    for argument in OTHER:
        assert dry_run(program, CPU, arguments=[argument]).ids != ids, argument


def test_a_symbol_that_is_added_with_the_value_as_before_changes_no_id(tmp_path, monkeypatch):
    before = Tree.parse()
    for name in before.kconf.kconfig_filenames:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    with (tmp_path / "gpt2" / "Kconfig").open("a", encoding="utf-8") as file:
        file.write('config GPT2_ADDED\n\tint "added"\n\tdefault 3\n')
    later = Tree.parse(tmp_path)

    def id_of(tree, *arguments):
        (run,) = expand(tree, arguments, Axes(())).runs
        return run.run_id

    ids = [id_of(tree) for tree in (before, later)]
    monkeypatch.setitem(AS_BEFORE, "GPT2_ADDED", "3")

    assert ids[0] == id_of(before) == id_of(later) != ids[1]
    assert id_of(later, Assignment("GPT2_ADDED", "4", "here")) not in ids


def test_a_run_has_the_same_id_whatever_other_axes_are_swept(program):
    single = dry_run(program, CPU, arguments=["SEED=2", "OPTIMIZER=muon", "BIAS=n"]).ids

    swept = dry_run(program, *TWO, arguments=["SEED=1,2", "BIAS=y,n"])

    assert single[0] in swept.ids
    assert swept.names[swept.ids.index(single[0])] == "gpt2_muon_seed2_biasn_1cpu"


def test_ids_and_runs_do_not_depend_on_the_order_of_the_lines(program):
    lines = [*TWO, 'CONFIG_MATRIX_GPT2_SEED="1 2"', 'CONFIG_MATRIX_COUPLED="OPTIMIZER=muon => LR=0.05"']

    first = dry_run(program, *lines)

    assert dry_run(program, *reversed(lines)).out == first.out
    assert dry_run(program, *lines).out == first.out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["sgd", "adam", "adamw", "muon", "adafactor"]), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5]), min_size=1, max_size=3, unique=True),
)
def test_a_matrix_is_complete_unique_and_ordered(seeds, optimizers, dropouts):
    tree = Tree.parse(srctree=ROOT)
    lines = {"SEED": seeds, "OPTIMIZER": optimizers, "DROPOUT": dropouts}
    from kmatrix.matrix.axes import parse_override

    overrides = dict(parse_override(tree, name, ",".join(map(str, values))) for name, values in lines.items())
    base = [values[0] for values in overrides.values() if len(values) == 1]
    matrix = expand(tree, base, plan_axes(tree, base, overrides))

    assert len(matrix.runs) == matrix.cells == len(seeds) * len(optimizers) * len(dropouts)
    assert len({run.run_id for run in matrix.runs}) == len({run.name for run in matrix.runs}) == len(matrix.runs)
    found = [tuple(text for label, text in run.axes if label in ("seed", "dropout")) for run in matrix.runs]
    if len(seeds) > 1 and len(dropouts) > 1:
        expected = list(itertools.product(map(str, seeds), map(str, dropouts)))
        assert found == expected * len(optimizers)


def test_names_that_would_collide_or_be_too_long_end_in_the_id(program):
    program.write("CONFIG_GPT2_DATASET_SHARDS=y", 'CONFIG_GPT2_DATA_PATH="x"', CPU)
    arguments = [
        "WEIGHT_DECAY=0.10000000000000001,0.2",
        "DROPOUT=0.1000000000000000001,0.2",
        "BETA1=0.12345678901234567890,0.9",
    ]
    arguments += ["BETA2=0.1234567890123456789012345678,0.9", "GRAD_CLIP=1.0000000000000000000001,2", "SEED=1,2"]

    names = program.check(DRY, *arguments).names

    assert len(set(names)) == len(names) == 64
    assert max(map(len, names)) <= 127


def test_a_symbol_that_cannot_change_a_result_cannot_be_an_axis(program):
    program.write(CPU)

    assert "GPT2_LOG_INTERVAL cannot be an axis" in program.refused(DRY, "LOG_INTERVAL=1,2")


def test_a_coupled_number_of_ranks_is_resolved_like_any_other(program):
    result = dry_run(program, *TWO, "CONFIG_GPT2_NUM_GPUS=2", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=muon => NUM_GPUS=0"')

    assert result.names == ["gpt2_adamw_2cpu", "gpt2_muon_1cpu"]


def test_coupled_values_apply_to_the_single_run_of_train(program):
    """Lines that are used only by other runs of the matrix give a note."""
    lines = (
        "CONFIG_MATRIX=y",
        "CONFIG_MATRIX_GPT2_OPTIMIZER_ADAMW=y",
        "CONFIG_MATRIX_GPT2_OPTIMIZER_MUON=y",
        'CONFIG_GPT2_MUON_MOMENTUM="0.9"',
        'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LEARNING_RATE=2e-3; OPTIMIZER=muon => LEARNING_RATE=0.02"',
    )
    program.write(*lines)
    plan = program.plan(one=True)
    (planned,) = plan.runs
    assert planned.values["GPT2_LEARNING_RATE"] == "2e-3"
    assert any("GPT2_MUON_MOMENTUM" in note for note in plan.notes)


def test_runs_that_differ_in_seed_and_rate_share_their_forecast(program):
    program.write(CPU)
    plan = program.plan("SEED=1,2", "LEARNING_RATE=1e-3,2e-3", "BATCH_SIZE=2,3")

    assert (len(plan.runs), len(plan.kinds)) == (8, 2)
    found = {(one.seed, one.learning_rate, one.batch_size) for one in (run.config.train for run in plan.runs)}
    assert found == set(itertools.product((1, 2), (1e-3, 2e-3), (2, 3)))


def test_a_matrix_of_more_than_20_000_cells_is_refused(program):
    program.write(CPU)

    assert "the matrix has 25,000 cells" in program.refused(DRY, "SEED=1:1000:1", "LR=1e-4:1e-2:log25")
