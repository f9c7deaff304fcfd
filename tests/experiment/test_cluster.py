"""With ENGINE=slurm a plan counts on the nodes of the partition, not on the login node; what never fits is refused."""

from __future__ import annotations

import re

import pytest

from kmatrix.engines.slurm.scheduler import SlurmScheduler
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment import make
from kmatrix.experiment.cluster.jobs import planned_attempts
from kmatrix.experiment.inputs.data import key
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import plan_matrix, refuse_risks
from kmatrix.records.dataset import Dataset
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import read_engine
from kmatrix.records.runs import read_run_file
from kmatrix.runner.shares import submissions_of
from slurm_answers import answer

QUICK = "gpt2-cpu-quick"


def plan(tmp_path, **assignments):
    return plan_matrix(
        QUICK,
        ENGINE="slurm",
        RESULTS_DIR=tmp_path / "r",
        DATA_DIR=tmp_path / "d",
        OPTIMIZER="adamw",
        PARALLEL_BATCH_SIZE=432,
        **assignments,
    )


def shapes(made):
    rules = SlurmScheduler(made.runs[0].values.texts).rules()
    return [one.shape for one in submissions_of(planned_attempts(made), rules)]


@pytest.mark.parametrize(
    ("assignments", "run", "nodes"),  # device and ranks; nodes, GPUs, ranks and CPUs per node of its job
    [
        ({"DEVICE": "auto", "NUM_GPUS": 0}, ("cuda", 4), (1, 4, 4, 16)),
        ({"DEVICE": "cuda", "NUM_GPUS": 8, "NUM_NODES": 0}, ("cuda", 8), (2, 4, 4, 16)),
        ({"DEVICE": "cuda", "NUM_GPUS": 8, "NUM_NODES": 0, "GPUS_PER_NODE": 2}, ("cuda", 8), (4, 2, 2, 8)),
        ({"DEVICE": "cpu", "NUM_GPUS": 8}, ("cpu", 8), (1, 0, 8, 16)),
    ],
)
def test_runs_are_planned_for_the_nodes_of_the_partition(monkeypatch, tmp_path, assignments, run, nodes):
    answer(monkeypatch)
    made = plan(tmp_path, **assignments)
    assert (made.runs[0].config.device, made.runs[0].config.ranks, made.gpus) == (*run, ())
    assert [(one.nodes, one.gpus_per_node, one.ranks_per_node, one.cpus_per_node) for one in shapes(made)] == [nodes]
    assert made.nodes.model.name == "A10G"


def test_nine_gpus_on_nodes_of_four_are_refused_with_the_number_of_nodes(monkeypatch, tmp_path):
    answer(monkeypatch)

    with pytest.raises(ConfigError, match="pass NUM_NODES=3"):
        plan(tmp_path, DEVICE="cuda", NUM_GPUS=9)


def test_smaller_nodes_without_gpus_do_not_count_for_runs_with_gpus(monkeypatch, tmp_path):
    answers = answer(monkeypatch)
    nodes = answers.texts["scontrol --oneliner show node"][1].splitlines()
    small = nodes[0].replace("NodeName=n1", "NodeName=c1").replace("Gres=gpu:a10g:4", "Gres=(null)")
    small = re.sub(r"CPU(Efctv|Tot)=16", r"CPU\1=2", small)
    answers.say("scontrol --oneliner show node", "\n".join([*nodes, small]))

    made = plan(tmp_path, DEVICE="cuda", NUM_GPUS=4)

    assert made.nodes is not None
    assert (made.nodes.gpus, made.nodes.cpus) == (4, 16)


def test_threads_share_the_cores_of_a_node(monkeypatch, tmp_path):
    answer(monkeypatch)

    made = plan(tmp_path, DEVICE="cpu", NUM_GPUS=4, NUM_NODES=2)

    assert [one.cpu_threads for one in planned_attempts(made)] == [8]  # 16 cores, 2 ranks


def test_a_model_larger_than_the_memory_of_a_node_is_refused(monkeypatch, tmp_path):
    answer(monkeypatch)

    made = plan(tmp_path, DEVICE="cpu", NUM_GPUS=1, MODEL="1558M")

    with pytest.raises(LaunchError, match=r"a node of main has 3\.9 GiB"):
        refuse_risks(made)


