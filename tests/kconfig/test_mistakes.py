"""Every error in a configuration is refused with file, line, symbol and cause, and nothing is written."""

from __future__ import annotations

import re

import pytest

from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import validated
from kmatrix.kconfig.assignments import load_config
from kmatrix.kconfig.tree import Tree
from programs import Program

NUMBER = "expected an integer in decimal digits"
BOOL = "expected a bool: y or n"
NO_LINE = "cannot read"
RATE = "expected a number in [0, 1e+12]"
ON = "CONFIG_MATRIX=y\n"

# The lines of .config, the invalid line (None: no single one), parts of the message.
INVALID_CONFIGURATIONS = [
    ("CONFIG_GPT2_BACH_SIZE=4", 1, "unknown symbol GPT2_BACH_SIZE", "did you mean GPT2_BATCH_SIZE"),
    ("CONFIG_GPT2_SGD_NESTEROV=y", 1, "depends on GPT2_OPTIMIZER_SGD || MATRIX_GPT2_OPTIMIZER_SGD"),
    ("CONFIG_GPT2_MUON_NS_STEPS=3", 1, "depends on GPT2_OPTIMIZER_MUON"),
    ("CONFIG_GPT2_BATCH_SIZE=0", 1, "GPT2_BATCH_SIZE=0", "out of range: [1, 65536]"),
    ("CONFIG_GPT2_NUM_GPUS=4097", 1, "out of range: [0, 4096] when GPT2_USE_DDP"),
    (
        "# CONFIG_GPT2_USE_DDP is not set\nCONFIG_GPT2_NUM_GPUS=2",
        2,
        "out of range: [0, 1]; [0, 4096] when GPT2_USE_DDP",
    ),
    ("CONFIG_GPT2_BATCH_SIZE=99999999999999999999", 1, "out of range"),
    ("CONFIG_GPT2_BATCH_SIZE=0.5", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=1e3", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=010", 1, NUMBER),
    ("CONFIG_GPT2_MAX_ITERS=1_000", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=0x10", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=", 1, NUMBER),
    ('CONFIG_GPT2_BATCH_SIZE="4"', 1, NUMBER),
    ("CONFIG_PARALLEL_BATCH_SIZE=-0", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=٤", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=4 # four", 1, NUMBER),
    ('CONFIG_RESULTS_DIR="a" # four', 1, "expected a string"),
    ("CONFIG_GPT2_BATCH_SIZE=4 ", 1, NUMBER),
    ("CONFIG_GPT2_BATCH_SIZE=4\x00", 1, "4\\x00", "control characters are not allowed"),
    ("CONFIG_GPT2_BATCH_SIZE = 4", 1, NO_LINE),
    (" CONFIG_GPT2_BATCH_SIZE=4", 1, NO_LINE),
    ("GPT2_BIAS=y", 1, NO_LINE),
    ("export CONFIG_GPT2_BIAS=y", 1, NO_LINE),
    ("CONFIG_GPT2_BIAS=y\nhello", 2, NO_LINE, "'hello'"),
    ("CONFIG_GPT2_BIAS=yes", 1, BOOL),
    ("CONFIG_GPT2_BIAS=True", 1, BOOL),
    ("CONFIG_GPT2_BIAS=1", 1, BOOL),
    ("CONFIG_GPT2_BIAS=m", 1, BOOL),
    ("CONFIG_GPT2_BIAS=Y", 1, BOOL),
    ('CONFIG_GPT2_BIAS="y"', 1, BOOL),
    ("CONFIG_GPT2_BIAS=", 1, BOOL),
    ("# CONFIG_GPT2_BIAS is not sett", 1, NO_LINE),
    ("#CONFIG_GPT2_BIAS is not set", 1, NO_LINE),
    ("# CONFIG_GPT2_LEARNING_RATE is not set", 1, "only a bool can be unset"),
    ("# CONFIG_GPT2_BATCH_SIZE is not set", 1, "only a bool can be unset"),
    ("CONFIG_GPT2_OPTIMIZER_SGD=y\nCONFIG_GPT2_OPTIMIZER_MUON=y", 1, "GPT2_OPTIMIZER_MUON is selected: only one"),
    ("CONFIG_GPT2_DATASET_FINEWEB=y\nCONFIG_GPT2_TOKENIZER_CHAR=y", 2, "depends on GPT2_DATASET_STDLIB || "),
    ("CONFIG_GPT2_SEED=1\nCONFIG_GPT2_SEED=1", 2, "CONFIG_GPT2_SEED is set twice", "first at"),
    ("CONFIG_FORBID_NCCL_ON_CPU=y", 1, "computed, cannot be set"),
    ("CONFIG_GPT2_LEARNING_RATE=1e-3", 1, 'expected a string: CONFIG_GPT2_LEARNING_RATE="1e-3"'),
    ('CONFIG_GPT2_LEARNING_RATE="1e-3', 1, "expected a string"),
    ('CONFIG_GPT2_LEARNING_RATE="fast"', 1, RATE),
    ('CONFIG_GPT2_LEARNING_RATE="nan"', 1, RATE),
    ('CONFIG_GPT2_LEARNING_RATE="inf"', 1, "out of range: [0, 1e+12]"),
    ('CONFIG_GPT2_DROPOUT="1.5"', 1, "out of range: [0, 0.95]"),
    ('CONFIG_GPT2_LEARNING_RATE=""', 1, RATE),
    ('CONFIG_GPT2_LEARNING_RATE=" 1e-3"', 1, RATE),
    ('CONFIG_GPT2_LEARNING_RATE="1_0"', 1, RATE),
    ('CONFIG_GPT2_LEARNING_RATE="1e-400"', 1, "it rounds to 0"),
    ('CONFIG_GPT2_BETA1="0.00001e-330"', 1, "it rounds to 0"),
    ('CONFIG_GPT2_LEARNING_RATE="٣"', 1, RATE),
    ('CONFIG_GPT2_DDP_BACKEND="mpi"', 1, "expected one of auto, nccl, gloo"),
    ('CONFIG_RESULTS_DIR="a\tb"', 1, "control characters are not allowed"),
    (ON + 'CONFIG_MATRIX_GPT2_SEED="1 x"', 2, "GPT2_SEED=x", NUMBER),
    (ON + 'CONFIG_MATRIX_GPT2_SEED="1 2 1"', 2, "repeated: 1"),
    (ON + 'CONFIG_MATRIX_GPT2_LEARNING_RATE="1e-3 0.001"', 2, "repeated: 1e-3, 0.001"),
    ("CONFIG_MATRIX_GPT2_OPTIMIZER_SGD=y", 1, "depends on MATRIX=n"),
    (ON + 'CONFIG_MATRIX_GPT2_NUM_GPUS="1 9999"', 2, "GPT2_NUM_GPUS=9999", "out of range: [0, 4096]"),
    (
        'CONFIG_GPT2_DDP_BACKEND="gloo"\nCONFIG_GPT2_MODEL_CUSTOM=y\nCONFIG_GPT2_N_HEAD=7',
        3,
        "N_EMBD=768 is not a multiple of N_HEAD=7",
    ),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=sgd LR=1"', 2, "MATRIX_COUPLED"),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZR=sgd => LEARNING_RATE=1"', 2, "unknown symbol OPTIMIZR"),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamz => LEARNING_RATE=1"', 2, "unknown value 'adamz' of GPT2_OPTIMIZER"),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LEARNING_RATE=x"', 2, RATE),
    (ON + 'CONFIG_MATRIX_COUPLED="=> LEARNING_RATE=1"', 2, "expected NAME=value [NAME=value ...] => "),
    (
        ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw =>"',
        2,
        "expected NAME=value [NAME=value ...] => ",
    ),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1 LEARNING_RATE=2"', 2, "a symbol is set twice"),
    (ON + 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1,1.0"', 2, "repeated: 1, 1.0"),
    (
        ON + 'CONFIG_MATRIX_GPT2_LEARNING_RATE="1 2"\nCONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=3"',
        3,
        "GPT2_LEARNING_RATE is also an axis",
    ),
    (ON + 'CONFIG_MATRIX_EXCLUDE="OPTIMIZER=adamw:"', 2, "MATRIX_EXCLUDE", "...]: reason"),
    (ON + 'CONFIG_MATRIX_EXCLUDE="OPTIMIZER=adamw: too slow"', None, "every cell of the matrix is excluded"),
    (ON + "CONFIG_MATRIX_GPT2_OPTIMIZER_SGD=y\nCONFIG_GPT2_MUON_NS_STEPS=3", 3, "depends on GPT2_OPTIMIZER_MUON"),
    ('CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_DDP_BACKEND="nccl"', 2, "FORBID_NCCL_ON_CPU", "nccl requires GPUs"),
    (
        "CONFIG_PARALLEL_BATCH_SIZE=25",
        1,
        "PARALLEL_BATCH_SIZE=25 is not a multiple of BATCH_SIZE=12 x NUM_GPUS=1: pass BATCH_SIZE=5",
    ),
    ("CONFIG_GPT2_DATASET_SHARDS=y", 1, "DATASET=shards needs a path: <folder> (DATA_PATH)"),
    ('CONFIG_GPT2_LEARNING_RATE="1e-3"\nCONFIG_GPT2_MIN_LR="2e-3"', 2, "MIN_LR=0.002 is above LEARNING_RATE=0.001"),
    (
        'CONFIG_GPT2_OPTIMIZER_SGD=y\nCONFIG_GPT2_SGD_MOMENTUM="0"\nCONFIG_GPT2_SGD_NESTEROV=y',
        3,
        "SGD_NESTEROV needs an SGD_MOMENTUM above 0",
    ),
    (
        'CONFIG_GPT2_PRUNING_MAGNITUDE=y\nCONFIG_GPT2_PRUNING_WARMUP="0.8"',
        2,
        "PRUNING_RAMP_END=0.75 is not after PRUNING_WARMUP=0.8 in a run of 10000 steps",
    ),
    (
        "CONFIG_GPT2_OPTIMIZER_ADAMWSPAM=y\nCONFIG_GPT2_SPAM_INTERVAL=100",
        2,
        "SPAM_WARMUP_STEPS=150 is above SPAM_INTERVAL=100",
    ),
    ("CONFIG_GPT2_OPTIMIZER_MUON=y\nCONFIG_GPT2_PRUNING_MAGNITUDE=y", 2, "FORBID_PRUNING_OF_THIS_OPTIMIZER"),
]


