"""Several nodes: the leader and its followers meet in files. Ranks are scripted, and time passes by ticks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kmatrix.clock import clock
from kmatrix.engines.nodes import AllRanks, Follower, Followers, read_node
from kmatrix.errors import LaunchError
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End, Exit
from kmatrix.records.files import write_json
from world import WorldClock, replaced_kernel

TICK_S = 0.2


class FakeRanks:
    """The ranks of a node, which do what is set, and note what they were asked for."""

    def __init__(self, host: str = "n0") -> None:
        self.host, self.asked, self.exits = host, list[str](), list[Exit]()
        self.stop, self.limit = (
            (lambda s: self.asked.append(f"stop {s:g}")),
            (lambda s: self.asked.append(f"limit {s:g}")),
        )

    def end(self, *codes: int) -> None:
        self.exits += [Exit(rank=0, code=code, host=self.host) for code in codes]

    def poll(self) -> bool:
        return bool(self.exits)

    def kill(self) -> None:
        self.asked.append("kill")
        self.exits = self.exits or [Exit(rank=0, code=-9, host=self.host)]


class Node:
    """A follower on node 1, by the name of its host."""

    def __init__(self, run, host="n1"):
        self.run, self.ranks, self.started = run, FakeRanks(host), list[int]()
        self.is_done, self.is_orphan, self.signals, self.code = False, False, list[str](), None
        asks = {"is_done": lambda: self.is_done, "is_orphan": lambda: self.is_orphan, "grace_of": {"SIGTERM": 25}.get}
        self.program = Follower(run=run, job="7", node=1, start=self.start, signals=self.signals, **asks).follow()

    def start(self, order: Attempt) -> FakeRanks:
        assert not read_node(self.run, 1).is_over, "it is noted before a rank exists"
        self.started.append(order.number)
        self.ranks = FakeRanks(self.ranks.host)
        return self.ranks

    def __next__(self):
        if self.code is None:
            try:
                next(self.program)
            except StopIteration as end:
                self.code = end.value


@pytest.fixture
def run(tmp_path):
    with replaced_kernel():
        WorldClock()
        attempts.folder(tmp_path).mkdir()
        yield tmp_path


@pytest.fixture
def node(run):
    return Node(run)


@pytest.fixture
def followers(run):
    return Followers(run=run, job="7", nodes=2)


def order(run, number=1, **known) -> Attempt:
    mine = Attempt(**{"number": number, "job": "7", "nodes": 2, "address": "n0", "port": 29500} | known)
    attempts.take(run, mine)
    return mine


def let(*programs, seconds=3.0, pulse=None):
    """Let programs go on. pulse: the attempt of a leader that lives."""
    for tick in range(int(seconds / TICK_S)):
        clock.sleep(TICK_S)
        for one in programs:
            next(one, None)
        if pulse is not None and tick % 50 == 0:
            pulse = attempts.beat(programs[0].run, pulse, 0.0)


def gathered(followers, *nodes):
    wait = followers.gather()
    let(wait, *nodes, seconds=10)
    return next(wait, None) is None


def polled(ranks):
    while True:
        ranks.poll()
        yield


def test_two_nodes_train_an_attempt_and_end(run, node, followers):
    assert not gathered(followers)
    assert gathered(followers, node)
    mine, here = order(run), FakeRanks()
    let(node)
    both = AllRanks(1, here, followers)
    here.end(0)
    assert (node.started, both.poll()) == ([1], False), "the other node has not told its exits yet"
    node.ranks.end(0)
    let(node)
    assert both.poll()
    assert [(one.host, one.code) for one in both.exits] == [("n0", 0), ("n1", 0)]
    attempts.finish(run, mine, End(kind="finished"))
    let(node)
    assert node.code is None, "it leaves when the run is done, not with an attempt"
    node.is_done = True
    let(node)
    assert node.code == 0


def test_the_next_attempt_waits_until_no_node_has_ranks_of_the_former_one(run, node, followers):
    mine = order(run)
    let(node)
    attempts.finish(run, mine, End(kind="oom"))
    assert not gathered(followers, node)
    assert set(node.ranks.asked) == {"limit 5"}
    node.ranks.end(1)
    assert gathered(followers, node)
    order(run, 2)
    let(node)
    assert node.started == [1, 2]


@pytest.mark.parametrize(
    ("because", "code"),
    [("a lost leader", None), ("a newer number", None), ("a moved run", 143), ("the end of its ssh", 143)],
)
def test_ranks_of_a_follower_do_not_outlive_their_attempt(run, node, because, code):
    mine = order(run)
    let(node, seconds=100, pulse=mine)
    assert (node.started, node.ranks.asked) == ([1], [])
    if because == "a newer number":
        order(run, 2, job="8")
    if because == "a moved run":
        (run / "nodes").rename(run / "elsewhere")
    node.is_orphan = because == "the end of its ssh"
    let(node, seconds=70 if because == "a lost leader" else 3)
    assert (node.ranks.asked[-1], node.code, node.started) == ("kill", code, [1])


def test_a_lost_node_is_named_after_a_minute_and_ends_the_attempt(run, node, followers):
    order(run)
    here = FakeRanks()
    both = AllRanks(1, here, followers)
    let(node, polled(both), seconds=30)
    clock.sleep(3600)  # this process was suspended: it has not looked
    let(polled(both), seconds=50)
    assert both.trouble is None
    let(polled(both), seconds=12)
    assert both.trouble == ("node lost", f"{read_node(run, 1).host} has not answered for 60 s")
    assert (here.asked, both.poll()) == (["kill"], True)


@pytest.mark.parametrize(("reason", "is_lost"), [("Connection reset by peer", True), ("ValueError: x", False)])
def test_a_node_is_lost_if_its_peers_lost_the_connection_and_it_says_nothing(run, node, followers, reason, is_lost):
    order(run)
    let(node)
    here = FakeRanks()
    both = AllRanks(1, here, followers)
    write_json(run / "ranks/0/state.json", {"attempt": 1, "rank": 0, "kind": "error", "reason": reason, "time": 1.0})
    here.end(1)
    let(polled(both), seconds=11)
    assert both.poll()
    assert (both.trouble is not None and both.trouble[0] == "node lost") == is_lost


# rank 0 has lost its peer; its own; those of node 0 are killed because of it; a silent node is not waited for
@pytest.mark.parametrize("codes", [((1,), (-9,), "n1"), ((-11,), (1,), "n0"), ((), (1,), "n1"), ((1, -9), (), "n0")])
def test_the_first_exit_is_the_cause_on_whatever_node(run, node, followers, codes):
    order(run)
    let(node)
    own = FakeRanks()
    both = AllRanks(1, own, followers)
    own.end(*codes[0])
    node.ranks.end(*codes[1])
    let(node, polled(both), seconds=5)
    if not own.exits:
        assert "limit 5" in own.asked
        own.kill()
    let(polled(both), seconds=11)
    assert (both.poll(), both.exits[0].host) == (True, codes[2])


def test_a_node_that_replaces_another_joins_only_the_next_attempt_and_the_former_one_leaves(run, node):
    mine = order(run)
    let(node)
    later = Node(run, host="n2")
    let(later, node)
    assert (later.started, node.code, node.ranks.asked) == ([], 143, ["kill"])
    attempts.finish(run, mine, End(kind="node lost"))
    order(run, 2)
    let(later, node)
    assert (later.started, node.started) == ([2], [1])


def test_a_signal_lets_the_ranks_save_and_the_exits_are_told(run, node):
    order(run)
    let(node)
    node.signals.append("SIGTERM")
    let(node)
    assert (node.ranks.asked, node.code) == (["stop 25"], None)
    node.ranks.end(130)
    let(node, seconds=1)
    told = read_node(run, 1)
    assert (node.code, told.is_over, [one.code for one in told.exits]) == (143, True, [130])


@pytest.mark.parametrize("known", [{"job": "8"}, {"end": End(kind="oom")}, {"what": "archive", "port": 0}, {}])
def test_a_follower_joins_only_open_attempts_of_its_job(run, node, known):
    order(run, **known)
    order(run, 2, end=End(kind="void"))  # as if it were not there
    let(node)
    assert node.started == ([] if known else [1])


def test_a_leader_says_which_program_of_a_node_has_ended(followers):
    words = ["ssh", "b", "cd /x && exec kmatrix run 1"]
    followers.programs = [SimpleNamespace(args=words, returncode=255, poll=lambda: 255)]
    with pytest.raises(LaunchError, match=r"no answer from node 1") as raised:
        next(followers.gather())
    assert raised.value.why == "`ssh b` ended with exit status 255"
