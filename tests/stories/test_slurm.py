"""Submit a matrix to a real Slurm, cancel it with its own command, and continue."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clones import make_clone
from slurm_stage import SlurmStage
from slurm_story import PAUSE, Cluster

pytestmark = pytest.mark.story


def test_what_was_cancelled_stays_so_until_its_user_continues(tmp_path):
    """An array of two runs, the report after it, and `continue`."""
    with SlurmStage(nodes=2, installed=[Path(sys.prefix)], requeue_delay=5) as stage:
        cluster = Cluster(stage, make_clone(stage.shared / "kmatrix"))
        cluster.make("defconfig-gpt2-cpu-quick")
        story = cluster.submit("cancelled", "SEED=1,2", steps=PAUSE)
        story.wait_for_step(5)
        stage.login(["scancel", min({job.partition("_")[0] for job in story.jobs()}, key=int)])  # not the last job
        story.wait_for_ends()
        assert story.statuses() == {"stopped"}
        assert (story.matrix / "report.html").exists()
        assert len(story.submissions()) == 1, "the last job submits nothing"
        story.free()
        story.make("continue")
        story.wait_finished()
        story.check_steps()