def read(tree, path):
    """Read a configuration as the configuration targets do."""
    validated(tree, load_config(tree, path))


def test_an_error_in_a_configuration_is_refused_with_its_line_and_cause(tmp_path):
    tree, path = Tree.parse(), tmp_path / ".config"
    for text, number, *expected in INVALID_CONFIGURATIONS:
        path.write_text(text + "\n", encoding="utf-8")
        tree.reset()
        with pytest.raises(ConfigError) as caught:
            read(tree, path)
        message = str(caught.value)
        assert [part for part in expected if part not in message] == [], message
        assert number is None or f".config:{number}" in message, message


@pytest.mark.parametrize("command", ["olddefconfig", "defconfig", "test-matrix-dry-run", "plan", "test-matrix"])
def test_each_command_refuses_an_error_and_writes_nothing(tmp_path, command):
    program = Program(tmp_path)
    path = program.write("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_GPT2_BATCH_SIZE=0")
    arguments = [command]
    if command == "defconfig":
        arguments.append(f"DEFCONFIG={path.rename(tmp_path / 'mine.config')}")
        path.write_text("CONFIG_GPT2_SEED=7\n", encoding="utf-8")
    before = path.read_bytes()
    message = program.refused(*arguments)
    assert "config:2: CONFIG_GPT2_BATCH_SIZE=0" in message
    assert (path.read_bytes(), (tmp_path / ".config.old").exists()) == (before, False)


