"""The ranks of an attempt: their variables, exits and ends. Their trainer is a program of a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from factories import make_data, make_run
from kmatrix.engines.ranks import Trainer
from kmatrix.records.attempts import is_held
from waiting import wait_until

SUPERVISOR = """
import json, os, signal, sys, time
from pathlib import Path
from kmatrix.engines import ranks
from kmatrix.records.attempts import Attempt, try_lock

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

def ready():
    (run / f"ready.{rank}").write_text(str(os.getpid()))

def wait(ready=ready):
    ready()
    time.sleep(1000)

def save(*_):
    print("saved by", rank, flush=True)
    os._exit(130)

exec((run / f"do.{rank}").read_text())
"""
ROOT = Path(__file__).resolve().parents[2]


def start(run: Path, *does: str) -> subprocess.Popen[str]:
    """Start a supervisor whose rank K does the K-th."""
    (run / "trainer.py").write_text(TRAINER)
    for rank, text in enumerate(does):
        (run / f"do.{rank}").write_text(text)
    return supervise(run, run, str(run / "trainer.py"))


def supervise(run: Path, code: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, str(run), str(code), *words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def exits(one: subprocess.Popen[str]) -> list[list[int]]:
    """Return rank and code of each exit, in their order."""
    out, _ = one.communicate(timeout=100)
    return json.loads(out)  # type: ignore[no-any-return]


def are_ready(run: Path) -> bool:
    return all((run / f"ready.{rank}").exists() and (run / f"ready.{rank}").read_text() for rank in (0, 1))


def pid(run: Path, rank: int | str) -> int:
    return int((run / f"ready.{rank}").read_text())


def lives(number: int) -> bool:
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


@pytest.mark.process
def test_ranks_get_what_torch_reads_and_the_words_of_their_attempt(tmp_path):
    tell = "(run / f'told.{rank}').write_text(json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]))"
    assert sorted(exits(start(tmp_path, tell, tell))) == [[0, 0], [1, 0]]
    ports = set()
    for rank in (0, 1):
        words, folder, told = json.loads((tmp_path / f"told.{rank}").read_text())
        assert words == ["--attempt", "3", "--resume", "auto", "--micro-batch", "2"]
        assert folder == str(tmp_path), "`-m` looks there before PYTHONPATH"
        assert told["PYTHONPATH"].startswith(f"{tmp_path}:{tmp_path / 'lib'}:")
        assert (told["RANK"], told["LOCAL_RANK"], told["GROUP_RANK"]) == (str(rank), str(rank), "0")
        assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        ports.add(told["MASTER_PORT"])
    assert (len(ports), is_held(tmp_path / ".lock")) == (1, False)


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("wait()", "sys.exit(7)", [[1, 7], [0, -9]]),  # the others get some seconds
        ("wait()", "os.kill(os.getpid(), signal.SIGSEGV)", [[1, -11], [0, -9]]),
    ],
)
def test_the_first_bad_exit_is_the_cause_and_ends_the_others(tmp_path, first, second, expected):
    assert exits(start(tmp_path, first, second)) == expected


@pytest.mark.process
def test_a_stop_lets_ranks_save_and_kills_those_that_do_not_end(tmp_path):
    one = start(tmp_path, "signal.signal(signal.SIGTERM, save); wait()", "signal.signal(15, signal.SIG_IGN); wait()")
    wait_until(lambda: are_ready(tmp_path))
    one.terminate()
    assert exits(one) == [[0, 130], [1, -9]]
    assert (tmp_path / "output.log").read_text() == "saved by 0\n"


@pytest.mark.process
def test_a_killed_supervisor_takes_its_ranks_with_it_and_the_run_is_locked_until_then(tmp_path):
    one = start(tmp_path, "wait()", "wait()")
    wait_until(lambda: are_ready(tmp_path))
    assert is_held(tmp_path / ".lock")
    ranks = [psutil.Process(pid(tmp_path, rank)) for rank in (0, 1)]
    ranks[0].suspend()  # it cannot act by itself
    one.send_signal(signal.SIGKILL)
    one.wait()
    wait_until(lambda: not any(lives(rank.pid) for rank in ranks))
    assert not is_held(tmp_path / ".lock")


@pytest.mark.process
def test_a_rank_holds_the_lock_and_what_it_leaves_behind_is_killed(tmp_path):
    child = "[sys.executable, '-c', 'import time; time.sleep(1000)']"
    leave = f"one = subprocess.Popen({child}, start_new_session=True, close_fds=False); "
    leave += "(run / 'ready.child').write_text(str(one.pid))"
    one = start(tmp_path, leave, "")
    assert sorted(exits(one)) == [[0, 0], [1, 0]]
    assert (lives(pid(tmp_path, "child")), is_held(tmp_path / ".lock")) == (False, False)


@pytest.mark.process
def test_the_trainer_trains_while_its_supervisor_holds_the_lock(tmp_path):
    sha256 = make_data(tmp_path / "data")
    run = make_run(tmp_path, data_path=str(tmp_path / "data"), data_sha256=sha256, num_gpus=2, global_batch=8).path
    assert exits(supervise(run, ROOT, "-c", "import sys; from gpt2.train import main; main(sys.argv[1:2])")) == [
        [0, 0],
        [1, 0],
    ]
    assert json.loads((run / "result.json").read_text())["status"] == "finished"


GIVEN = {"HOME": "/h", "WANDB_API_KEY": "secret", "HF_TOKEN": "hub"}


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
        ({}, (), GIVEN, {"HOME": "/h", "WANDB_API_KEY": None, "HF_TOKEN": "hub"}),  # a key may not reach a log
        ({"grace_s": 100}, (), {"OMP_NUM_THREADS": "9"}, {"KMATRIX_GRACE_S": "100", "OMP_NUM_THREADS": "1"}),
    ],
)
def test_the_environment_of_ranks(trainer, gpus, given, expected):
    found = Trainer(code=Path("/code"), **trainer).environment(gpus, given)
    assert {name: found.get(name) for name in expected} == expected
