"""The settings of Slurm: invalid ones are refused where they are written, and flags of ours are not overridden."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmatrix.engines.schedulers import is_setting
from kmatrix.engines.slurm.settings import read_settings
from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import apply_assignments, read_assignments
from kmatrix.kconfig.tree import open_tree
from kmatrix.records.jobs.forms import job_seconds, memory_mib
from kmatrix.records.paths import ROOT

OWN = [symbol.name for symbol in open_tree().symbols if symbol.nodes[0].filename.endswith("Kconfig.slurm")]


def test_every_symbol_of_the_menu_is_kept_for_the_jobs():
    assert OWN
    assert all(is_setting("slurm", name) for name in OWN)


def test_the_defaults_are_those_of_the_menu():
    tree = open_tree()
    apply_assignments(tree, read_assignments_of(tree, "CONFIG_ENGINE_SLURM=y\n"))
    texts = tree.effective().texts

    assert set(OWN) <= texts.keys()
    assert read_settings(texts) == read_settings({})


def read_assignments_of(tree, text, path=None):
    path = path or Path("/tmp") / "kmatrix-slurm-config-of-test"
    path.write_text(text)
    try:
        return read_assignments(tree, path)
    finally:
        path.unlink()


def test_no_symbol_of_slurm_is_written_for_this_machine():
    tree = open_tree()

    assert not [name for name in OWN if f"CONFIG_{name}" in tree.config_text()]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('CONFIG_SLURM_TIME="400-0"', "expected a time up to 366 days"),
        ('CONFIG_SLURM_TIME="soon"', "expected a time up to 366 days"),
        ('CONFIG_SLURM_MEMORY="64 GB"', "expected a size such as 64G"),
        ('CONFIG_SLURM_PARTITION="gpu;reboot"', "expected one name"),
        ('CONFIG_STAGE_DIR="scratch"', "expected an absolute path on the nodes"),
        ('CONFIG_SLURM_ACCOUNT="--uid=0"', "expected one name"),
        ('CONFIG_SLURM_GPU_FLAG="gpus"', "expected one of gres, gpus-per-node, gpus-per-task"),
        ('CONFIG_SLURM_EXTRA_FLAGS="reboot"', "does not belong to a flag"),
        ('CONFIG_SLURM_EXTRA_FLAGS="--x=\'"', "no closing quotation"),
        ('CONFIG_SLURM_TIME_FACTOR="0.5"', "out of range"),
    ],
)
def test_an_invalid_value_is_refused_with_its_file_and_line(tmp_path, line, why):
    path = tmp_path / "config"
    tree = open_tree()

    with pytest.raises(ConfigError) as caught:
        read_assignments_of(tree, f"CONFIG_ENGINE_SLURM=y\n{line}\n", path)

    assert f"{path}:2:" in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90m", 5400), ("12h", 43200), ("1d12h", 129600), ("45s", 45), ("1-12:00:00", 129600), ("1-12:30", 131400)),
        *(("01:30:00", 5400), ("90:00", 5400), ("90", 5400), ("1-12", 129600), ("5-0", 432000)),
        *(
            ("", None),
            ("0h", None),
            ("0", None),
            ("9999d", None),
            ("1-12:00:00:00", None),
            ("-5", None),
            ("1:2:3:4", None),
        ),
    ],
)
def test_time_limits(text, seconds):
    assert job_seconds(text) == seconds


def test_a_time_limit_is_in_whole_minutes_as_slurm_counts_it():
    assert read_settings({"SLURM_TIME": "90s"}).seconds == 120


@pytest.mark.parametrize(
    ("text", "mib"),
    [("64G", 65536), ("512M", 512), ("2048K", 2), ("1T", 1048576), ("100", 100), ("0", 0), ("1g", None)],
)
def test_memory(text, mib):
    assert memory_mib(text) == mib


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        *(("--time=1", "SLURM_TIME="), ("-t 1", "SLURM_TIME="), ("-t1", "SLURM_TIME="), ("--tim 1", "SLURM_TIME=")),
        *(("-p x", "SLURM_PARTITION="), ("--array=0-9", "remove --array"), ("--wrap='reboot'", "remove --wrap")),
        *(
            ("--gpus=4", "NUM_GPUS="),
            ("-N2", "NUM_NODES="),
            ("--no-requeue", "SLURM_RESTARTS=0"),
        ),
        *(("-M other", "remove -M"), ("--clusters=other", "remove --clusters")),
    ],
)
def test_flags_that_kmatrix_sets_are_refused_with_the_symbol(flags, instead):
    with pytest.raises(ConfigError, match="which kmatrix sets itself") as caught:
        read_settings({"SLURM_EXTRA_FLAGS": flags})

    assert instead in caught.value.hint


def test_other_flags_pass_with_their_values():
    flags = "--mail-type=END -x n1 --exclude=n2 --nice=100 --licenses 'a b' --mem-bind=local"

    assert read_settings({"SLURM_EXTRA_FLAGS": flags}).extra_flags == (
        *(("--mail-type=END",), ("-x", "n1"), ("--exclude=n2",), ("--nice=100",), ("--licenses", "a b")),
        ("--mem-bind=local",),
    )


def test_variables_of_the_site_give_defaults_of_unset_symbols_only():
    site = {"SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "1"}

    found = read_settings({"SLURM_PARTITION": "big"}, site)

    assert (found.account, found.partition, found.seconds) == ("lab", "big", None)


def test_a_setup_file_is_relative_to_the_project():
    assert read_settings({"SLURM_SETUP": "setup.sh"}).setup == ROOT / "setup.sh"


@pytest.mark.parametrize(
    "symbols", [{"SLURM_NOTICE": "x"}, {"SLURM_TIME": "x"}, {"SLURM_TIME_FACTOR": "x"}, {"SLURM_MEMORY": "x"}]
)
def test_a_damaged_value_of_a_file_is_one_clear_error(symbols):
    with pytest.raises(ConfigError):
        read_settings(symbols)
