"""AMD GPUs from the files of the kernel to report and screen, on a directory like /sys/class/drm."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gputop_values import line_of
from kmatrix.gpu.amd import open_source
from kmatrix.gpu.devices import WIDTH
from kmatrix.gpu.formats.binary import COLUMNS
from kmatrix.records.files import read_json
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.gpu.text import energy_line
from recordings import ROOT, events_of, sample_count
from waiting import wait_until


class Drm:
    """A directory like /sys/class/drm."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def card(self, number: int, *, vendor: str = "0x1002", hwmon: dict[str, object] | None = None, **files) -> Path:
        """Add a card. files, hwmon: changes to a card that uses 1 GiB of 16 and 250 W of 300."""
        folder = self.root / f"card{number}" / "device"
        defaults = {
            "vendor": vendor,
            "unique_id": f"amd-{number}",
            "product_name": "AMD Instinct MI210",
            "gpu_busy_percent": 97,
            "mem_info_vram_used": 2**30,
            "mem_info_vram_total": 2**34,
        }
        sensors = {
            "power1_average": 250_000_000,
            "power1_cap": 300_000_000,
            "temp1_input": 61_000,
            "freq1_input": 1_700_000_000,
            "pwm1": 102,
        }
        for directory, texts in ((folder, defaults | files), (folder / "hwmon" / "hwmon3", sensors | (hwmon or {}))):
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                if text is not None:
                    (directory / name).write_text(f"{text}\n")
        return folder


@pytest.fixture
def drm(tmp_path):
    return Drm(tmp_path / "drm")


def program(drm, module, *arguments):
    """Return a command that runs one of our modules on this directory, without an NVIDIA driver."""
    code = f"import sys, pathlib, kmatrix.gpu.amd as amd; amd.DRM = pathlib.Path({str(drm.root)!r}); "
    code += f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}", "COLUMNS": "160"}


def read(source):
    values = [0.0] * (WIDTH * len(source.devices))
    source.read(values)
    return [dict(zip(COLUMNS, values[start : start + WIDTH], strict=True)) for start in range(0, len(values), WIDTH)]


def test_a_card_is_read_in_our_units(drm):
    drm.card(0)
    source = open_source((), drm.root)
    (values,) = read(source)
    assert values.pop("power_instant") != values["power"]
    assert math.isnan(values.pop("energy_j"))
    assert values == {"utilization": 97, "memory_used": 1024, "power": 250, "temperature": 61, "sm_clock": 1700}
    assert source.limits(0).power_limit == 300
    assert source.extra_metrics(0).fan == 40
    assert (source.devices[0].gpu_name, source.devices[0].memory_total) == ("AMD Instinct MI210", 16384)
    assert source.energy_source == "power"


def test_a_newer_card_that_reports_only_current_power_is_read(drm):
    drm.card(0, hwmon={"power1_average": None, "power1_input": 180_000_000, "pwm1": None}, product_name=None)
    source = open_source((), drm.root)
    (values,) = read(source)
    assert (values["power"], values["power_instant"]) == (180, 180)
    assert source.extra_metrics(0).fan is None
    assert source.devices[0].gpu_name == "AMD GPU"


def test_cards_are_numbered_as_by_the_kernel_and_other_vendors_are_ignored(drm):
    for number in (10, 2, 0):
        drm.card(number)
    drm.card(1, vendor="0x10de")
    (drm.root / "card0-DP-1").mkdir()
    source = open_source((), drm.root)
    assert [device.uuid for device in source.devices] == ["amd-0", "amd-2", "amd-10"]
    chosen = open_source(["amd-10", "amd-0", "amd-7"], drm.root)
    assert [(device.uuid, device.gpu_index, device.rank) for device in chosen.devices] == [
        ("amd-10", 2, 0),
        ("amd-0", 0, 1),
    ]
    assert open_source(["amd-7"], drm.root) is None
    assert open_source((), drm.root / "none") is None


def test_a_value_that_a_card_does_not_report_is_unknown(drm):
    drm.card(0, gpu_busy_percent="", mem_info_vram_used=None, hwmon={"temp1_input": "no number"})
    (values,) = read(open_source((), drm.root))
    assert all(math.isnan(values[name]) for name in ("utilization", "memory_used", "temperature"))


def test_two_cards_are_recorded_reported_and_shown(drm, run_dir):
    folder = drm.card(0)
    drm.card(1, mem_info_vram_used=2 * 2**30, gpu_busy_percent=50)
    recorder = subprocess.Popen(
        program(drm, "kmatrix.gpu.recorder.__main__", run_dir.path, "--device", "amd", "--hz", "20"),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: sample_count(run_dir) > 25, "25 samples", 60)
        shutil.move(folder, folder.with_name("gone"))
        wait_until(lambda: events_of(run_dir, "lost"), "the removed card is lost", 60)
        shutil.move(folder.with_name("gone"), folder)
        wait_until(lambda: events_of(run_dir, "found"), "it is found again", 60)
    finally:
        recorder.send_signal(signal.SIGTERM)
        _, errors = recorder.communicate(timeout=60)
    assert (recorder.returncode, errors) == (0, "")
    summary = read_json(run_dir.gpu_summary)
    assert (summary["device_type"], summary["energy_source"], summary["simulated"]) == ("amd", "power", False)
    assert [gpu["memory_used"]["mean"] for gpu in summary["gpus"]] == [1024, 2048]
    assert summary["gpus"][1]["joules"] == pytest.approx(250 * (summary["ended"] - summary["started"]), rel=0.1)
    gpu = read_gpu(run_dir, TrainingTotals())
    assert gpu.unit == "GPU"
    assert gpu.balance("memory_used").quality == "Poor"
    assert "integrated power, board only" in energy_line(gpu)


def test_gputop_shows_amd_cards_without_an_nvidia_driver(drm):
    drm.card(0)
    drm.card(1, gpu_busy_percent=50)
    once = subprocess.check_output(program(drm, "kmatrix.gputop.command", "--once"), env=environment(), text=True)
    assert "2 GPUs AMD Instinct MI210" in once
    assert ["97%" in line_of(once, 0), "50%" in line_of(once, 1)] == [True, True]
    assert "250/300" in line_of(once, 0)
    output = subprocess.check_output(program(drm, "kmatrix.gputop.command", "--json"), env=environment(), text=True)
    assert [gpu["utilization"] for gpu in json.loads(output)["multi_gpu_data"]] == [97, 50]
