"""Use gputop in a terminal, in a pipe, during a run and after it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from contextlib import contextmanager

import pytest

from gpu_stage import background_process, on_gpus, scenario
from story import load_json
from tmux_screen import Tmux
from waiting import wait_until

pytestmark = pytest.mark.nightly


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


@pytest.mark.parametrize(("count", "size"), [(0, (80, 24)), (12, (80, 24))])
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


def test_recordings_are_drawn_and_compared_as_the_original_project_does(clone, tmp_path):
    """--stats, --gen-graph and --compare are its options; its own files are in tests/report/gpu."""
    for name, watts in (("first", 100), ("second", 150)):
        scenario_path = scenario(tmp_path, "gpus 2", f"0 * power {watts}", name=name)
        words = ("scripts/gputop.py", "--stats", str(tmp_path / f"{name}.json"), "--seconds", "2", "--interval", "0.1")
        completed = clone.run(*on_gpus(clone, scenario_path, clone.python, *words))
        assert completed.returncode == 0, completed.stderr
    script, files = (
        str(clone.root / "scripts" / "gputop.py"),
        [str(tmp_path / f"{n}.json") for n in ("first", "second")],
    )
    drawn = clone.run("env", "-C", str(tmp_path), clone.python, script, "--gen-graph", files[0])
    assert drawn.returncode == 0, drawn.stderr
    assert "power, W" in (tmp_path / "first_summary.txt").read_text()
    compared = clone.run("env", "-C", str(tmp_path), clone.python, script, "--compare", *files)
    assert compared.returncode == 0, compared.stderr
    powers = [line.split()[-3:] for line in compared.stdout.splitlines() if line.startswith("power, W")]
    assert powers == [["100.00"] * 3, ["150.00"] * 3]
    for name in ("first_plot.png", "gpu_comparison_plot.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    refused = clone.run(clone.python, script, "--compare", files[0], str(tmp_path / "missing.json"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")


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


# -- processes


@contextmanager
def workers(count):
    """Start processes that do nothing; they stand for those on the GPUs."""
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_processes_are_listed_and_the_help_covers_them(clone, terminal, tmp_path):
    with workers(2) as (first, second):
        lines = (f"0 0 process {first.pid} 300", f"0 1 process {second.pid} 17000", "0 1 process 4194000 20")
        scenario_path = scenario(tmp_path, "gpus 2", *lines)
        tmux = terminal((150, 40), *on_gpus(clone, scenario_path, clone.python, "scripts/gputop.py"))
        wait_until(lambda: "3 processes" in tmux.screen() and "sleep 3600" in tmux.screen(), "they are listed")
        assert "not visible from here" in tmux.screen(), "a process of another container"
        tmux("send-keys", "?")
        wait_until(lambda: "next metric of the charts" in tmux.screen(), "the help is shown")
        tmux("send-keys", "x")
        wait_until(lambda: "3 processes" in tmux.screen(), "any key closes it")
        tmux("send-keys", "q")
        wait_until(lambda: "status=0" in tmux.screen(), "it ends")


@pytest.mark.parametrize("ending", ["q", "HUP"])
def test_the_terminal_is_as_before_after_every_ending(clone, terminal, tmp_path, ending):
    scenario_path = scenario(tmp_path, "gpus 2", "0 * util 95")
    command = shlex.join(on_gpus(clone, scenario_path, clone.python, "scripts/gputop.py"))
    script, before, after, number = (tmp_path / name for name in ("session.sh", "before", "after", "pid"))
    script.write_text(
        f"trap : INT QUIT\necho what was here before\nstty -a > {before}\n"
        f"sh -c 'echo $$ > {number}; exec {command}'\n"  # kmatrix.simulate replaces itself by gputop: one process
        f"stty -a > {after}\n"
    )
    tmux = terminal((120, 30), "sh", str(script))
    wait_until(lambda: is_drawn(tmux.screen(), 2, "95%"), "it is drawn")
    assert "what was here before" not in tmux.screen()
    if ending in ("q", "C-c"):
        tmux("send-keys", ending)
    else:
        os.kill(int(number.read_text()), getattr(signal, f"SIG{ending}"))
    wait_until(lambda: after.exists() and after.read_text(), "it ends")
    assert after.read_text() == before.read_text(), "echo and line mode are restored"
    screen = tmux.screen()
    assert "what was here before" in screen, "the screen of before is back"
    assert "balance" not in screen
    assert tmux("display-message", "-p", "#{cursor_flag} #{alternate_on}").split() == ["1", "0"]
