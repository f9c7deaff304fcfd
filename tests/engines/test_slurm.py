"""Slurm: scripts that users read, answers of its programs, and requests that would never start."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from callable_slurm import FakeSlurm
from kmatrix.engines.ports import Batch, Phase, Shape, UnreachableError
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import read_settings
from kmatrix.errors import ConfigError, LaunchError

HANGS = subprocess.TimeoutExpired("squeue", 60)
FOLDER = Path("/shared/results/test_matrix/jobs/0003")
ONE = Batch(folder=FOLDER, label="km-0a1b2c3d", shape=Shape(gpus=1, cpus=8, seconds=43200), runs=("a", "b", "c d"))
TWO = replace(ONE, shape=Shape(nodes=2, gpus=8, cpus=96, memory_mib=0, seconds=172_800), runs=("w",))
SYMBOLS = {
    "SLURM_ACCOUNT": "p1",
    "SLURM_GPU_TYPE": "h100",
    "SLURM_SETUP": "/home/u/my modules.sh",
    "SLURM_EXTRA_FLAGS": "--qos=high -w n1,n2 --comment='a b' --exclusive",
}
SCRIPTS = {
    "array": (ONE, {"SLURM_PARTITION": "gpu,long", "PARALLEL_JOBS": "2"}),
    "two_nodes": (TWO, SYMBOLS),
    "last": (replace(ONE, folder=Path("/my results/100%/m/jobs/0004"), shape=Shape(), runs=(), is_last=True), SYMBOLS),
}


def slurm(fake=None, **symbols):
    settings = read_settings(symbols, {"SBATCH_PARTITION": "main", "SBATCH_TIMELIMIT": "1"})
    return Slurm(settings, Path("/opt/km"), Path("/opt/km/.venv/bin/python"), run=fake or FakeSlurm())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_what_a_user_would_write(golden, name):
    batch, symbols = SCRIPTS[name]
    golden(f"job_{name}.sbatch", slurm(**symbols).script(batch)[1])


@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_a_script(name):
    batch, symbols = SCRIPTS[name]
    assert subprocess.run(["bash", "-n"], input=slurm(**symbols).script(batch)[1], text=True, check=True)


@pytest.mark.parametrize("path", ["/a\nb/m/jobs/1", "/a\\b/m/jobs/1"])
def test_a_path_that_would_change_the_script_is_refused(path):
    with pytest.raises(LaunchError, match="cannot be in a job script"):
        slurm().script(replace(ONE, folder=Path(path)))


@pytest.mark.parametrize("flags", ["-J x", "-Jx", "--job-name=x", "--job x"])
def test_the_name_of_a_job_stays(flags):
    with pytest.raises(ConfigError, match="SLURM_EXTRA_FLAGS has -"):
        read_settings({"SLURM_EXTRA_FLAGS": flags}, {})


@pytest.mark.parametrize(
    ("shape", "symbols", "what", "hint"),
    [
        (Shape(gpus=4), {}, "4 GPUs on one node", "NUM_NODES=2"),
        (Shape(gpus=1), {"SLURM_GPU_TYPE": "h100"}, "1 h100 GPU on", "SLURM_GPU_TYPE="),
        (Shape(nodes=4, gpus=2), {}, "4 nodes with 2 GPUs", "NUM_GPUS=6 NUM_NODES=3"),
        (Shape(nodes=3), {"SLURM_PARTITION": "short"}, "3 nodes", "NUM_NODES=2"),
        (Shape(cpus=99, gpus=2), {}, "99 CPUs", "SLURM_CPUS_PER_GPU=8"),
        (Shape(cpus=99), {}, "99 CPUs", "CPU_THREADS="),
        (Shape(seconds=3600), {"SLURM_PARTITION": "short"}, "a time limit of 1h00m", "SLURM_TIME=5m"),
        (Shape(seconds=120), {}, "a time limit of 2m", "SLURM_NOTICE="),
        (Shape(), {"SLURM_PARTITION": "main,nope"}, "no partition nope", "SLURM_PARTITION="),
        (Shape(), {"SLURM_SETUP": "/nope"}, "SLURM_SETUP=/nope not found", "a file"),
        (Shape(nodes=3, seconds=3600), {"SLURM_PARTITION": "short,main"}, "", ""),  # of two, one is enough
    ],
)
def test_what_would_never_start_and_the_argument_that_fixes_it(shape, symbols, what, hint):
    found = [(error.what[: len(what)], hint in error.hint) for error in slurm(**symbols).check([shape])]
    assert found == ([(what, True)] if what else [])


def test_a_run_gets_the_share_of_its_gpus_and_a_time_that_its_partitions_allow():
    def asked(expected_s, **symbols):
        return slurm(**symbols).fit(Shape(gpus=2, seconds=expected_s))

    assert asked(3600.0) == Shape(gpus=2, cpus=16, seconds=7200)
    assert asked(1e6).seconds == asked(None).seconds == 172_800
    assert asked(1e6, SLURM_PARTITION="short").seconds == 300
    shape = asked(1.0, SLURM_TIME="90s", SLURM_CPUS_PER_GPU="3", SLURM_MEMORY="2G")
    assert shape == Shape(gpus=2, cpus=6, seconds=120, memory_mib=2048)
    assert slurm(PACK_NODES="y").cluster().whole_node == Shape(gpus=2, cpus=16)


@pytest.mark.parametrize(
    ("status", "out", "err", "kind", "found"),
    [
        (0, "12\n", "", None, "12"),
        (0, "Welcome!\n12;gpus\nbudget: 3 of 400\n", "", None, "12"),
        (0, "12\n400\n", "", None, "7"),  # two numbers: the name tells
        (0, "ok\n", "", None, "7"),
        (1, "", "sbatch: error: Project p1 is over its budget\nsbatch: error: Unspecified error\n", LaunchError,
         "Project p1 is over its budget; Unspecified error"),
        (1, "", "sbatch: error: Socket timed out on send/recv operation\n", UnreachableError, "Socket timed out"),
    ],
)  # fmt: skip
def test_the_answer_of_sbatch(status, out, err, kind, found):
    fake = FakeSlurm()
    fake.do_sbatch = lambda words: ""
    fake.do_squeue = lambda words: "7_0|km-0a1b2c3d-0003|PENDING|None||N/A\n"
    fake.answers["sbatch"] = (status, out, err)
    if kind is None:
        assert slurm(fake).submit(ONE) == found
    else:
        with pytest.raises(kind) as error:
            slurm(fake).submit(ONE)
        assert type(error.value) is kind
        assert found in error.value.why


@pytest.mark.parametrize(
    ("line", "phase", "shown"),
    [
        ("7_3|km-x-0001|PENDING|Resources||1795816055", Phase.WAITS, (3, "Resources", 1795816055.0)),
        ("7|km-x-0001|PENDING|JobHeldUser||N/A", Phase.WAITS, (0, "JobHeldUser", None)),
        ("7|km-x-0001|OF_A_LATER_VERSION|None|n1|17", Phase.RUNS, (0, "", None)),
        ("7_[0-3]|km-x-0001|CANCELLED|None||17", Phase.ENDED, (0, "", None)),
        ("7|km-x-0001-0002|RUNNING|None|n1|17", None, None),  # another matrix
        ("a plugin's | message", None, None),
    ],
)
def test_a_line_of_squeue(line, phase, shown):
    fake = FakeSlurm()
    fake.do_squeue = lambda words: f"{line}\n"
    found = [(job.phase, (job.task, job.reason, job.starts)) for job in slurm(fake).poll("km-x")]
    assert found == ([] if phase is None else [(phase, shown)])


def test_a_job_inherits_no_variable_of_another_job_or_of_a_site(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    for name in ("SLURM_JOB_ID", "SBATCH_TIMELIMIT", "PMIX_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_CONF", "HF_TOKEN"):
        monkeypatch.setenv(name, "x")
    fake = FakeSlurm(answers={"sbatch": (0, "12", "")})
    fake.do_sbatch = lambda words: ""
    slurm(fake).submit(ONE)
    given = {
        name for name in fake.environments[0] if name.startswith(("SLURM", "SBATCH", "PMIX", "CUDA_V", "HF", "LC"))
    }
    assert given == {"SLURM_CONF", "HF_TOKEN"}


@pytest.mark.parametrize(("error", "kind"), [(FileNotFoundError, LaunchError), (HANGS, UnreachableError)])
def test_a_program_that_is_missing_or_hangs(error, kind):
    fake = FakeSlurm()
    fake.do_squeue = Mock(side_effect=error)
    with pytest.raises(LaunchError) as raised:
        slurm(fake).poll("km-x")
    assert type(raised.value) is kind
