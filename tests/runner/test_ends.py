"""Why an attempt ended, from its files, the exits of its ranks and what stopped it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kmatrix.records.attempts import Attempt, Exit
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.runner.ends import Evidence, describe_exit, end_of

DIED = (Exit(rank=1, code=1), Exit(rank=0, code=-9))  # the others are killed after the first
RANK = {"attempt": 2, "time": 5.0}


def ended(
    run: Path,
    *exits: Exit,
    stop: str = "",
    result: dict[str, Any] | None = None,
    log: str = "",
    ranks: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> tuple[str, str]:
    """Return kind and reason of attempt 2, which began at 4 s."""
    attempt = Attempt(number=2, gpus=("GPU-a", "GPU-b"), stop=stop, started=4.0)
    if result:
        write_json(run / "result.json", {"run_id": "id", "attempt": 2, **result})
    (run / "output.log").write_text(f"of attempt 1: NCCL error\n{log}", encoding="utf-8")
    for rank in ranks:
        write_json(run / f"ranks/{rank['rank']}/state.json", {**RANK, **rank})
    end = end_of(Evidence(run=run, attempt=attempt, exits=exits or DIED, log_start=25, **more))
    return end.kind, end.reason


AT_7 = {"result": {"status": "stopped", "step": 7}, "saved": 7}
CASES: list[tuple[str, dict[str, Any], str, str]] = [  # what, evidence -> kind, reason
    ("finished", {"result": {"status": "finished"}}, "finished", ""),
    ("nan", {"result": {"status": "failed", "kind": "nan", "reason": "loss is nan"}}, "nan", "loss is nan"),
    ("result of the attempt before", {"result": {"status": "stopped", "attempt": 1}}, "died", "rank 1 ended with exit"),
    ("make stop", {**AT_7, "stop": "stopped: asked by user"}, "stopped", "asked by user, saved step 7"),
    ("time limit", {**AT_7, "stop": "time limit: SIGUSR1"}, "time limit", "SIGUSR1, saved step 7"),
    (
        "a disk without room for a checkpoint",
        {**AT_7, "stop": "stopped: x", "saved": 5},
        "stopped",
        "x, step 7 was not saved (newest checkpoint: step 5)",
    ),
    ("too slow to save", {"stop": "signal: SIGTERM"}, "signal", "SIGTERM, it ended before it could save"),
    ("its own failure during a stop", {"stop": "stopped: x", "result": {"status": "failed", "kind": "nan"}}, "nan", ""),
    (
        "an error that a stop caused",
        {"stop": "stopped: x", "result": {"status": "failed", "kind": "error", "step": 3}},
        "stopped",
        "x, it ended before it could save",
    ),
    ("somebody else stopped its ranks", AT_7, "preempted", "saved step 7"),
    ("a damaged result", {"result": {"status": 5}}, "mismatch", "result.json is damaged"),
    ("a node is silent", {"trouble": ("node lost", "n4 has not answered")}, "node lost", "n4 has not answered"),
    ("a rank says why", {"ranks": ({"rank": 1, "kind": "data", "reason": "no shard"},)}, "data", "rank 1: no shard"),
    (
        "the last exception of the log",
        {"log": "Traceback\nValueError: heads do not divide the width\n"},
        "died",
        "rank 1 ended with exit code 1: ValueError: heads do not divide the width",
    ),
    (
        "the first rank failed, the others lost their connections",
        {
            "ranks": (
                {"rank": 0, "time": 4.5, "kind": "error", "reason": "NCCL error, remote process exited"},
                {"rank": 1, "kind": "error", "reason": "ValueError: why"},
            )
        },
        "error",
        "rank 1: ValueError: why",
    ),
    (
        "the peer of rank 0 failed",
        {
            "result": {"status": "failed", "kind": "error", "reason": "Connection closed by peer"},
            "ranks": ({"rank": 1, "time": 4.5, "kind": "oom", "reason": "CUDA out of memory"},),
            "stop": "stopped: x",
        },
        "oom",
        "rank 1: CUDA out of memory",
    ),
    ("nccl", {"result": {"status": "failed", "kind": "error", "reason": "ncclSystemError"}}, "nccl", "ncclSystemError"),
    ("a bug", {"log": "CUDA error: device-side assert triggered\n"}, "died", "rank 1 ended with exit code 1"),
]


@pytest.mark.parametrize(("evidence", "kind", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_why_an_attempt_ended(tmp_path: Path, evidence: dict[str, Any], kind: str, reason: str) -> None:
    found = ended(tmp_path, **evidence)
    assert found[0] == kind
    assert reason in found[1]


def test_a_rank_that_a_signal_from_outside_killed_is_the_cause(tmp_path: Path) -> None:
    peer = {"rank": 0, "kind": "error", "reason": "Connection reset by peer"}
    found = ended(tmp_path, Exit(rank=1, code=-9), Exit(rank=0, code=1), ranks=(peer,))
    assert found == ("killed", "rank 1 killed by signal 9 (out of memory killer?)")


@pytest.mark.parametrize(
    ("reason", "lost"),
    [
        ("RuntimeError: CUDA error: unspecified launch failure", ("GPU-a",)),  # rank 0 writes without its number
        ("rank 1: CUDA error: uncorrectable ECC error encountered", ("GPU-b",)),
        ("rank 1: CUDA error: an illegal memory access was encountered", ()),  # it would fail again on any GPU
    ],
)
def test_the_gpu_of_the_rank_that_lost_it_is_named(tmp_path: Path, reason: str, lost: tuple[str, ...]) -> None:
    write_json(tmp_path / "result.json", {"attempt": 2, "status": "failed", "kind": "error", "reason": reason})
    attempt = Attempt(number=2, gpus=("GPU-a", "GPU-b"))
    end = end_of(Evidence(run=tmp_path, attempt=attempt, exits=DIED))
    assert (end.kind, end.lost) == ("gpu lost" if lost else "error", lost)


def test_a_gpu_that_went_silent_in_this_attempt_explains_other_errors(tmp_path: Path) -> None:
    def event(name: str, time: float) -> None:
        append_jsonl(tmp_path / "gpu_events.jsonl", {"time": time, "event": name, "text": "A10G (GPU-b): no response"})

    error: dict[str, Any] = {"result": {"status": "failed", "kind": "error", "reason": "NCCL error"}}
    event("lost", 3.0)
    assert ended(tmp_path, **error)[0] == "nccl"  # it was lost before this attempt
    event("lost", 5.0)
    assert ended(tmp_path, **error)[0] == "gpu lost"
    event("found", 6.0)
    assert ended(tmp_path, **error)[0] == "nccl"


def test_the_end_of_the_log_is_kept_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    (tmp_path / "output.log").write_text("key 0123456789abcdef0123456789abcdef01234567\n" + "x" * 400, encoding="utf-8")
    end = end_of(Evidence(run=tmp_path, attempt=Attempt(number=2), exits=DIED))
    assert "0123456789abcdef" not in "".join(end.log_tail)
    assert [len(line) for line in end.log_tail][-1] == 300


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "ended with exit code 1"),
        (0, "ended with exit code 0 and no result.json"),
        (-9, "killed by signal 9 (out of memory killer?)"),
        (137, "killed by signal 9 (out of memory killer?)"),
        (-7, "killed by signal 7 (bus error: is /dev/shm full?)"),
    ],
)
def test_what_an_exit_code_means(code: int, text: str) -> None:
    assert describe_exit(code) == text