def test_a_budget_gives_a_time_limit(monkeypatch, tmp_path):
    answer(monkeypatch)

    made = plan(tmp_path, DEVICE="cpu", NUM_GPUS=1, MAX_TIME="2h")

    assert [one.expected_s for one in planned_attempts(made)] == [7200]
    assert [shape.seconds for shape in shapes(made)] == [12600]  # 2 h x 1.5, time to start and to save, rounded up


def test_without_an_answer_of_slurm_a_plan_counts_on_the_configuration(monkeypatch, tmp_path):
    answer(monkeypatch).stop_controller()

    made = plan(tmp_path, DEVICE="auto", NUM_GPUS=4, GPUS_PER_NODE=4, SLURM_GPU_TYPE="h100")

    assert made.nodes is not None
    assert made.nodes.model is not None
    assert (made.runs[0].config.device, made.nodes.gpus, made.nodes.model.name) == ("cuda", 4, "H100")
    assert made.warnings[0].startswith("Slurm does not answer: Unable to contact slurm controller")
    assert "4 GPUs per node, as configured" in made.warnings[0]


def test_a_machine_without_slurm_plans_too_but_makes_no_matrix(monkeypatch, tmp_path):
    answer(monkeypatch).texts.clear()

    made = plan(tmp_path, DEVICE="cpu", NUM_GPUS=1)

    assert made.warnings[0].startswith("scontrol not found: ENGINE=slurm needs the programs of Slurm: planned for")
    with pytest.raises(LaunchError, match="scontrol not found"):
        make_matrix(made)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("counts", [{"NUM_GPUS": 0}, {"NUM_GPUS": 4, "NUM_NODES": 0}])
def test_without_an_answer_numbers_that_depend_on_it_are_refused_in_its_words(monkeypatch, tmp_path, counts):
    answer(monkeypatch).stop_controller()

    with pytest.raises(LaunchError, match="Slurm does not answer"):
        plan(tmp_path, **counts)


def test_provenance_names_the_nodes_instead_of_the_login_node(monkeypatch, tmp_path):
    answer(monkeypatch)
    nodes = plan(tmp_path).nodes
    assert nodes is not None

    origin = nodes.provenance({"cpu": "login", "cores": 2, "host": "login", "gpus": []})

    assert (origin["cpu"], origin["cores"], origin["host"]) == ("a node of main", 16, "login")
    assert [gpu["name"] for gpu in origin["gpus"]] == ["a10g"] * 4


def test_a_matrix_of_this_machine_does_not_ask_slurm(monkeypatch, tmp_path):
    answers = answer(monkeypatch)

    made = plan_matrix(QUICK, RESULTS_DIR=tmp_path / "r", DATA_DIR=tmp_path / "d")

    assert made.nodes is None
    assert answers.calls == []


@pytest.mark.process
@pytest.mark.parametrize(("status", "refused"), [("finished", False), ("failed", True)])
def test_a_preflight_trains_one_run_of_each_shape_in_jobs_and_reads_how_they_ended(
    monkeypatch, tmp_path, status, refused
):
    answer(monkeypatch)
    made = plan(tmp_path, DEVICE="cpu", NUM_GPUS=1, SEED=[1, 2], REUSE="n")
    data = Dataset(path="d", sha256="x", vocab_size=257, train_tokens=10**6, val_tokens=10**5, shards=0)
    monkeypatch.setattr(make, "prepare_data", lambda *_: {key(one.config.train): data for one in made.runs})
    trials = []

    def run_jobs(matrix):
        assert read_engine(matrix) is not None, "it has jobs"
        for run in matrix.runs():
            trials.append((run.name, read_run_file(run).train.max_iters))
            trained = read_run_file(run)
            result = {"run_id": trained.run_id, "attempt": 1, "status": status, "step": 2}
            write_json(run.result, result | {"reason": "it does not fit"} if refused else result)
            write_json(run.status, {"status": status, "attempts": [], "reason": "it does not fit" if refused else ""})

    if refused:
        with pytest.raises(LaunchError, match="preflight: 2 of 2 runs fail; nothing was started") as caught:
            make_matrix(made, preflight=True, run_jobs=run_jobs)
        assert "it does not fit" in caught.value.why
        assert list((tmp_path / "r").iterdir()) == []
    else:
        matrix = make_matrix(made, preflight=True, run_jobs=run_jobs)
        assert len(matrix.runs()) == 2
        assert [path.name for path in (tmp_path / "r").iterdir()] == [matrix.name]
    assert len(trials) == 1
    assert trials[0][1] == 2
