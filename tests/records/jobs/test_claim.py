import errno
import os
import time
from pathlib import Path

import pytest

from kmatrix.records.decode import SCHEMA
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import FRESH_S, Claim, age_s, fresh_owner, is_claimed
from kmatrix.records.jobs.files import ShareOwner
from kmatrix.records.jobs.paths import JobsDir, ShareDir
from kmatrix.records.paths import MatrixDir
from waiting import wait_until

pytestmark = pytest.mark.process


def share_of(tmp_path) -> ShareDir:
    return JobsDir(MatrixDir(tmp_path)).submission(1).share(0)


def test_a_claim_is_fresh_until_it_is_old_by_the_clock_of_its_storage(tmp_path):
    share = share_of(tmp_path)
    assert not is_claimed(share)
    claim = Claim(share, ShareOwner(job="12", host="n1"))
    claim.begin()
    claim.end()
    assert is_claimed(share)
    assert fresh_owner(share) == ShareOwner(job="12", host="n1", counter=1)
    past = time.time() - FRESH_S - 1
    os.utime(share.owner, (past, past))
    assert not is_claimed(share)
    assert [path.name for path in share.folder.iterdir()] == ["owner.json"]  # no file of the clock is left


def test_a_later_start_or_another_job_takes_a_claim(tmp_path):
    share = share_of(tmp_path)
    claim = Claim(share, ShareOwner(job="12"))
    claim.begin()
    claim.end()
    assert claim.is_ours()
    Claim(share, ShareOwner(job="12", restart=1)).begin()
    assert not claim.is_ours()
    assert age_s(share.folder / "missing") is None


def test_a_claim_of_a_later_version_is_that_of_another_runner(tmp_path):
    share = share_of(tmp_path)
    claim = Claim(share, ShareOwner(job="12"))
    claim.begin()
    claim.end()
    write_json(share.owner, {"schema": SCHEMA + 1, "job": "12"})
    assert not claim.is_ours()


def test_a_claim_outlives_storage_that_does_not_answer_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.records.jobs.claim.PULSE_S", 0.01)
    share, failing = share_of(tmp_path), [True]
    is_dir = Path.is_dir

    def stale(path):
        if failing[0] and path == share.path:
            failing.append(True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", stale)
    claim = Claim(share, ShareOwner(job="12"))
    claim.begin()
    try:
        wait_until(lambda: len(failing) > 3)
        failing[0] = False
        wait_until(lambda: fresh_owner(share).counter > 3)
    finally:
        claim.end()
