"""The ranks of an attempt: their variables, exits and ends. Their trainer is a program of a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from factories import make_data, make_run
from kmatrix.engines.ranks import Trainer, end_with
from kmatrix.locks import is_held
from waiting import wait_until

SUPERVISOR = """
import json, os, signal, sys, time
from pathlib import Path
from kmatrix.engines import ranks
from kmatrix.locks import try_lock
from kmatrix.records.attempts import Attempt

ranks.adopt_orphans()
run, code, words = Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:])
with ranks.reserve_port() as port:
    attempt = Attempt(number=3, resume="auto", micro_batch=2, port=port.getsockname()[1])
    trainer = ranks.Trainer(code=code, ranks=2, command=(sys.executable, *words))
    one = ranks.Ranks(run, attempt, trainer, trainer.environment((), os.environ), lock=try_lock(run / ".lock"))
    signal.signal(signal.SIGTERM, lambda *_: one.stop(2.0))
    while not one.poll():
        time.sleep(0.02)
print(json.dumps([(exit.rank, exit.code) for exit in one.exits]))
"""
TRAINER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

run, rank = Path(sys.argv[1]), os.environ["RANK"]

def wait():
    (run / f"ready.{rank}").write_text(str(os.getpid()))
    time.sleep(1000)

def save(*_):
    print("saved by", rank, flush=True)
    os._exit(130)

exec((run / f"do.{rank}").read_text())
"""
ROOT = Path(__file__).resolve().parents[2]


def start(run: Path, *does: str) -> subprocess.Popen[str]:
    """Start a supervisor whose rank K does the K-th; return when ranks that wait are ready."""
    (run / "trainer.py").write_text(TRAINER)
    for rank, text in enumerate(does):
        (run / f"do.{rank}").write_text(text)
    one = supervise(run, run, str(run / "trainer.py"))
    wait_until(lambda: all(pids(run, rank) for rank, text in enumerate(does) if text.endswith("wait()")))
    return one


def supervise(run: Path, code: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, str(run), str(code), *words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def exits(one: subprocess.Popen[str]) -> list[list[int]]:
    """Return rank and code of each exit, in their order."""
    return json.loads(one.communicate(timeout=100)[0])  # type: ignore[no-any-return]


def pids(run: Path, *names: object) -> list[int]:
    return [int((run / f"ready.{name}").read_text() or 0) for name in names if (run / f"ready.{name}").exists()]


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.process
def test_ranks_get_what_torch_reads_and_the_words_of_their_attempt(tmp_path):
    tell = "(run / f'told.{rank}').write_text(json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]))"
    assert sorted(exits(start(tmp_path, tell, tell))) == [[0, 0], [1, 0]]
    first, second = (json.loads((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1))
    assert first[:2] == [["--attempt", "3", "--resume", "auto", "--micro-batch", "2"], str(tmp_path)]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for rank, (*_, told) in enumerate((first, second)):
        expected = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": first[2]["MASTER_PORT"]}
        assert {name: told[name] for name in expected} == expected
        assert told["PYTHONPATH"].startswith(f"{tmp_path}:{tmp_path / 'lib'}:")


@pytest.mark.process
@pytest.mark.parametrize(
    ("second", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)], ids=["exits", "crashes"]
)
def test_the_first_bad_exit_is_the_cause_and_ends_the_others(tmp_path, second, code):
    assert exits(start(tmp_path, "wait()", second)) == [[1, code], [0, -9]]


@pytest.mark.process
def test_a_stop_lets_ranks_save_and_kills_those_that_do_not_end(tmp_path):
    one = start(tmp_path, "signal.signal(signal.SIGTERM, save); wait()", "signal.signal(15, signal.SIG_IGN); wait()")
    one.terminate()
    assert exits(one) == [[0, 130], [1, -9]]
    assert (tmp_path / "output.log").read_text() == "saved by 0\n"


@pytest.mark.process
def test_a_killed_supervisor_takes_its_ranks_with_it_and_the_run_is_locked_until_then(tmp_path):
    one = start(tmp_path, "wait()", "wait()")
    ranks = pids(tmp_path, 0, 1)
    assert all(str(tmp_path / ".lock") in [file.path for file in psutil.Process(rank).open_files()] for rank in ranks)
    psutil.Process(ranks[0]).suspend()  # it cannot act by itself
    one.kill()
    one.wait()
    wait_until(lambda: not any(map(lives, ranks)))
    assert not is_held(tmp_path / ".lock")
    late = partial(end_with, 0, signal.SIGKILL)  # its supervisor has died before the call
    assert subprocess.run([sys.executable, "-c", ""], preexec_fn=late, check=False).returncode == 128 + signal.SIGKILL


@pytest.mark.process
def test_a_rank_holds_the_lock_and_what_it_leaves_behind_is_killed(tmp_path):
    child = "[sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True, close_fds=False"
    leave = f"(run / 'ready.child').write_text(str(subprocess.Popen({child}).pid))"
    assert sorted(exits(start(tmp_path, leave, ""))) == [[0, 0], [1, 0]]
    assert [*map(lives, pids(tmp_path, "child")), is_held(tmp_path / ".lock")] == [False, False]


@pytest.mark.process
def test_the_trainer_trains_while_its_supervisor_holds_the_lock(tmp_path):
    data = {"data_path": str(tmp_path / "data"), "data_sha256": make_data(tmp_path / "data")}
    run = make_run(tmp_path, **data, num_gpus=2, global_batch=8).path
    first_attempt = "import sys; from gpt2.train import main; main(sys.argv[1:2])"
    assert sorted(exits(supervise(run, ROOT, "-c", first_attempt))) == [[0, 0], [1, 0]]
    assert json.loads((run / "result.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("trainer", "gpus", "given", "expected"),
    [
        ({}, ("GPU-1",), {}, {"CUDA_VISIBLE_DEVICES": "", "MKL_CBWR": "AUTO", "OMP_NUM_THREADS": "1"}),
        ({"threads": 4}, (), {"MKL_CBWR": "AVX2"}, {"MKL_CBWR": "AVX2", "OMP_NUM_THREADS": "4"}),
        ({"cuda": True}, ("GPU-1", "GPU-2"), {}, {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "MKL_CBWR": None}),
        ({"cuda": True}, (), {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"cuda": True}, (), {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MALLOC_TOP_PAD_": None}),
        ({"cuda": True}, (), {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}),
        ({"variables": {"NCCL_DEBUG": "INFO"}}, (), {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}),
        ({}, (), {"WANDB_API_KEY": "secret", "HF_TOKEN": "hub"}, {"WANDB_API_KEY": None, "HF_TOKEN": "hub"}),
        ({"grace_s": 100}, (), {"OMP_NUM_THREADS": "9"}, {"KMATRIX_GRACE_S": "100", "OMP_NUM_THREADS": "1"}),
    ],
)
def test_the_environment_of_ranks(trainer, gpus, given, expected):
    found = Trainer(code=Path("/code"), **trainer).environment(gpus, given)
    assert {name: found.get(name) for name in expected} == expected
