"""Use gputop in a terminal, in a pipe, during a run and after it."""

from __future__ import annotations

import json
import re

import pytest

from gpu_stage import background_process, load_json, on_gpus, read_independently, scenario
from tmux_screen import Tmux
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

ONE_LINE = "import scripts.gputop; m=scripts.gputop.GPUMonitor(); m.initialize(); print(f'GPUs: {m.gpu_count}')"


@pytest.fixture
def terminal(clone, tmp_path):
    """Run a command of the clone in a terminal of this size."""
    opened = []

    def start(size, *command):
        opened.append(Tmux(tmp_path, size, {}, "env", "-C", str(clone.root), *command))
        return opened[-1]

    yield start
    for tmux in opened:
        tmux("kill-server")


def row(screen: str, gpu: int) -> str:
    return next((line for line in screen.splitlines() if re.match(rf"{gpu}\s", line)), "")


def is_drawn(screen: str, gpus: int, value: str) -> bool:
    """Return whether the title, a row with this value for each GPU, and the totals are on the screen."""
    rows = [row(screen, gpu) for gpu in range(gpus)]
    return "SIMULATED" in screen and "balance" in screen and all(value in one for one in rows)


@pytest.mark.parametrize(("count", "size"), [(0, (80, 24)), (4, (20, 24)), (12, (80, 24)), (12, (200, 60))])
def test_the_full_screen_is_drawn_in_a_terminal(clone, terminal, tmp_path, size, count):
    scenario_path = scenario(tmp_path, f"gpus {count}", "0 * util 95" if count else "")
    tmux = terminal(size, *on_gpus(clone, scenario_path, clone.python, "scripts/gputop.py"))
    if not count:
        wait_until(lambda: "status=0" in tmux.screen(), "it ends")
        assert "no GPU" in tmux.screen()
        return
    # A terminal that is looked at while it is drawn has the first lines only.
    wait_until(lambda: is_drawn(tmux.screen(), count, "95%"), "all of it is on the screen")
    tmux("send-keys", "l")
    wait_until(lambda: "GPU 0 util" in tmux.screen(), "one metric is drawn large")
    tmux("send-keys", "q")
    wait_until(lambda: "status=0" in tmux.screen(), "it ends")
    assert "balance" not in tmux.screen()


def test_make_gputop_shows_simulated_gpus_and_a_key_ends_it(terminal):
    tmux = terminal((120, 30), "make", "--no-print-directory", "gputop", "SIMULATE=8")
    wait_until(lambda: "SIMULATED" in tmux.screen() and row(tmux.screen(), 7), "eight GPUs are on the screen")
    tmux("send-keys", "q")
    wait_until(lambda: "status=0" in tmux.screen(), "it ends")


@pytest.mark.parametrize("count", [1, 4])
def test_statistics_are_written_in_both_layouts(clone, tmp_path, count):
    scenario_path = scenario(tmp_path, f"gpus {count}", "0 * power 120")
    single = tmp_path / "gpu_monitoring.json"
    arguments = ("scripts/gputop.py", "--stats-file", str(single), "--seconds", "2.5")
    completed = clone.run(*on_gpus(clone, scenario_path, clone.python, *arguments))
    assert completed.returncode == 0, completed.stderr
    found = read_independently(single, tmp_path / "gpu_monitoring_multi_gpu.json")
    assert found["gpus"] == count
    assert found["power"] == [120] * count


def test_one_line_of_python_returns_the_number_of_gpus(clone, tmp_path):
    for count in (0, 4, 12):
        completed = clone.run(*on_gpus(clone, scenario(tmp_path, f"gpus {count}"), clone.python, "-c", ONE_LINE))
        assert completed.stdout == f"GPUs: {count}\n", completed.stderr


@pytest.mark.parametrize("count", [0, 4, 12])
def test_once_prints_a_table_and_json_prints_one_snapshot(clone, tmp_path, count):
    scenario_path = scenario(tmp_path, f"gpus {count}", "0 * util 77" if count else "")
    once = clone.run(*on_gpus(clone, scenario_path, clone.python, "scripts/gputop.py", "--once"))
    assert once.returncode == 0, once.stderr
    assert "\x1b" not in once.stdout
    assert sum("77%" in row(once.stdout, gpu) for gpu in range(count)) == count
    result = clone.run(*on_gpus(clone, scenario_path, clone.python, "scripts/gputop.py", "--json"))
    assert result.returncode == 0, result.stderr
    entry = json.loads(result.stdout)
    assert [gpu["utilization"] for gpu in entry["multi_gpu_data"]] == [77] * count
    assert entry["aggregate_stats"]["gpu_count"] == count


def test_a_recorder_is_followed_and_its_recording_replayed(clone, terminal, tmp_path):
    """With a recorder, gputop reads its file instead of the driver; afterwards it replays the recording."""
    run = tmp_path / "gpt2_adamw_4gpu"
    run.mkdir()
    scenario_path = scenario(tmp_path, "gpus 4", "0 * util 91")
    recorder = on_gpus(clone, scenario_path, clone.python, "-m", "kmatrix.gpu.recorder", str(run), "--hz", "20")
    with background_process(clone, *recorder) as recording:
        wait_until((run / "gpu_stats_gpt2_adamw_4gpu.json").exists, "a second is recorded")
        tmux = terminal((120, 30), clone.python, "scripts/gputop.py", "--run", str(run))
        wait_until(lambda: "attached" in tmux.screen() and "91%" in row(tmux.screen(), 3), "it is followed")
        wait_until(lambda: len(load_json(run / "gpu_stats_gpt2_adamw_4gpu.json")) > 3, "three seconds are recorded")
        recording.terminate()
        assert recording.wait(timeout=60) == 0
    wait_until(lambda: "recording ended" in tmux.screen(), "the end is shown")
    tmux("send-keys", "q")
    wait_until(lambda: "status=0" in tmux.screen(), "it ends")
    assert load_json(run / "gpu_summary.json")["final"] is True
    for position in ("0", "-0.5"):
        replay = clone.run(clone.python, "scripts/gputop.py", "--replay", str(run), "--at", position, "--once")
        assert replay.returncode == 0, replay.stderr
        assert "SIMULATED" in replay.stdout
        assert all("91%" in row(replay.stdout, gpu) for gpu in range(4))
    refused = clone.run(clone.python, "scripts/gputop.py", "--replay", str(tmp_path), "--once")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
