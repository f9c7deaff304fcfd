"""Requested values take effect, are saved and read back; all others follow their defaults."""

from __future__ import annotations

import pytest

from kmatrix.kconfig.assignments import explicit_names, header
from programs import ROOT, Program, give_gpus
from random_config import write_random_config


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def test_a_random_configuration_survives_each_way_of_saving_it_and_gives_the_same_runs(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 1)
    for seed in range(8):
        first, second = Program(tmp_path / f"{seed}"), Program(tmp_path / f"{seed} again")
        first.folder.mkdir()
        write_random_config(first.config, seed)
        text = first.config.read_text(encoding="utf-8")

        assert "no change" in first.check("olddefconfig").out
        first.check("savedefconfig", f"DEFCONFIG={tmp_path}/saved")
        second.check("defconfig", f"DEFCONFIG={tmp_path}/saved")

        assert settings(second.config.read_text(encoding="utf-8")) == settings(text)
        # The dry run refuses models that exceed the memory of this machine, and random ones may.
        ids = [[planned.run_id for planned in program.plan().runs] for program in (first, second)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 1


def settings(text):
    return [line for line in text.splitlines() if not line.startswith("# asked for") and line.strip() not in ("", "#")]


def test_the_previous_configuration_is_kept_and_diffconfig_shows_the_change(program):
    program.check("defconfig")
    before = program.config.read_bytes()
    program.check("olddefconfig", "MAX_ITERS=77", "OPTIMIZER=muon")

    assert (program.folder / ".config.old").read_bytes() == before
    changes = program.check("diffconfig").out.splitlines()
    assert " GPT2_MAX_ITERS 10000 -> 77" in changes
    assert "+GPT2_MUON_NS_STEPS 5" in changes
    assert " GPT2_OPTIMIZER_MUON n -> y" in changes


def test_an_unchanged_configuration_is_not_rewritten(program):
    program.check("defconfig-gpt2-cpu-quick")
    before = program.config.stat()

    assert "no change" in program.check("defconfig-gpt2-cpu-quick").out

    after = program.config.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert not (program.folder / ".config.old").exists()


def test_a_linked_configuration_is_written_through_the_link(program):
    own = program.folder / "mine" / "own.config"
    program.config.symlink_to(own)
    program.check("defconfig", "MAX_ITERS=5")
    program.check("olddefconfig", "MAX_ITERS=77")

    assert program.config.is_symlink()
    assert program.value("GPT2_MAX_ITERS") == "77"
    assert "CONFIG_GPT2_MAX_ITERS=5" in own.with_name("own.config.old").read_text(encoding="utf-8")


def test_a_computed_value_that_changed_is_updated_with_a_note(program):
    program.write("CONFIG_GPT2_SEED=7", "CONFIG_FORBID_NCCL_ON_CPU=y")
    program.refused("test-matrix-dry-run")

    assert ".config:2: CONFIG_FORBID_NCCL_ON_CPU: computed, now n" in program.check("olddefconfig").out
    assert program.value("GPT2_SEED") == "7"


def test_a_line_without_effect_due_to_the_command_line_is_removed_with_a_note(program):
    out = program.check("defconfig-gpt2-cpu-quick", "MATRIX=n").out

    assert "CONFIG_MATRIX_GPT2_NUM_GPUS (defconfigs/gpt2-cpu-quick:14) has no effect: depends on MATRIX" in out
    assert program.value("MATRIX") == "n"


def test_defaults_follow_the_optimizer_and_requested_values_stay(program):
    program.write("CONFIG_GPT2_OPTIMIZER_ADAMW=y")
    program.check("olddefconfig")
    assert program.value("GPT2_LEARNING_RATE") == '"6e-4"'
    program.check("olddefconfig", "OPTIMIZER=muon")
    assert program.value("GPT2_LEARNING_RATE") == '"0.02"'

    program.check("olddefconfig", "LEARNING_RATE=6e-4")
    program.check("olddefconfig", "OPTIMIZER=sgd")
    assert program.value("GPT2_LEARNING_RATE") == '"6e-4"'


def test_a_requested_value_equal_to_the_default_stays_requested(program):
    program.write('CONFIG_GPT2_LEARNING_RATE="6e-4"')
    program.check("olddefconfig")
    program.check("olddefconfig")

    program.check("olddefconfig", "OPTIMIZER=muon")

    assert program.value("GPT2_LEARNING_RATE") == '"6e-4"'


def test_a_hand_edited_line_counts_as_requested(program):
    program.check("defconfig")
    text = program.config.read_text(encoding="utf-8").replace('LEARNING_RATE="6e-4"', 'LEARNING_RATE="3e-4"')
    program.config.write_text(text, encoding="utf-8")

    program.check("olddefconfig", "OPTIMIZER=muon")

    assert program.value("GPT2_LEARNING_RATE") == '"3e-4"'


def test_a_configuration_that_was_saved_on_windows_has_the_same_values(program):
    program.check("defconfig")
    written = program.folder / ".config"
    before = written.read_bytes()
    written.write_bytes(b"\xef\xbb\xbf" + before.replace(b"\n", b"\r\n"))
    program.check("olddefconfig", "SEED=7")
    assert b"CONFIG_GPT2_SEED=7\n" in written.read_bytes()


def test_the_header_lists_exactly_the_requested_values(program):
    program.write("CONFIG_GPT2_OPTIMIZER_MUON=y", "CONFIG_GPT2_SEED=1337")
    program.check("olddefconfig")

    assert explicit_names(program.config) == {"GPT2_OPTIMIZER_MUON", "GPT2_SEED"}
    assert explicit_names(ROOT / "defconfigs" / "gpt2-cpu-quick") is None
    assert header([]).endswith("# asked for:\n")


def test_a_list_on_the_command_line_of_a_defconfig_becomes_an_axis(program):
    program.check("defconfig-gpt2-cpu-quick", "OPTIMIZER=sgd,adam", "SEED=1,2", "NUM_GPUS=1")

    assert program.value("MATRIX_GPT2_OPTIMIZER_SGD") == program.value("MATRIX_GPT2_OPTIMIZER_ADAM") == "y"
    assert program.value("MATRIX_GPT2_OPTIMIZER_ADAMW") == "n"
    assert program.value("MATRIX_GPT2_SEED") == '"1 2"'
    assert program.value("MATRIX_GPT2_NUM_GPUS") == '""'
    assert len(program.check("test-matrix-dry-run").runs) == 4


def test_fragments_are_merged_into_a_defconfig_in_order(program):
    out = program.check("defconfig-gpt2-cpu-quick+bf16+quick").out

    assert program.value("GPT2_DTYPE_BF16") == "y"
    assert program.value("GPT2_MAX_ITERS") == "100"
    assert "CONFIG_GPT2_MAX_ITERS: 300 (defconfigs/gpt2-cpu-quick:6) -> 100" in out


def test_an_unknown_defconfig_or_fragment_is_refused_with_the_known_ones(program):
    assert "did you mean gpt2-cpu-quick" in program.refused("defconfig-gpt2-cpu-quik")
    assert "did you mean quick" in program.refused("defconfig-gpt2-cpu-quick+quik")
    assert "make list-defconfigs" in program.refused("defconfig-x")


def test_the_environment_has_no_effect(program, monkeypatch):
    program.check("defconfig")
    text = program.config.read_text(encoding="utf-8")
    for name, value in {"CONFIG_": "X_", "MAX_ITERS": "5", "GPT2_MAX_ITERS": "5", "KCONFIG_ALLCONFIG": "1"}.items():
        monkeypatch.setenv(name, value)

    program.check("defconfig")

    assert program.config.read_text(encoding="utf-8") == text
