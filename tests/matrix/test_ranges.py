"""Ranges in the values of an axis: which values they are, where they may stand, and what is refused."""

from __future__ import annotations

import pytest

from kmatrix.errors import ConfigError
from kmatrix.kconfig.ranges import values_of_range
from programs import Program

DRY = "test-matrix-dry-run"
BASE = ("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_MATRIX=y")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4:1e-2:log5", "1e-4 3.16e-4 1e-3 3.16e-3 0.01"),
        ("1e-3:1:log7", "1e-3 3.16e-3 0.01 0.0316 0.1 0.316 1"),
        ("0:1:lin4", "0 0.333 0.667 1"),
        ("1e6:4e6:lin4", "1e6 2e6 3e6 4e6"),
        ("0.03:0.09:0.02", "0.03 0.05 0.07 0.09"),  # in binary, 0.03 + 3 * 0.02 is not 0.09
        ("1e-6:2e-6:4e-7", "1e-6 1.4e-6 1.8e-6"),  # no step hits the end
        ("-1:1:1", "-1 0 1"),
    ],
)
def test_a_range_has_these_values(text, values):
    assert values_of_range(text, whole=False, where="here") == values.split()


@pytest.mark.parametrize(
    ("text", "values"), [("64:512:log4", "64 128 256 512"), ("1e3:3e3:1000", "1000 2000 3000"), ("1:9:lin3", "1 5 9")]
)
def test_a_range_of_a_whole_number_has_whole_values(text, values):
    assert values_of_range(text, whole=True, where="here") == values.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "LOW below HIGH and 2 to 1000") for text in ("1e-2:1e-4:log5", "1:1:1", "0:1:2", "0:1:lin1001")),
        *((text, "LOW below HIGH and 2 to 1000") for text in ("1:2:-1", "1:2:0", "0:1:1e-9", "0:1:lin1")),
        *((text, "ends above 0") for text in ("0:1:log3", "-1:1:log3")),
        *((text, "expected LOW:HIGH:logN") for text in ("0:1:log", "0:1:Lin3", "0:nan:1", "0:1e999:lin3", "0:1_0:1")),
        *((text, "expected LOW:HIGH:logN") for text in ("0:1", "0::1", "0:1:2:3")),
    ],
)
def test_other_ranges_are_refused(text, why):
    with pytest.raises(ConfigError) as refused:
        values_of_range(text, whole=False, where="file:3")

    assert refused.value.what == f"file:3: {text}"
    assert why in refused.value.why


def test_a_range_makes_an_axis_in_a_file_on_the_command_line_and_in_a_rule(tmp_path):
    program = Program(tmp_path)
    names = [f"gpt2_adamw_lr{value}_1cpu" for value in ("1e-3", "2e-3", "4e-3", "5e-3")]

    program.write(*BASE, 'CONFIG_MATRIX_GPT2_LEARNING_RATE="1e-3:4e-3:log3 5e-3"')
    assert program.check(DRY).names == names
    program.write(*BASE)
    assert program.check(DRY, "LR=1e-3:4e-3:log3,5e-3").names == names
    program.write(*BASE, 'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => LEARNING_RATE=1e-3:4e-3:log3,5e-3"')
    assert program.check(DRY).names == names


def test_a_mistake_in_a_range_is_refused_with_its_place(tmp_path):
    program = Program(tmp_path)
    program.write(*BASE, 'CONFIG_MATRIX_GPT2_SEED="1:4:lin3"')

    error = program.refused(DRY)

    assert f"{program.config}:3: CONFIG_MATRIX_GPT2_SEED: 1:4:lin3" in error
    assert "2.5 is not an integer" in error
    program.write(*BASE)
    assert "CONFIG_GPT2_DROPOUT=1: out of range" in program.refused(DRY, "DROPOUT=0:1:lin3").replace("\n  why", "")
    assert "repeated: 2" in program.refused(DRY, "SEED=1:3:1,2")
