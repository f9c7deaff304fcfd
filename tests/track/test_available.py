"""TRACKER=, PROJECT= and the menu Trackers: the trackers of a matrix and the name of their project."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kmatrix.config import Config
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.make import tracking
from kmatrix.kconfig.assignments import TRACKERS, parse_trackers
from kmatrix.records.runs import RunFile, Tracking
from kmatrix.track import available
from kmatrix.track.available import announced, login, missing, need_trackers, own_project
from programs import Program, answer_for_pytorch

CPU = "defconfig-gpt2-cpu-quick"


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def trackers_in_config(program):
    """Return the trackers in .config."""
    return [name for name, symbol in TRACKERS.items() if program.value(symbol) == "y"]


def config(*names, project=""):
    return Config(
        results_dir=".",
        data_dir="data",
        checkpoint_dir="",
        run_timeout_s=0,
        reuse=True,
        monitor_hz=0,
        trackers=names,
        tracker_project=project,
        tracker_limit_s=60,
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("wandb", ["wandb"]),
        ("trackio", ["trackio"]),
        ("tensorboard", ["tensorboard"]),
        ("wandb,trackio", ["wandb", "trackio"]),
        ("trackio, wandb", ["wandb", "trackio"]),
        ("both", ["wandb", "trackio"]),
        ("both,tensorboard", ["wandb", "trackio", "tensorboard"]),
        ("all", ["wandb", "trackio", "tensorboard"]),
        ("none", []),
        ("WandB", ["wandb"]),
    ],
)
def test_a_defconfig_saves_the_trackers_of_the_command_line(program, text, names):
    program.check(CPU, f"TRACKER={text}")

    assert trackers_in_config(program) == names


@pytest.mark.parametrize("text", ["wandbb", "", "wandb,", "wandb trackio", "y", "none,wandb"])
def test_an_unknown_tracker_is_refused_with_the_known_names(program, text):
    message = program.refused(CPU, f"TRACKER={text}")

    assert "wandb" in message or "none stands alone" in message
    assert not program.config.exists()


def test_a_misspelled_tracker_is_refused_with_the_closest_match():
    with pytest.raises(ConfigError) as raised:
        parse_trackers("trackoi")

    assert raised.value.hint == "did you mean trackio?"


def test_by_default_there_is_no_tracker(program):
    program.check(CPU)

    assert trackers_in_config(program) == []


def test_the_command_line_overrides_the_configuration_either_way(program):
    program.check(CPU, "TRACKER=all")
    program.check("olddefconfig", "TRACKER=none")
    assert trackers_in_config(program) == []

    program.check("olddefconfig", "TRACKER=tensorboard")
    assert trackers_in_config(program) == ["tensorboard"]


def test_a_tracker_can_be_enabled_by_its_symbol_but_not_in_two_ways(program):
    program.check(CPU, "TRACKER_WANDB=y")
    assert trackers_in_config(program) == ["wandb"]

    assert "is set twice" in program.refused(CPU, "TRACKER=wandb", "TRACKER_WANDB=n")


def test_the_environment_selects_no_tracker(program, monkeypatch):
    monkeypatch.setenv("TRACKER", "all")
    monkeypatch.setenv("PROJECT", "other")

    program.check(CPU)

    assert trackers_in_config(program) == []
    assert program.value("TRACKER_PROJECT") == '""'


def test_trackers_do_not_change_the_id_of_a_run(program):
    program.check(CPU)
    plain = program.check("test-matrix-dry-run")

    assert program.check("test-matrix-dry-run", "TRACKER=all", "TRACKER_PROJECT=mine").ids == plain.ids


@pytest.mark.parametrize("name", ["My", "a b", "a_b", "-a", "a-", "a" * 65, "registry-x", "ü", "a/b"])
def test_a_project_name_that_a_tracker_rejects_is_refused(program, name):
    assert "lower-case letters, digits and hyphens" in program.refused(CPU, f"TRACKER_PROJECT={name}")


def test_run_json_has_the_trackers_and_their_project():
    assert tracking(config()) == Tracking()
    assert tracking(config("trackio", project="mine")) == Tracking(trackers=("trackio",), project="mine", limit_s=60)
    assert tracking(config("wandb")).project == own_project()
    assert re.fullmatch("gpt2-[0-9a-f]{5}", own_project())


def test_a_matrix_prints_its_trackers_once(monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    both = Tracking(trackers=("wandb", "trackio"), project="mine", limit_s=60)

    assert announced(RunFile()) == ""
    assert announced(RunFile(tracking=both)) == "trackers: W&B (offline: no API key), Trackio; project mine"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    line = announced(RunFile(tracking=both, symbols={"WANDB_ENTITY": "team"}))
    assert line.startswith("trackers: W&B (online as team: API key in WANDB_API_KEY)")


@pytest.mark.process
def test_the_doctor_lists_the_installed_trackers_and_never_shows_a_key(program, monkeypatch):
    answer_for_pytorch(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    out = program.check("doctor").out
    assert re.search(r"^OK +W&B +wandb [\d.]+; online: API key in WANDB_API_KEY$", out, re.MULTILINE)
    assert "k" * 8 not in out

    monkeypatch.setattr(available, "_installed", lambda package: package != "trackio")
    assert "needs `make setup-trackers`" in program.check("doctor").out
    program.check(CPU, "TRACKER=trackio")
    result = program("doctor")
    assert result.status == 1
    assert re.search(r"^broken +Trackio .*\n +hint: run `make setup-trackers`$", result.out, re.MULTILINE)


def test_a_key_on_the_command_line_is_refused_by_every_command_and_not_printed(program):
    for target in (CPU, "test-matrix", "status", "train"):
        message = program.refused(target, "WANDB_API_KEY=correct-horse")
        assert "export WANDB_API_KEY" in message
        assert "correct-horse" not in message


def test_a_missing_tracker_package_is_refused_with_the_installation_command(monkeypatch):
    monkeypatch.setattr(available, "_installed", lambda package: package != "trackio")

    assert missing(["wandb", "trackio"]) == ["trackio"]
    with pytest.raises(LaunchError, match="trackio") as raised:
        need_trackers(["wandb", "trackio"])

    assert "make setup-trackers" in raised.value.hint
    need_trackers(["wandb"])
    need_trackers([])


def test_a_directory_of_results_named_like_a_package_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "surely_no_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    assert not available._installed("surely_no_package")
    assert available._installed("json")


def test_wandb_is_online_with_a_key_and_offline_without_one_or_on_request(tmp_path):
    home = {"HOME": str(tmp_path)}
    key = {**home, "WANDB_API_KEY": "x" * 40}

    assert not login({}, home).online
    assert login({}, key).online
    assert "WANDB_API_KEY" in login({}, key).why
    assert "x" * 8 not in login({}, key).why
    assert not login({}, {**key, "WANDB_MODE": "offline"}).online
    assert not login({"WANDB_OFFLINE": "y"}, key).online


def test_a_key_in_the_file_of_wandb_login_is_found(tmp_path):
    home = {"HOME": str(tmp_path)}
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")

    assert login({"WANDB_ENTITY": "team"}, home).online
    assert login({"WANDB_ENTITY": "team"}, home).entity == "team"
    assert not login({}, {**home, "WANDB_BASE_URL": "https://wandb.example.com"}).online


def test_a_self_hosted_server_is_found_in_the_settings_of_wandb(tmp_path):
    home = {"HOME": str(tmp_path)}
    folder = tmp_path / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.com\n")
    (tmp_path / ".netrc").write_text("machine wandb.example.com\n  login user\n  password secret\n")
    assert login({}, home).online

    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.com\nmode = offline\n")
    assert login({}, home).why == "WANDB_MODE=offline in W&B's settings file"

    for damaged in ("[default", "no section", "[default]\n%(x\n"):
        (folder / "settings").write_text(damaged)
        assert not login({}, home).online


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("netrc", "settings"),
    [
        ("", ""),
        ("api.wandb.ai", ""),
        ("wandb.example.com", ""),
        ("wandb.example.com", "[default]\nbase_url = https://wandb.example.com\n"),
        ("api.wandb.ai", "[default]\nbase_url = https://wandb.example.com\n"),
    ],
)
def test_wandb_finds_a_key_in_the_same_places(tmp_path, netrc, settings):
    pytest.importorskip("wandb", reason="make setup-trackers installs it")
    (tmp_path / ".config" / "wandb").mkdir(parents=True)
    (tmp_path / ".config" / "wandb" / "settings").write_text(settings)
    (tmp_path / ".netrc").write_text(f"machine {netrc}\n  login user\n  password {'k' * 40}\n" if netrc else "")
    (tmp_path / ".netrc").chmod(0o600)
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    environment = {**environ, "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    code = "import wandb; print('found', wandb.login(prompt=False, verify=False))"

    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert f"found {login({}, environment).online}" in completed.stdout