def test_all_errors_of_a_file_are_reported_at_once(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_NOPE=y", "CONFIG_GPT2_BIAS=yes", "CONFIG_GPT2_SEED=1", "junk")

    message = program.refused("olddefconfig")

    assert re.findall(r"\.config:(\d)", message) == ["1", "2", "4"]


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path):
    program = Program(tmp_path)
    program.config.write_bytes(b'CONFIG_GPT2_SEED=1\nCONFIG_RESULTS_DIR="\xff"\n')

    assert ".config:2: not UTF-8" in program.refused("olddefconfig")


def test_windows_line_ends_a_missing_last_newline_and_comments_are_accepted(tmp_path):
    program = Program(tmp_path)
    program.config.write_bytes(b"# mine\r\n\r\n# CONFIG_GPT2_SEED=3\r\n#CONFIG_NOPE=1\r\nCONFIG_GPT2_SEED=5")

    program.check("olddefconfig")

    assert program.value("GPT2_SEED") == "5"
    assert b"\r" not in program.config.read_bytes()


INVALID_OVERRIDES = [
    ("MAX_ITER=500", "unknown symbol MAX_ITER", "did you mean MAX_ITERS"),
    ("MAX_ITERS=", NUMBER),
    ("MAX_ITERS=5,", NUMBER),
    ("MAX_ITERS=5,5", "repeated: 5"),
    ("LR=1e-3,0.001", "repeated: 1e-3, 0.001"),
    ("OPTIMIZER=sdg", "unknown value 'sdg' of GPT2_OPTIMIZER"),
    ("OPTIMIZER=ADAMW,adamw", "repeated: "),
    ("OPTIMIZER_ADAMW=n", "GPT2_OPTIMIZER_ADAMW is a member of GPT2_OPTIMIZER"),
    ("OPTIMIZER_ADAMW=n,y", "GPT2_OPTIMIZER_ADAMW is a member of GPT2_OPTIMIZER"),
    ("MATRIX=y,n", BOOL),
    ("MATRIX_SEED=1", "unknown symbol MATRIX_SEED", "MATRIX_GPT2_SEED"),
    ("NUM_GPUS=9999", "NUM_GPUS=9999", "out of range: [0, 4096] when GPT2_USE_DDP"),
    ("MUON_NS_STEPS=3", "MUON_NS_STEPS=3", "depends on GPT2_OPTIMIZER_MUON"),
    ("FORBID_NCCL_ON_CPU=y", "computed, cannot be set"),
    ("DDP_BACKEND=nccl", "nccl requires GPUs"),
    ("GLOBAL_BATCH=25", "PARALLEL_BATCH_SIZE=25 is not a multiple of BATCH_SIZE=12"),
    ("DATA_PATH=a", "depends on GPT2_DATASET_HUB || GPT2_DATASET_FOLDER || GPT2_DATASET_SHARDS"),
    ("LR=fast", RATE),
    ("3=4", "is not NAME=value"),
    ("TARGET=x", "unknown symbol TARGET"),
]


