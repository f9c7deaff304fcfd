"""Expensive metrics of a recording, and the processes of a run that is followed on its machine."""

import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kmatrix.simulate.library as simulate
from gputop_values import SCRIPT, T0, Recorder
from kmatrix.gpu.formats.json_array import JsonArrayFile, entry_until
from kmatrix.gpu.formats.samples import GpuSample, Snapshot, multi
from kmatrix.gputop.feeds import ReplayFeed
from kmatrix.gputop.view import History
from recordings import sample_count, stop_recorder
from waiting import wait_until


def write_extras(recorder, seconds, *, started=T0, uuid="GPU-1"):
    """Write the expensive metrics of GPU 1 once per second, as the recorder does: tensor_active is the second."""
    array = JsonArrayFile(recorder.run.gpu_stats_multi)
    for second in range(seconds):
        extra = (("tensor_active", float(second)), ("xid", 0))
        gpu = GpuSample(gpu_index=1, gpu_name="NVIDIA A10G", uuid=uuid, extra=extra)
        array.append(multi(Snapshot(time=started + second, samples=(gpu,))))
    array.close()


def extras_of(sample):
    return [dict(gpu.extra) for gpu in sample.snapshot.samples]


def paused(path, second):
    feed = ReplayFeed(path, at=second)
    feed.press("space")
    return feed


# ---- expensive metrics -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(['{"at": %d}', '{"at": %d, "long": "' + "x" * 300 + '"}', "{broken", ""]), max_size=30
    ),
    until=st.integers(-2, 32),
)
def test_the_last_entry_until_a_time_is_found_by_halves(tmp_path_factory, lines, until):
    path = tmp_path_factory.mktemp("array") / "a.json"
    known = [line % at if "%d" in line else line for at, line in enumerate(lines)]
    path.write_text("[\n" + ",\n".join(known) + "\n]\n")
    expected = [at for at, line in enumerate(lines) if "%d" in line and at <= until]
    found = entry_until(path, lambda entry: entry["at"], until)
    assert (found or {}).get("at") == (expected[-1] if expected else None)


@pytest.mark.parametrize(("second", "tensor"), [(0, 0.0), (30.4, 30.0), (30.5, 30.0), (95, None)])
def test_a_replay_has_the_expensive_metrics_of_its_position(tmp_path, second, tensor):
    recorder = Recorder(tmp_path / "run")
    recorder.write(200)
    write_extras(recorder, 60)
    known = {} if tensor is None else {"tensor_active": tensor, "xid": 0.0}
    assert extras_of(paused(tmp_path / "run", second).poll(History())) == [{}, known]


def test_metrics_of_another_gpu_and_damaged_ones_are_left_out(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.write(20)
    write_extras(recorder, 10, uuid="GPU-of-another-machine")
    assert extras_of(paused(tmp_path / "run", 5).poll(History())) == [{}, {}]
    recorder.run.gpu_stats_multi.write_text('[\n{"timestamp": 3, "multi_gpu_data": 5}\n{"multi_gpu_data": [3]}\n]\n')
    assert extras_of(paused(tmp_path / "run", 5).poll(History())) == [{}, {}]


# ---- processes ---------------------------------------------------------------------------------------------------


def gputop(*arguments, environment=None):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    known = {**os.environ, **(environment or {})}
    return subprocess.run(command, check=True, env=known, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def devices(run, environment):
    return json.loads(gputop("--run", run, "--json", environment=environment))["multi_gpu_data"]


@pytest.mark.process
def test_a_run_on_this_machine_has_its_processes_and_a_replay_says_that_it_has_none(
    start_recorder, run_dir, library, tmp_path
):
    pid = os.getpid()
    lines = f"0 * smact 91\n0 * tensor 55\n0 1 process {pid} 9216\n"
    epoch = time.time()
    recorder = start_recorder("--hz", 20, lines=lines, gpus=2, epoch=epoch)
    wait_until(lambda: sample_count(run_dir))
    on_it = simulate.environment(library, tmp_path / "scenario.scn", 2, epoch)
    # The recorder reads some metrics less often than others.
    first, second = wait_until(lambda: "tensor_active" in (found := devices(run_dir.path, on_it))[1] and found)
    assert first["processes"] == []
    assert [(one["pid"], one["gpu_memory"]) for one in second["processes"]] == [(pid, 9216)]
    assert second["tensor_active"] == 55
    elsewhere = gputop("--run", run_dir.path, "--once", environment={"COLUMNS": "160"})
    assert "processes: only from the NVIDIA driver on the machine of these GPUs" in elsewhere
    stop_recorder(recorder)
    replay = gputop("--replay", run_dir.path, "--once", environment={"COLUMNS": "160"})
    assert "processes: not in a recording" in replay
    assert "tensor" in replay
    assert "55%" in replay
