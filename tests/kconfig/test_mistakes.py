"""Every error in a configuration is refused with file, line, symbol and cause, and nothing is written."""

from __future__ import annotations

import os
import re

import pytest

from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import parse_override
from programs import Program

NUMBER = "expected an integer in decimal digits"
BOOL = "expected a bool: y or n"
NO_LINE = "cannot read"
RATE = "expected a number in [0, 1e+12]"

# Name of the error, the lines of .config, the invalid line (None: no single one), a part of the message.
INVALID_CONFIGURATIONS = [
    (
        "unknown symbol",
        ["CONFIG_GPT2_BACH_SIZE=4"],
        1,
        ["unknown symbol GPT2_BACH_SIZE", "did you mean GPT2_BATCH_SIZE"],
    ),
    (
        "unmet dependency",
        ["CONFIG_GPT2_SGD_NESTEROV=y"],
        1,
        [
            "depends on GPT2_OPTIMIZER_SGD || MATRIX_GPT2_OPTIMIZER_SGD",
            "GPT2_OPTIMIZER_SGD=n, MATRIX_GPT2_OPTIMIZER_SGD=n",
        ],
    ),
    ("number whose dependency is off", ["CONFIG_GPT2_MUON_NS_STEPS=3"], 1, ["depends on GPT2_OPTIMIZER_MUON"]),
    ("below its range", ["CONFIG_GPT2_BATCH_SIZE=0"], 1, ["GPT2_BATCH_SIZE=0", "out of range: [1, 65536]"]),
    ("above its range", ["CONFIG_GPT2_NUM_GPUS=4097"], 1, ["out of range: [0, 4096] when GPT2_USE_DDP"]),
    (
        "outside a range that hangs on another symbol",
        ["# CONFIG_GPT2_USE_DDP is not set", "CONFIG_GPT2_NUM_GPUS=2"],
        2,
        ["out of range: [0, 1]; [0, 4096] when GPT2_USE_DDP"],
    ),
    ("beyond 64 bits", ["CONFIG_GPT2_BATCH_SIZE=99999999999999999999"], 1, ["out of range"]),
    ("fraction for a whole number", ["CONFIG_GPT2_BATCH_SIZE=0.5"], 1, [NUMBER]),
    ("exponent for a whole number", ["CONFIG_GPT2_BATCH_SIZE=1e3"], 1, [NUMBER]),
    ("octal", ["CONFIG_GPT2_BATCH_SIZE=010"], 1, [NUMBER]),
    ("underscores in a number", ["CONFIG_GPT2_MAX_ITERS=1_000"], 1, [NUMBER]),
    ("hexadecimal for a whole number", ["CONFIG_GPT2_BATCH_SIZE=0x10"], 1, [NUMBER]),
    ("empty number", ["CONFIG_GPT2_BATCH_SIZE="], 1, [NUMBER]),
    ("quoted number", ['CONFIG_GPT2_BATCH_SIZE="4"'], 1, [NUMBER]),
    ("negative zero", ["CONFIG_PARALLEL_BATCH_SIZE=-0"], 1, [NUMBER]),
    ("digits of another script", ["CONFIG_GPT2_BATCH_SIZE=٤"], 1, [NUMBER]),
    ("a comment after a value", ["CONFIG_GPT2_BATCH_SIZE=4 # four"], 1, ["is followed by a comment"]),
    ("a blank after a value", ["CONFIG_GPT2_BATCH_SIZE=4 "], 1, [NUMBER]),
    ("NUL in a value", ["CONFIG_GPT2_BATCH_SIZE=4\0"], 1, [NUMBER, r"4\x00"]),
    ("blanks round the equals sign", ["CONFIG_GPT2_BATCH_SIZE = 4"], 1, [NO_LINE]),
    ("a blank in front", [" CONFIG_GPT2_BATCH_SIZE=4"], 1, [NO_LINE]),
    ("no CONFIG_", ["GPT2_BIAS=y"], 1, [NO_LINE]),
    ("shell syntax", ["export CONFIG_GPT2_BIAS=y"], 1, [NO_LINE]),
    ("nonsense", ["CONFIG_GPT2_BIAS=y", "hello"], 2, [NO_LINE, "'hello'"]),
    ("yes", ["CONFIG_GPT2_BIAS=yes"], 1, [BOOL]),
    ("True", ["CONFIG_GPT2_BIAS=True"], 1, [BOOL]),
    ("1 for a bool", ["CONFIG_GPT2_BIAS=1"], 1, [BOOL]),
    ("m for a bool", ["CONFIG_GPT2_BIAS=m"], 1, [BOOL]),
    ("Y", ["CONFIG_GPT2_BIAS=Y"], 1, [BOOL]),
    ("quoted bool", ['CONFIG_GPT2_BIAS="y"'], 1, [BOOL]),
    ("empty bool", ["CONFIG_GPT2_BIAS="], 1, [BOOL]),
    ("is not set, misspelt", ["# CONFIG_GPT2_BIAS is not sett"], 1, [NO_LINE]),
    ("is not set, without its blank", ["#CONFIG_GPT2_BIAS is not set"], 1, [NO_LINE]),
    ("a string is not set", ["# CONFIG_GPT2_LEARNING_RATE is not set"], 1, ["only a bool can be unset"]),
    ("a number is not set", ["# CONFIG_GPT2_BATCH_SIZE is not set"], 1, ["only a bool can be unset"]),
    (
        "two members of a choice",
        ["CONFIG_GPT2_OPTIMIZER_SGD=y", "CONFIG_GPT2_OPTIMIZER_MUON=y"],
        2,
        ["CONFIG_GPT2_OPTIMIZER_SGD=y", "members of the choice GPT2_OPTIMIZER"],
    ),
    (
        "member with an unmet dependency",
        ["CONFIG_GPT2_DATASET_FINEWEB=y", "CONFIG_GPT2_TOKENIZER_CHAR=y"],
        2,
        ["depends on GPT2_DATASET_STDLIB || ", "GPT2_DATASET_STDLIB=n"],
    ),
    ("duplicate", ["CONFIG_GPT2_SEED=1", "CONFIG_GPT2_SEED=1"], 2, ["CONFIG_GPT2_SEED is set twice", "first at"]),
    ("no prompt", ["CONFIG_FORBID_NCCL_ON_CPU=y"], 1, ["computed, cannot be set"]),
    ("float without quotes", ["CONFIG_GPT2_LEARNING_RATE=1e-3"], 1, ['CONFIG_GPT2_LEARNING_RATE="1e-3"']),
    ("half a pair of quotes", ['CONFIG_GPT2_LEARNING_RATE="1e-3'], 1, ["expected a string"]),
    ("words for a float", ['CONFIG_GPT2_LEARNING_RATE="fast"'], 1, [RATE]),
    ("nan", ['CONFIG_GPT2_LEARNING_RATE="nan"'], 1, [RATE]),
    ("infinity", ['CONFIG_GPT2_LEARNING_RATE="inf"'], 1, ["out of range: [0, 1e+12]"]),
    ("float out of range", ['CONFIG_GPT2_DROPOUT="1.5"'], 1, ["out of range: [0, 0.95]"]),
    ("empty float that may not be empty", ['CONFIG_GPT2_LEARNING_RATE=""'], 1, [RATE]),
    ("blank in a float", ['CONFIG_GPT2_LEARNING_RATE=" 1e-3"'], 1, [RATE]),
    ("underscore in a float", ['CONFIG_GPT2_LEARNING_RATE="1_0"'], 1, [RATE]),
    ("float in digits of another script", ['CONFIG_GPT2_LEARNING_RATE="٣"'], 1, [RATE]),
    ("word that is not in the set", ['CONFIG_GPT2_DDP_BACKEND="mpi"'], 1, ["expected one of auto, nccl, gloo"]),
    ("control character", ['CONFIG_RESULTS_DIR="a\tb"'], 1, ["control characters are not allowed"]),
    ("list with a bad element", ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_GPT2_SEED="1 x"'], 2, ["GPT2_SEED=x", NUMBER]),
    ("duplicate in a list", ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_GPT2_SEED="1 2 1"'], 2, ["repeated: 1"]),
    (
        "one number in two spellings",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_GPT2_LEARNING_RATE="1e-3 0.001"'],
        2,
        ["repeated: 1e-3, 0.001"],
    ),
    ("axis without MATRIX", ["CONFIG_MATRIX_GPT2_OPTIMIZER_SGD=y"], 1, ["depends on MATRIX=n"]),
    (
        "axis value that is legal in no cell",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_GPT2_NUM_GPUS="1 9999"'],
        2,
        ["GPT2_NUM_GPUS=9999", "out of range: [0, 4096]"],
    ),
    (
        "axis value that is always forbidden",
        ['CONFIG_GPT2_DDP_BACKEND="gloo"', "CONFIG_GPT2_MODEL_CUSTOM=y", "CONFIG_GPT2_N_HEAD=7"],
        3,
        ["a width of 768 is not a multiple of 7 heads", "CONFIG_GPT2_N_HEAD=7"],
    ),
    (
        "rule without an arrow",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=sgd LR=1"'],
        2,
        ["MATRIX_COUPLED", "expected NAME=value [NAME=value ...] =>"],
    ),
    (
        "rule on an unknown symbol",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZR=sgd => LEARNING_RATE=1"'],
        2,
        ["unknown symbol OPTIMIZR", "did you mean OPTIMIZER"],
    ),
    (
        "rule on an unknown value",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamz => LEARNING_RATE=1"'],
        2,
        ["unknown value 'adamz' of GPT2_OPTIMIZER", "sgd, adam, adamw"],
    ),
    (
        "rule with a bad value",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LEARNING_RATE=x"'],
        2,
        [RATE],
    ),
    (
        "rule without a left side",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="=> LEARNING_RATE=1"'],
        2,
        ["the left side is empty"],
    ),
    (
        "rule without a right side",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw =>"'],
        2,
        ["the right side is empty"],
    ),
    (
        "rule that sets one name twice",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1 LEARNING_RATE=2"'],
        2,
        ["GPT2_LEARNING_RATE is set twice"],
    ),
    (
        "rule with a value twice",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=1,1.0"'],
        2,
        ["repeated: 1, 1.0"],
    ),
    (
        "rule on an axis",
        [
            "CONFIG_MATRIX=y",
            'CONFIG_MATRIX_GPT2_LEARNING_RATE="1 2"',
            'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LR=3"',
        ],
        3,
        ["GPT2_LEARNING_RATE is also an axis"],
    ),
    (
        "exclusion without a reason",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_EXCLUDE="OPTIMIZER=adamw:"'],
        2,
        ["MATRIX_EXCLUDE", "...]: reason"],
    ),
    (
        "exclusion of everything",
        ["CONFIG_MATRIX=y", 'CONFIG_MATRIX_EXCLUDE="OPTIMIZER=adamw: too slow"'],
        None,
        ["every cell of the matrix is excluded", "MATRIX_EXCLUDE: too slow"],
    ),
    (
        "line that holds in no run",
        ["CONFIG_MATRIX=y", "CONFIG_MATRIX_GPT2_OPTIMIZER_SGD=y", "CONFIG_GPT2_MUON_NS_STEPS=3"],
        3,
        ["depends on GPT2_OPTIMIZER_MUON"],
    ),
    (
        "forbidden combination",
        ["CONFIG_GPT2_DEVICE_CPU=y", 'CONFIG_GPT2_DDP_BACKEND="nccl"'],
        2,
        ["FORBID_NCCL_ON_CPU", "nccl requires GPUs", "CONFIG_GPT2_DEVICE_CPU=y"],
    ),
    (
        "global batch that does not divide",
        ["CONFIG_PARALLEL_BATCH_SIZE=25"],
        1,
        ["a global batch of 25 is not a multiple of 12 (micro-batch) x 1 (ranks)"],
    ),
    ("shards without a folder", ["CONFIG_GPT2_DATASET_SHARDS=y"], 1, ['DATASET=shards needs DATA_PATH="<folder>"']),
    (
        "least rate above the peak",
        ['CONFIG_GPT2_LEARNING_RATE="1e-3"', 'CONFIG_GPT2_MIN_LR="2e-3"'],
        2,
        ["MIN_LR=2e-3 is above LEARNING_RATE=1e-3"],
    ),
    (
        "Nesterov without momentum",
        ["CONFIG_GPT2_OPTIMIZER_SGD=y", 'CONFIG_GPT2_SGD_MOMENTUM="0"', "CONFIG_GPT2_SGD_NESTEROV=y"],
        3,
        ["SGD_NESTEROV needs an SGD_MOMENTUM above 0"],
    ),
    (
        "pruning that ends before it begins",
        ["CONFIG_GPT2_PRUNING_MAGNITUDE=y", 'CONFIG_GPT2_PRUNING_WARMUP="0.8"'],
        2,
        ["PRUNING_RAMP_END=0.75 is not after PRUNING_WARMUP=0.8 in a run of 10000 steps"],
    ),
    (
        "a warm-up of SPAM that outlasts its interval",
        ["CONFIG_GPT2_OPTIMIZER_ADAMWSPAM=y", "CONFIG_GPT2_SPAM_INTERVAL=100"],
        2,
        ["SPAM_WARMUP_STEPS=150 is above SPAM_INTERVAL=100"],
    ),
    (
        "an optimizer whose updates pruning would spoil",
        ["CONFIG_GPT2_OPTIMIZER_MUON=y", "CONFIG_GPT2_PRUNING_MAGNITUDE=y"],
        2,
        ["FORBID_PRUNING_OF_WHOLE_UPDATES", "compute the update of a matrix as a whole"],
    ),
]


@pytest.mark.parametrize(
    ("lines", "number", "expected"), [pytest.param(*row[1:], id=row[0]) for row in INVALID_CONFIGURATIONS]
)
@pytest.mark.parametrize("command", ["olddefconfig", "defconfig", "test-matrix-dry-run"])
def test_an_error_is_reported_with_line_and_cause_and_nothing_is_written(tmp_path, lines, number, expected, command):
    program = Program(tmp_path)
    path = program.write(*lines)
    arguments = [command]
    if command == "defconfig":
        input_file = path.rename(tmp_path / "mine.config")
        path.write_text("CONFIG_GPT2_SEED=7\n", encoding="utf-8")
        arguments.append(f"DEFCONFIG={input_file}")
    else:
        input_file = path
    before = path.read_bytes()

    message = program.refused(*arguments)

    for text in expected[:1] if command == "test-matrix-dry-run" else expected:
        assert text in message
    if number is not None and command != "test-matrix-dry-run":
        assert f"{input_file.name}:{number}" in message
    assert path.read_bytes() == before
    assert not (tmp_path / ".config.old").exists()


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
    ("MAX_ITER=500", ["unknown symbol MAX_ITER", "did you mean MAX_ITERS"]),
    ("MAX_ITERS=", [NUMBER]),
    ("MAX_ITERS=5,", [NUMBER]),
    ("MAX_ITERS=5,5", ["repeated: 5"]),
    ("LR=1e-3,0.001", ["repeated: 1e-3, 0.001"]),
    (
        "OPTIMIZER=sdg",
        [
            "unknown value 'sdg' of GPT2_OPTIMIZER",
            "sgd, adam, adamw, adamwadv, adamwspam, adamwprune, muon, muon_nanochat",
        ],
    ),
    ("OPTIMIZER=ADAMW,adamw", ["repeated: "]),
    ("OPTIMIZER_ADAMW=n", ["GPT2_OPTIMIZER_ADAMW is a member of GPT2_OPTIMIZER"]),
    ("OPTIMIZER_ADAMW=n,y", ["GPT2_OPTIMIZER_ADAMW is a member of GPT2_OPTIMIZER"]),
    ("MATRIX=y,n", [BOOL]),
    ("MATRIX_SEED=1", ["unknown symbol MATRIX_SEED", "MATRIX_GPT2_SEED"]),
    ("NUM_GPUS=9999", ["NUM_GPUS=9999", "out of range: [0, 4096] when GPT2_USE_DDP"]),
    ("MUON_NS_STEPS=3", ["MUON_NS_STEPS=3", "depends on GPT2_OPTIMIZER_MUON"]),
    ("FORBID_NCCL_ON_CPU=y", ["computed, cannot be set"]),
    ("DDP_BACKEND=nccl", ["nccl requires GPUs"]),
    ("GLOBAL_BATCH=25", ["a global batch of 25 is not a multiple of 12"]),
    ("DATA_PATH=a", ["depends on GPT2_DATASET_HUB || GPT2_DATASET_FOLDER || GPT2_DATASET_SHARDS"]),
    ("LR=fast", [RATE]),
    ("3=4", ["is not NAME=value"]),
    ("TARGET=x", ["unknown symbol TARGET"]),
]


@pytest.mark.parametrize(("argument", "expected"), INVALID_OVERRIDES)
def test_an_error_on_the_command_line_is_refused(tmp_path, argument, expected):
    program = Program(tmp_path)
    before = program.write("CONFIG_GPT2_DEVICE_CPU=y").read_bytes()

    message = program.refused("test-matrix-dry-run", argument)

    for text in expected:
        assert text in message
    assert program.config.read_bytes() == before


def test_two_names_for_one_symbol_are_refused(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert "GPT2_MAX_ITERS is set twice" in program.refused("test-matrix-dry-run", "MAX_ITERS=5", "ITERS=6")


def test_two_ranks_without_ddp_are_refused_and_never_reduced_to_one(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert "out of range: [0, 1]" in program.refused("test-matrix-dry-run", "NUM_GPUS=2", "USE_DDP=n")


A = 'config A\n\tbool "a"\n\tdefault y\n'
INVALID_KCONFIGS = [
    (
        "undefined symbol",
        'config B\n\tint "b"\n\tdefault 3 if NUM_GPU > 3\n\tdefault 1\n',
        "undefined symbol NUM_GPU",
        1,
    ),
    ("default out of range", 'config B\n\tint "b"\n\trange 1 9\n\tdefault 10\n', "10", 1),
    (
        "default out of range under a condition that is off",
        'config A\n\tbool "a"\nconfig B\n\tint "b"\n\trange 1 9\n\tdefault 10 if A\n\tdefault 3\n',
        "CONFIG_B=10 why out of range: [1, 9]",
        3,
    ),
    ("bool with default yes", 'config B\n\tbool "b"\n\tdefault "yes"\n', "bool B has default 'yes'", 1),
    ("int with default 0.5", 'config B\n\tint "b"\n\tdefault 0.5\n', "0.5", 1),
    ("int without a default", 'config B\n\tint "b"\n\trange 0 3\n', "B has no default", 1),
    ("int with a default under a condition", A + 'config B\n\tint "b"\n\tdefault 1 if A\n', "B has no default", 4),
    ("MATRIX_X without X", 'config MATRIX_X\n\tstring "x"\n\tdefault ""\n', "MATRIX_X is not an axis", 1),
    ("MATRIX_X of the wrong type", A + 'config MATRIX_A\n\tbool "x"\n', "MATRIX_A must be a string", 4),
    (
        "two choices of one prefix",
        'choice\n\tprompt "c"\nconfig A_B\n\tbool "b"\nconfig A_C\n\tbool "c"\nendchoice\n'
        'choice\n\tprompt "d"\nconfig A_D\n\tbool "d"\nconfig A_E\n\tbool "e"\nendchoice\n',
        "a second choice whose members begin with A_",
        8,
    ),
    (
        "default outside the choice",
        'choice\n\tprompt "c"\n\tdefault C\nconfig A_B\n\tbool "b"\nconfig A_C\n\tbool "c"\nendchoice\n'
        'config C\n\tbool "c"\n',
        "is not contained in the choice",
        1,
    ),
    ("syntax error", 'config A\n\tbol "a"\n', "syntax error", 2),
    ("unterminated text", 'config A\n\tbool "a\n', "unterminated string", 2),
    ("missing endif", "if A\n", "expected 'endif'", None),
    ("missing source file", 'source "nowhere/Kconfig"\n', "'nowhere/Kconfig' not found", 1),
    (
        "dependency loop",
        'config A\n\tbool "a"\n\tdepends on B\nconfig B\n\tbool "b"\n\tdepends on A\n',
        "Dependency loop",
        1,
    ),
    (
        "select of a symbol with unmet dependencies",
        A + '\tselect B\nconfig C\n\tbool "c"\nconfig B\n\tbool "b"\n\tdepends on C\n',
        "B (defined at @:7) has direct dependencies C with value n",
        7,
    ),
    ("select of an unknown symbol", A + "\tselect NOPE\n", "undefined symbol NOPE", 1),
    ("float marker on an int", 'config A\n\tint "a"\n\tdefault 1\n\t$(float,0,1)\n', "needs a string", 4),
    (
        "float default out of range",
        'config A\n\tstring "a"\n\tdefault "7"\n\t$(float,0,1)\n',
        "out of range: [0, 1]",
        1,
    ),
    ("float marker with one bound", 'config A\n\tstring "a"\n\t$(float,0)\n', "bad number of arguments", 3),
    ("float marker with words", 'config A\n\tstring "a"\n\t$(float,zero,one)\n', "the bounds must be numbers", 3),
    ("float marker upside down", 'config A\n\tstring "a"\n\t$(float,1,0)\n', "LOW,HIGH", 3),
    ("float marker with a slip", 'config A\n\tstring "a"\n\t$(float,0,1,emty)\n', "LOW,HIGH,empty", 3),
    ("unknown marker", 'config A\n\tstring "a"\n\t$(flaot,0,1)\n', "$(flaot,0,1): only $(float)", 3),
    ("marker above everything", '$(neutral)\nconfig A\n\tbool "a"\n', "no symbol above $(", 1),
    ("marker below a comment", A + 'comment "x"\n\t$(neutral)\n', "no symbol above $(", 5),
    (
        "marker below a choice",
        A + 'choice\n\tprompt "x"\n\t$(neutral)\nconfig A_B\n\tbool "b"\nconfig A_C\n\tbool "c"\nendchoice\n',
        "no symbol above $(",
        6,
    ),
    ("no type", 'config A\n\tprompt "a"\n', "defined without a type", 1),
    ("two types", A + 'config A\n\tint "b"\n\tdefault 1\n', "defined with multiple types", 1),
    ("command", 'config A\n\tstring "a"\n\tdefault "$(shell,echo hello)"\n', "commands and environment variables", 3),
    ("environment variable", 'config A\n\tstring "a"\n\tdefault "$(HOME)"\n', "commands and environment variables", 3),
    ("environment variable, old form", 'config A\n\tstring "a"\n\tdefault "$HOME"\n', "the environment is not read", 3),
    ("option env", 'config A\n\tstring\n\toption env="HOME"\n', "A", 3),
    ("empty help", 'config A\n\tbool "a"\n\thelp\nconfig B\n\tbool "b"\n', "empty help text", 1),
]


@pytest.mark.parametrize(
    ("text", "expected", "number"), [pytest.param(*row[1:], id=row[0]) for row in INVALID_KCONFIGS]
)
def test_an_error_in_a_kconfig_file_is_refused_with_its_line(tmp_path, text, expected, number):
    program = Program(tmp_path)
    kconfig = tmp_path / "Kconfig"
    kconfig.write_text(text, encoding="utf-8")
    program.write("# CONFIG_A is not set")
    before = program.config.read_bytes()

    message = program.refused("defconfig", f"KCONFIG={kconfig}")

    plain = " ".join(message.replace(str(kconfig), "@").replace("why: ", "why ").split())
    assert expected in plain.replace("CONFIG_B='10'", "CONFIG_B=10")
    assert number is None or f"@:{number}" in plain
    assert program.config.read_bytes() == before


def test_a_kconfig_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "Kconfig").write_bytes(b'config A\n\tbool "\xff"\n')

    message = Program(tmp_path).refused("defconfig", f"KCONFIG={tmp_path}/Kconfig")

    assert "Kconfig" in message


def test_a_select_that_is_invalid_only_in_this_configuration_is_refused(tmp_path):
    text = 'config A\n\tbool "a"\n\tselect B\nconfig C\n\tbool "c"\nconfig B\n\tbool "b"\n\tdepends on C\n'
    (tmp_path / "Kconfig").write_text(text, encoding="utf-8")
    program = Program(tmp_path)
    program.write("CONFIG_A=y")

    assert "direct dependencies C with value n" in program.refused("olddefconfig", f"KCONFIG={tmp_path}/Kconfig")


def test_a_hexadecimal_number_is_validated(tmp_path):
    (tmp_path / "Kconfig").write_text('config A\n\thex "a"\n\tdefault 0x10\n', encoding="utf-8")
    program = Program(tmp_path)
    program.write("CONFIG_A=17")

    assert "hexadecimal" in program.refused("olddefconfig", f"KCONFIG={tmp_path}/Kconfig")


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a file").write_text("", encoding="utf-8")

    message = Program(tmp_path).refused("defconfig", f"KCONFIG_CONFIG={tmp_path}/a file/.config")

    assert "cannot write" in message


def test_a_directory_in_place_of_a_configuration_is_refused(tmp_path):
    assert "cannot read" in Program(tmp_path).refused("olddefconfig", f"KCONFIG_CONFIG={tmp_path}")


def test_without_a_configuration_the_message_shows_how_to_create_one(tmp_path):
    message = Program(tmp_path).refused("test-matrix-dry-run")

    assert "not found" in message
    assert "make defconfig-<name>" in message


@pytest.mark.parametrize(
    "line",
    ["CONFIG_GPT2_BATCH_SIZE=2 # two", 'CONFIG_GPT2_BETA1="0.9"  # the usual', "CONFIG_GPT2_BIAS=y\t# bias"],
)
def test_a_comment_after_an_assignment_is_named(tmp_path, line):
    program = Program(tmp_path)
    program.write(line)

    message = program.refused("olddefconfig")

    assert f"{line.partition('#')[0].rstrip()} is followed by a comment" in message
    assert "a comment needs a line of its own" in message
    assert f"'#{line.partition('#')[2]}'" in message


def test_a_hash_inside_a_string_is_not_a_comment(tmp_path):
    program = Program(tmp_path)
    program.write('CONFIG_ON_FINISH="notify-send # done"')

    program.check("olddefconfig")


LEGAL_CHOICES = {
    "members without a common prefix": (
        'choice\n\tprompt "speed"\n\tdefault SLOW\nconfig FAST\n\tbool "fast"\nconfig SLOW\n\tbool "slow"\nendchoice\n',
        "CHOICE_FAST",
        "slow",
    ),
    "a name, and members without a common prefix": (
        'choice SPEED\n\tprompt "speed"\nconfig FAST\n\tbool "fast"\nconfig SLOW\n\tbool "slow"\nendchoice\n',
        "SPEED",
        "fast",
    ),
    "a default that is appended": (
        'choice PICK\n\tprompt "pick"\nconfig PICK_A\n\tbool "a"\nconfig PICK_B\n\tbool "b"\nendchoice\n'
        "choice PICK\n\tdefault PICK_B\nendchoice\n",
        "PICK",
        "b",
    ),
    "no prompt": ('choice\n\tdefault X_B\nconfig X_A\n\tbool "a"\nconfig X_B\n\tbool "b"\nendchoice\n', "X", None),
}


@pytest.mark.parametrize("name", LEGAL_CHOICES)
def test_a_legal_choice_is_accepted(tmp_path, name):
    text, axis, selected = LEGAL_CHOICES[name]
    (tmp_path / "Kconfig").write_text(text, encoding="utf-8")

    tree = Tree.parse(str(tmp_path / "Kconfig"), srctree=tmp_path)

    assert tree.value(axis) == selected


def test_a_choice_without_a_common_prefix_is_an_axis_on_the_command_line(tmp_path):
    text, axis, _ = LEGAL_CHOICES["members without a common prefix"]
    (tmp_path / "Kconfig").write_text(text, encoding="utf-8")
    tree = Tree.parse(str(tmp_path / "Kconfig"), srctree=tmp_path)

    (name, values) = parse_override(tree, axis, "fast,slow")

    assert name == axis
    assert [value.name for value in values] == ["FAST", "SLOW"]


def test_a_pipe_in_place_of_a_configuration_is_refused(tmp_path):
    program = Program(tmp_path)
    os.mkfifo(program.config)

    assert "why: it is not a file" in program.refused("test-matrix-dry-run")