def test_an_error_on_the_command_line_is_refused(tmp_path):
    program = Program(tmp_path)
    before = program.write("CONFIG_GPT2_DEVICE_CPU=y").read_bytes()
    for argument, *expected in INVALID_OVERRIDES:
        message = program.refused("test-matrix-dry-run", argument)
        assert [part for part in expected if part not in message] == [], message
    assert program.config.read_bytes() == before


def test_two_names_for_one_symbol_are_refused(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert "GPT2_MAX_ITERS is set twice" in program.refused("test-matrix-dry-run", "MAX_ITERS=5", "ITERS=6")


def test_two_ranks_without_ddp_are_refused_and_never_reduced_to_one(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert "out of range: [0, 1]" in program.refused("test-matrix-dry-run", "NUM_GPUS=2", "USE_DDP=n")


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a file").write_text("", encoding="utf-8")

    message = Program(tmp_path).refused("defconfig", f"KCONFIG_CONFIG={tmp_path}/a file/.config")

    assert f"{tmp_path}/a file" in message


def test_a_directory_in_place_of_a_configuration_is_refused(tmp_path):
    assert "cannot read" in Program(tmp_path).refused("olddefconfig", f"KCONFIG_CONFIG={tmp_path}")


def test_without_a_configuration_the_message_shows_how_to_create_one(tmp_path):
    message = Program(tmp_path).refused("test-matrix-dry-run")

    assert "not found" in message
    assert "make defconfig-<name>" in message


def test_a_hash_inside_a_string_is_not_a_comment(tmp_path):
    program = Program(tmp_path)
    program.write('CONFIG_ON_FINISH="notify-send # done"')

    program.check("olddefconfig")
