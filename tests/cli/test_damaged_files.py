"""A field of another type in any JSON file ends nothing that reads it with a traceback."""

import os
import random

import pytest

from damage import DATASET, DamagedMatrix, make_checkout
from damage_readers import MODEL, NOT_READERS, PAGE, READERS, prepare, without_work
from kmatrix.cli.commands import COMMANDS
from version_0_1 import FINISHED

SAMPLE = 300
CASES = int(os.environ.get("KMATRIX_DAMAGES", "4000"))
SEED = int(os.environ.get("KMATRIX_DAMAGE_SEED", "12"))
PROGRAMS = {"gputop --replay", "gputop --stats-file", "trainer", "data preparation", "tracker process", "recorder"}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    checkout = make_checkout(tmp_path_factory.mktemp("damaged"))
    (checkout / PAGE).parent.mkdir()
    (checkout / PAGE).write_text(
        '{"schema": 1, "url": "http://localhost:7860/", "port": 7860, "pid": 7, "token": "x"}\n'
    )
    from gpt2.inference.export import export

    unfinished = DamagedMatrix(checkout, {})
    export(unfinished.matrix / FINISHED / "checkpoints" / "final.pt", checkout / "model")
    prepare(unfinished)
    made = DamagedMatrix(checkout, READERS, (DATASET, PAGE, MODEL))
    with without_work(made):
        yield made


def check(damaged, cases):
    """Check that each case is answered with status 0 or 2, and without a traceback."""
    wrong = []
    for case in cases:
        result = damaged.check(case)
        if result.status not in (0, 2) or "Traceback" in result.err or (result.status and "error: " not in result.err):
            wrong.append(f"{case}\nstatus {result.status}\n{result.err[-900:]}")
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong[:20])


def test_each_command_reads_damaged_records_in_this_test_or_reads_none():
    assert set(COMMANDS) | PROGRAMS == set(READERS) | NOT_READERS
    assert not set(READERS) & NOT_READERS


def test_each_reader_succeeds_without_damage(damaged):
    found = {name: (reader, damaged.call(name)) for name, reader in READERS.items()}
    wrong = {name: result for name, (reader, result) in found.items() if result.status != reader.sound}
    assert not wrong, "\n".join(f"{name}: {result.status}\n{result.out}{result.err}" for name, result in wrong.items())


def test_a_sample_of_damaged_fields_ends_nothing_with_a_traceback(damaged):
    check(damaged, damaged.sample(random.Random(SEED), SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(max(3600, CASES))
def test_no_damaged_field_ends_a_reader_with_a_traceback(damaged):
    check(damaged, damaged.sample(random.Random(SEED), CASES))
