"""Runs over two nodes, with a fake srun that starts both agents on this machine, and the fake trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from dataclasses import replace

import pytest

import fake_srun
from kmatrix.engines import node_watch
from kmatrix.engines.local.engine import trainer_variables
from kmatrix.engines.node import agent_of
from kmatrix.engines.node_watch import NodeWatch
from kmatrix.engines.spread import AgentSettings, Local, Srun, agent_argv, free_port, node_number
from kmatrix.records.decode import as_json
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.files import NodeEnd, NodeFile, read_node, read_node_end
from kmatrix.records.jobs.paths import NodeDir, nodes_of
from kmatrix.records.run_lock import begin_attempt
from kmatrix.runner.loop import drive
from kmatrix.status.state import JobPhase
from running import PYTHON, engine, processes_naming
from waiting import wait_until

SETTINGS = AgentSettings(grace_s=5.0)
HOSTS = (socket.gethostname(), "n2")


def srun(**known) -> Srun:
    return Srun(PYTHON, "12", **{"hosts": HOSTS} | known)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The log of the fake programs."""
    monkeypatch.setattr(node_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(node_watch, "PEERS_S", 0.1)
    return fake_srun.install(tmp_path / "bin", monkeypatch)


def states(plans):
    return [read_json(plan.dir.status)["status"] for plan in plans]


def last(run):
    return read_json(run.dir.status)["attempts"][-1]


def test_a_run_on_one_node_is_started_as_ever(plan):
    run = plan("a", ranks=2)
    argv = Local().argv(run, ("torchrun",), SETTINGS)
    assert argv[:3] == ["torchrun", "--standalone", "--nproc-per-node=2"]
    assert srun().argv(run, ("torchrun",), SETTINGS) == argv
    assert not srun().has_agents(run)


@pytest.mark.process
def test_srun_starts_an_agent_on_each_node_with_a_static_rendezvous(plan):
    argv = srun(hosts=("n1", "n2", "n3")).argv(plan("a", ranks=4, nodes=2), ("torchrun",), SETTINGS)
    inner = argv[argv.index("--") + 1 :]
    assert argv[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert {"--nodelist=n1,n2", "--kill-on-bad-exit=0", "--wait=60", "--overlap"} <= set(argv)
    assert inner[:4] == ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--node-rank=@NODE@"]
    assert {"--master-addr=n1", "--rdzv-conf=timeout=900"} < set(inner)


@pytest.mark.parametrize(
    ("environment", "number"),
    [({}, 0), ({"SLURM_PROCID": "3"}, 3), ({"JOB_COMPLETION_INDEX": "2"}, 2), ({"SLURM_PROCID": "x"}, 0)],
)
def test_the_number_of_a_node_is_that_of_its_task_or_pod(environment, number):
    assert node_number(environment) == number


def test_the_command_of_an_agent_is_the_same_on_each_node(plan):
    run = plan("a", ranks=4, nodes=2, attempt=3, cuda=True, gpus=("GPU-1",))
    argv = agent_argv(run, ["torchrun"], python="python", settings=SETTINGS, address="n1", port=2345)
    agent = agent_of(argv[3:], {"SLURM_PROCID": "1"})
    assert (agent.plan.ranks, agent.plan.nodes, agent.plan.attempt, agent.plan.gpus) == (4, 2, 3, ("GPU-1",))
    assert agent.node.path == run.dir.path / "nodes" / "1"
    assert agent.command[:4] == ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1"]
    assert agent.recorders is None


@pytest.mark.process
def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("", free_port()))


@pytest.mark.process
def test_a_run_on_two_nodes_has_the_files_of_both(matrix, plan, slurm):
    run = plan("a", ranks=2, nodes=2)
    outcome = drive(matrix, [run], engine(spread=srun()), poll_s=0.02)
    assert outcome.counts == {"finished": 1}
    first, second = nodes_of(run.dir)
    assert (first.node, second.node) == (0, 1)
    assert [read_node(node).ranks for node in (first, second)] == [(0,), (1,)]
    assert [read_node_end(node).exit_code for node in (first, second)] == [0, 0]
    assert "threads" in second.output_log.read_text()
    log = run.dir.output_log.read_text()
    assert "node 1 (" in log
    assert log.count("threads") == 1
    token = read_json(second.path / ".lock")["token"]
    assert token != read_json(run.dir.lock)["token"]
    assert "srun" in slurm.read_text()


@pytest.mark.process
def test_a_stop_reaches_the_agent_of_node_0_and_not_srun(matrix, plan, slurm):
    run = plan("a", "hang", ranks=2, nodes=2)
    local = engine(spread=srun(), grace_s=5.0)
    local.submit([run])
    local.poll()
    wait_until(lambda: (run.dir.path / "env.json").exists() and read_node(NodeDir(run.dir, 1)) is not None)
    local.cancel()
    # The fake ranks do not agree on a stop: the second one is stopped as its peer would.
    wait_until(lambda: read_node_end(NodeDir(run.dir, 0)) is not None)
    assert read_node_end(NodeDir(run.dir, 0)).signals == ("SIGTERM",)
    assert read_json(run.dir.result)["status"] == "stopped"
    os.kill(read_node(NodeDir(run.dir, 1)).pid, signal.SIGTERM)
    wait_until(lambda: local.poll()["a"].phase is JobPhase.ENDED)
    assert "scancel" not in slurm.read_text()
    assert not processes_naming(matrix)


@pytest.mark.nightly
def test_a_kill_ends_the_step_on_all_nodes(matrix, plan, slurm):
    run = plan("a", "stubborn", ranks=2, nodes=2)
    local = engine(spread=srun())
    local.submit([run])
    local.poll()
    wait_until(lambda: read_node(NodeDir(run.dir, 0)) is not None and read_node(NodeDir(run.dir, 1)) is not None)
    local.cancel(now=True)
    assert local.poll()["a"].phase is JobPhase.ENDED
    assert "scancel --signal=KILL 12.0" in slurm.read_text()
    wait_until(lambda: not processes_naming(matrix))


@pytest.mark.process
def test_a_lost_host_stops_the_run_and_is_named(matrix, plan, slurm):
    (slurm.parent / "dead").write_text("n2")
    run = plan("a", "hang", ranks=2, nodes=2)
    local = engine(spread=srun())

    def lose() -> None:
        wait_until(lambda: (run.dir.path / "env.json").exists() and read_node(NodeDir(run.dir, 1)) is not None)
        agent = read_node(NodeDir(run.dir, 1))
        os.killpg(agent.pid, signal.SIGKILL)  # its guard stops what it has started
        os.kill(read_json(run.dir.path / "env.json")["pid"], signal.SIGKILL)  # rank 0, without its peer

    thread = threading.Thread(target=lose)
    thread.start()
    outcome = drive(matrix, [run], local, poll_s=0.02)
    thread.join()
    assert outcome.counts == {"stopped": 1}
    assert (last(run)["kind"], last(run)["reason"]) == ("node lost", "n2 does not answer")
    assert local.lost_hosts == ["n2"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("signals", "ended"),
    [
        (("SIGTERM",), ("preempted", "stopped", "was sent SIGTERM")),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_a_node_that_ended_alone_ends_the_run(matrix, plan, monkeypatch, signals, ended):
    """The other node would wait for it in the rendezvous, and srun does not know of it: its daemon was killed."""
    monkeypatch.setattr(node_watch, "OVERDUE_S", 0.5)
    run = plan("a", "hang", ranks=2, nodes=2)
    place = NodeDir(run.dir, 1)

    def lose() -> None:
        wait_until(lambda: (run.dir.path / "env.json").exists() and read_node(place) is not None)
        os.killpg(read_node(place).pid, signal.SIGSTOP)
        write_json(place.end, as_json(NodeEnd(node=1, host="n2", exit_code=7, signals=signals)))

    thread = threading.Thread(target=lose)
    thread.start()
    local = engine(spread=srun())
    monkeypatch.setattr("kmatrix.status.state.MOST_RETRIES", {})  # the first end counts
    outcome = drive(matrix, [run], local, poll_s=0.02)
    thread.join()
    kind, status, how = ended
    assert (last(run)["kind"], outcome.counts) == (kind, {status: 1})
    assert last(run)["reason"] == f"node 1 (n2) {how}, and the other nodes waited for it"
    assert not local.lost_hosts


class Hosts(Srun):
    """Hosts that are asked whether they live."""

    def lost(self, run):
        return ["n2"]


def write_node(run, counter):
    place = NodeDir(run.dir, 1)
    place.path.mkdir(parents=True, exist_ok=True)
    write_json(place.node_json, as_json(NodeFile(node=1, host="n2", attempt=run.attempt, counter=counter)))


@pytest.mark.process
def test_hosts_are_asked_when_an_agent_has_not_rewritten_its_file_for_a_while(plan, monkeypatch):
    """A host that loses its power leaves its peers in a collective, and no node ends."""
    now = [1000.0]
    monkeypatch.setattr(node_watch.time, "monotonic", lambda: now[0])
    run = plan("a", ranks=2, nodes=2)
    watch = NodeWatch(run, Hosts(PYTHON, "12", HOSTS))
    for counter in range(1, 20):  # it lives
        write_node(run, counter)
        now[0] += node_watch.QUIET_LOOK_S
        assert watch.poll() == ()
    now[0] += node_watch.QUIET_S - node_watch.QUIET_LOOK_S
    assert watch.poll() == ()
    now[0] += 2 * node_watch.QUIET_LOOK_S
    wait_until(lambda: watch.poll() == ["n2"])


@pytest.mark.process
@pytest.mark.parametrize("ends", [[0], [0, 1]])
def test_a_run_without_the_end_of_a_node_is_not_waited_for_forever(plan, monkeypatch, ends):
    """No host is lost, and the agent of one was killed before it could write."""
    now, over = [1000.0], threading.Event()
    monkeypatch.setattr(node_watch.time, "monotonic", lambda: now[0])

    def wait(*_):
        over.wait()
        return []

    monkeypatch.setattr(Hosts, "lost", wait)
    run = plan("a", ranks=2, nodes=2)
    for node in ends:
        NodeDir(run.dir, node).path.mkdir(parents=True, exist_ok=True)
        write_json(NodeDir(run.dir, node).end, as_json(NodeEnd(node=node, attempt=run.attempt, exit_code=1)))
    watch = NodeWatch(run, Hosts(PYTHON, "12", HOSTS))
    if len(ends) == 1:
        assert watch.after_end() is None
        now[0] += node_watch.PEERS_S
        assert watch.after_end() is None  # the hosts are asked
        now[0] += node_watch.MOST_S
    assert watch.after_end() == ()
    over.set()


def test_no_host_is_asked_after_each_agent_has_written_its_end(plan, monkeypatch):
    now, asked = [1000.0], []
    monkeypatch.setattr(node_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Hosts, "lost", lambda *_: asked.append(1) or ["n2"])
    run = plan("a", ranks=2, nodes=2)
    for node in (0, 1):
        NodeDir(run.dir, node).path.mkdir(parents=True, exist_ok=True)
        write_json(NodeDir(run.dir, node).end, as_json(NodeEnd(node=node, attempt=run.attempt, exit_code=1)))
    watch = NodeWatch(run, Hosts(PYTHON, "12", HOSTS))
    for _ in range(20):
        assert watch.poll() == ()
        now[0] += node_watch.LOOK_S
    assert not asked


def test_the_step_of_another_attempt_is_not_killed(plan):
    asked = []
    run, place = plan("a", ranks=2, nodes=2, attempt=3), NodeDir(plan("a").dir, 0)
    place.path.mkdir(parents=True)
    found = srun(run=lambda words, **_: asked.append(words) or subprocess.CompletedProcess(words, 0))
    for attempt in (2, 3):
        write_json(place.node_json, as_json(NodeFile(node=0, attempt=attempt, step="4")))
        found.kill(run)
    assert asked == [["scancel", "--signal=KILL", "12.4"]]


@pytest.mark.nightly
def test_hosts_that_answer_after_a_bad_end_are_not_lost(matrix, plan, slurm):
    run = plan("a", "second fails", ranks=2, nodes=2)
    write_json(run.dir.run_json, read_json(run.dir.run_json) | {"train": {"max_iters": 2}})
    drive(matrix, [run], engine(spread=srun()), poll_s=0.02)
    assert last(run)["kind"] != "node lost"


@pytest.mark.process
def test_a_node_waits_for_the_end_of_an_earlier_attempt_and_then_kills_it(plan, monkeypatch, tmp_path):
    run = plan("a", ranks=2, nodes=2)
    place = NodeDir(run.dir, 1)
    place.path.mkdir(parents=True)
    argv = [str(run.dir.path), "--attempt=2", "--nodes=2", "--ranks=2", "--grace=0", "--", "true"]
    agent = agent_of(argv, {"SLURM_PROCID": "1"})
    monkeypatch.setattr("kmatrix.engines.node.MARGIN_S", 0.1)
    monkeypatch.setattr("kmatrix.engines.node.KILLED_S", 0.1)
    lock, _ = begin_attempt(place.recording, 1)
    try:
        with pytest.raises(Exception, match="an earlier attempt is still running"):
            agent.run()
    finally:
        os.close(lock)
    assert agent.run() == 0


@pytest.mark.nightly
def test_each_node_has_a_copy_of_the_data_of_its_own(matrix, plan, slurm, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.bin").write_bytes(b"tokens")
    run = plan("a", ranks=2, nodes=2)
    record = read_json(run.dir.run_json)
    write_json(run.dir.run_json, record | {"train": record["train"] | {"data_path": str(data)}})
    drive(matrix, [run], engine(spread=srun(), stage_dir=str(tmp_path / "$SLURM_PROCID")), poll_s=0.02)
    assert "copied" in run.dir.output_log.read_text(), run.dir.output_log.read_text()
    copies = [next((tmp_path / node).glob("data-*")) for node in ("0", "1")]
    assert [(copy / "train.bin").read_bytes() for copy in copies] == [b"tokens", b"tokens"]


@pytest.mark.process
def test_an_agent_that_copies_data_shows_that_it_lives(plan, monkeypatch, tmp_path):
    """Pods that do not rewrite their files are taken for lost, and the copy of a large dataset takes minutes."""
    run = plan("a", ranks=2, nodes=2)
    argv = [str(run.dir.path), "--attempt=1", "--nodes=2", "--ranks=2", "--grace=0", f"--stage={tmp_path}"]
    argv += ["--", "true"]
    agent = agent_of(argv, {"SLURM_PROCID": "1"})
    monkeypatch.setattr("kmatrix.engines.node.PULSE_S", 0.0)
    counters = []

    def copy(stage, _):
        for _ in range(3):
            assert not stage.is_cancelled()
            counters.append(read_node(agent.node).counter)
        return {}

    monkeypatch.setattr("kmatrix.engines.staging.Stage.environment", copy)
    assert agent.run() == 0
    assert counters == sorted(set(counters))


def test_the_allocator_of_a_run_is_not_that_of_the_users_shell_under_its_former_name(plan, monkeypatch, tmp_path):
    default = plan("a")
    run = replace(default, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in trainer_variables(run, tmp_path)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert trainer_variables(run, tmp_path)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in trainer_variables(default, tmp_path)


def test_a_trainer_has_the_checkout_first_and_then_the_packages_of_the_users_path(plan, monkeypatch, tmp_path):
    """Modules of a cluster put packages on PYTHONPATH; without them the trainer would miss what the runner found."""
    monkeypatch.setenv("PYTHONPATH", "/modules/torch")
    path = trainer_variables(plan("a"), tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert path == [str(tmp_path), str(tmp_path / "lib"), "/modules/torch"]


def test_gpu_memory_is_allocated_in_segments_that_grow_unless_the_user_decides(plan, monkeypatch, tmp_path):
    run = replace(plan("a"), cuda=True)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert trainer_variables(run, tmp_path)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in trainer_variables(replace(run, cuda=False), tmp_path)
    asked = replace(run, environment={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
    assert trainer_variables(asked, tmp_path)["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # the user's shell
        monkeypatch.setenv(name, "max_split_size_mb:128")
        assert "PYTORCH_ALLOC_CONF" not in trainer_variables(run, tmp_path)
        monkeypatch.delenv(name)


def test_products_are_computed_in_the_same_way_in_every_run_on_the_cpu(plan, monkeypatch, tmp_path):
    run = plan("a")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    assert trainer_variables(replace(run, cuda=False), tmp_path)["MKL_CBWR"] == "AUTO"
    assert "MKL_CBWR" not in trainer_variables(replace(run, cuda=True), tmp_path)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # the user's stays
    assert "MKL_CBWR" not in trainer_variables(replace(run, cuda=False), tmp_path)
