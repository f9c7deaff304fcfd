"""Break one rule at a time in a copy: the tests of runs, attempts and states must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kmatrix.records.paths import ROOT

pytestmark = pytest.mark.nightly
TESTS = (
    "tests/status/test_fold.py",
    "tests/runner/test_ends.py",
    "tests/runner/test_crashes.py",
    "tests/runner/test_worlds.py",
)
MUTANTS = [  # rule, module, text, instead of it
    (
        "take is exclusive",
        "records/attempts",
        "create_json(path_of(run, mine.number), as_json(mine))",
        "write(run, mine)",
    ),
    (
        "a file that one process makes is complete",
        "records/files",
        'temporary.write_bytes(data)\n            before("link", path)',
        'path.open("xb").close()\n            before("link", path)\n            return path.write_bytes(data)',
    ),
    (
        "no lock without its owner",
        "locks",
        "    except BlockingIOError:\n        return False\n    except OSError as error:",
        "    except OSError as error:\n        return True",
    ),
    (
        "a process elsewhere has 100 s",
        "records/attempts",
        "    if former.end is not None or is_here(former, mine):\n        return",
        "    if True:\n        return",
    ),
    (
        "after a wait all is read again",
        "runner/supervisor",
        "            elif following.what != ARCHIVE and not has_all:",
        "            if following.what != ARCHIVE and not has_all and former is None:",
    ),
    ("the fence has its time", "runner/supervisor", "+ 2 * attempts.PULSE_S", "- 1"),
    (
        "a pulse looks for newer numbers",
        "records/attempts",
        "if not found or found[-1] != mine.number:",
        "if not found:",
    ),
    (
        "containers of one kernel are two hosts",
        "records/attempts",
        "return (one.boot, one.host) == (other.boot, other.host)",
        "return one.boot == other.boot",
    ),
    ("an end is written by the newest", "records/attempts", "if numbers(run)[-1:] != [mine.number]:", "if False:"),
    (
        "a result counts before attempts",
        "status/fold",
        'files.result.status == "finished" and not is_archived',
        'files.result.status == "finished" and not is_archived and last is not None and last.end is not None',
    ),
    (
        "a rerun takes the run before it moves",
        "runner/rerun",
        "        attempts.take(run, mine)\n        archive(run, mine)",
        "        archive(run, replaced(mine, number=last.number))\n        attempts.take(run, mine)",
    ),
    ("two jobs of a run are one too many", "runner/controller", " and run not in live]", "]"),
    ("what was cancelled stays so", "runner/controller", "(state.attempts or run not in self.known)", "True"),
    ("a process asks the fold", "runner/supervisor", "if not state.may_start:", "if False:"),
    (
        "what was decided is looked at again",
        "runner/supervisor",
        "if mine.what == ARCHIVE or state_of(now, spare=planned.selected).may_start:",
        "if True:",
    ),
    (
        "run.json is there before an attempt",
        "runner/supervisor",
        "        make_files(matrix, self.run.name)  # before any attempt\n",
        "",
    ),
    (
        "an order is for one attempt",
        "status/fold",
        "asked = files.again is not None and files.again.after == number",
        "asked = files.again is not None",
    ),
    ("a stop stops", "runner/supervisor", "if (why := stop_of(self.run.parent)) is not None:", "if (why := None):"),
    (
        "an archived result is none",
        "status/fold",
        "is_archived = last is not None and last.what == ARCHIVE",
        "is_archived = False",
    ),
    (
        "numbers grow over archives",
        "status/fold",
        "number = files.attempts[-1].number if files.attempts else 0",
        'number = sum(one.what == "train" for one in files.attempts)',
    ),
    ("a lost run goes on", "status/fold", "(LOST, TIME_LIMIT, NODE_LOST), _PLACE)", "(TIME_LIMIT, NODE_LOST), _PLACE)"),
    (
        "an own fault waits for a person",
        "status/fold",
        "ITS_FAULT = Rule(status=Status.FAILED)",
        "ITS_FAULT = Rule(status=Status.FAILED, automatic=True)",
    ),
    ("out of memory halves", "status/fold", "range(used // 2, 0, -1)", "range(used, 0, -1)"),
    ("an attempt resumes", "status/fold", 'asked.resume if asked else "auto"', 'asked.resume if asked else "none"'),
    (
        "a request holds what trains",
        "runner/supervisor",
        'return f"{STOPPED}: held by user" if self.run.name in self.requests.runs else ""',
        'return ""',
    ),
    ("a result has its attempt", "runner/ends", "result and result.attempt == seen.attempt.number", "result"),
    ("silence is no answer", "runner/controller", "return True  # nothing is known", "jobs = {}  # nothing is known"),
    ("no progress ends", "status/fold", "MOST_IDLE = 2", "MOST_IDLE = 99"),
    ("a stop goes before its kill", "status/fold", "kind=kind if kind in ENDS else SIGNAL", "kind=LOST"),
]


@pytest.mark.parametrize(("module", "text", "other"), [mutant[1:] for mutant in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_broken_rule_is_noticed(tmp_path: Path, module: str, text: str, other: str) -> None:
    for name in ("lib", "gpt2", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / f"lib/kmatrix/{module}.py"
    content = path.read_text(encoding="utf-8")
    assert content.count(text) == 1
    path.write_text(content.replace(text, other), encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-m", "not nightly", *TESTS]
    path_of_copy = f"{tmp_path / 'lib'}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path_of_copy}, capture_output=True, check=False
    )
    assert done.returncode == 1, done.stdout[-500:].decode()
