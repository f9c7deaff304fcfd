"""Kill a runner, its guard and its recorder: two attempts of one run never train at the same time."""

from __future__ import annotations

import re

import pytest

from story import complete_lines, load_json, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

RUN = "gpt2_adamw_1cpu"
WAITING = r"waiting for an earlier attempt to exit: (.*)\n"


def test_continue_waits_for_the_end_of_an_attempt_that_nobody_watches(story, tmp_path):
    story.script({"adamw": [3.3]})
    story.hold()
    runner = story.start("test-matrix", *story.words("OPTIMIZER=adamw"))
    story.wait_for_start(1)
    matrix = story.newest()
    processes = processes_of(matrix.path)
    orphan = only(processes["trainer"])
    orphan.suspend()  # it is asked to stop, and cannot yet, however long `continue` takes to start
    for victim in (*processes["guard"], *processes["recorder"]):
        victim.kill()
    runner.kill()
    runner.wait()
    runner = story.start("continue", f"TARGET={matrix.path}")
    output = tmp_path / "output_1.txt"
    who = wait_until(lambda: re.search(WAITING, output.read_text()), "it waits")
    assert f"(pid {orphan.pid})" in who[1]
    assert story.starts(matrix) == [(RUN, 1)]
    orphan.resume()
    story.wait_for_start(2)
    assert orphan.pid not in [process.pid for process in processes_of(matrix.path)["trainer"]]
    story.let_go()
    assert runner.wait() == 0, output.read_text()
    result = load_json(matrix.run(RUN).result)
    assert (result["status"], result["attempt"]) == ("finished", 2)
    assert [line["event"] for line in complete_lines(matrix.journal)].count("run waits") == 1
    assert not any(processes_of(matrix.path).values())
