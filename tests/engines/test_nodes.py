"""Several nodes: the leader and its followers meet in files. Ranks are scripted, and time passes by ticks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kmatrix.clock import clock
from kmatrix.engines.nodes import AllRanks, Follower, Followers, newest, read_node
from kmatrix.errors import LaunchError
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End, Exit
from world import WorldClock, replaced_kernel

TICK_S = 0.2


class FakeRanks:
    """The ranks of a node, which do what is set, and note what they were asked for."""

    def __init__(self, host: str = "n0") -> None:
        self.host, self.asked, self.exits = host, list[str](), list[Exit]()

    def end(self, *codes: int) -> None:
        self.exits += [Exit(rank=0, code=code, host=self.host) for code in codes]

    def poll(self) -> bool:
        return bool(self.exits)

    def stop(self, grace_s: float) -> None:
        self.asked.append(f"stop {grace_s:g}")

    def limit(self, seconds: float) -> None:
        self.asked.append(f"limit {seconds:g}")

    def kill(self) -> None:
        self.asked.append("kill")
        self.exits = self.exits or [Exit(rank=0, code=-9, host=self.host)]


class Node:
    """A follower, by the name of its host."""

    def __init__(self, run, host="n1", job="7"):
        self.run, self.host, self.started, self.code, self.is_orphan = run, host, list[int](), None, False
        self.ranks: FakeRanks | None = None
        self.is_done = False
        self.follower = Follower(
            run=run,
            job=job,
            node=1,
            start=self.start,  # type: ignore[arg-type]
            grace_of=lambda signal: {"SIGTERM": 25}[signal],
            is_done=lambda: self.is_done,
            is_orphan=lambda: self.is_orphan,
        )
        self.program: Iterator[None] = self.follower.follow()

    def start(self, order: Attempt) -> FakeRanks:
        assert not read_node(self.run, 1).is_over, "it is noted before a rank exists"
        self.started.append(order.number)
        self.ranks = FakeRanks(self.host)
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
        clock.real = WorldClock()
        attempts.folder(tmp_path).mkdir()
        yield tmp_path


def order(run, number=1, job="7", **known) -> Attempt:
    mine = Attempt(number=number, job=job, nodes=2, address="n0", port=29500, **known)
    attempts.take(run, mine)
    return mine


def let(*programs, seconds, pulse=None):
    """Let programs go on. pulse: the attempt of a leader that lives."""
    beaten = None
    for _ in range(int(seconds / TICK_S)):
        clock.sleep(TICK_S)
        for one in programs:
            next(one, None)
        if pulse is not None and int(clock.monotonic()) % 10 == 0:
            beaten = attempts.beat(pulse[0], beaten or pulse[1], 0.0)


def gathered(followers, *nodes, seconds=10.0):
    wait = followers.gather()
    let(wait, *nodes, seconds=seconds)
    return next(wait, None) is None


def test_two_nodes_train_an_attempt_and_end(run):
    followers, node = Followers(run=run, job="7", nodes=2), Node(run)
    assert not gathered(followers)
    assert gathered(followers, node)
    mine = order(run)
    let(node, seconds=3)
    assert node.started == [1]
    here = FakeRanks()
    both = AllRanks(1, here, followers)  # type: ignore[arg-type]
    here.end(0)
    assert not both.poll(), "the other node has not told its exits yet"
    node.ranks.end(0)
    let(node, seconds=3)
    assert both.poll()
    assert [(one.host, one.code) for one in both.exits] == [("n0", 0), ("n1", 0)]
    attempts.finish(run, mine, End(kind="finished"))
    let(node, seconds=3)
    assert node.code is None, "it leaves when the run is done, not with an attempt"
    node.is_done = True
    let(node, seconds=3)
    assert node.code == 0


def test_the_next_attempt_waits_until_no_node_has_ranks_of_the_former_one(run):
    followers, node = Followers(run=run, job="7", nodes=2), Node(run)
    mine = order(run)
    let(node, seconds=3)
    attempts.finish(run, mine, End(kind="oom"))
    assert not gathered(followers, node)
    assert set(node.ranks.asked) == {"limit 5"}
    node.ranks.end(1)
    assert gathered(followers, node)
    order(run, 2)
    let(node, seconds=3)
    assert node.started == [1, 2]


@pytest.mark.parametrize(("because", "code"), [("a lost leader", None), ("a newer number", None), ("a moved run", 143)])
def test_ranks_of_a_follower_do_not_outlive_their_attempt(run, because, code):
    node, mine = Node(run), order(run)
    let(node, seconds=100, pulse=(run, mine))
    assert (node.started, node.ranks.asked) == ([1], [])
    if because == "a newer number":
        order(run, 2, job="8")
    if because == "a moved run":
        (run / "nodes").rename(run / "elsewhere")
    let(node, seconds=70 if because == "a lost leader" else 3)
    assert (node.ranks.asked[-1], node.code, node.started) == ("kill", code, [1])


def test_a_lost_node_is_named_within_a_minute_or_so_and_ends_the_attempt(run):
    followers, node = Followers(run=run, job="7", nodes=2), Node(run)
    order(run)
    here = FakeRanks()
    both = AllRanks(1, here, followers)  # type: ignore[arg-type]
    let(node, polled(both), seconds=30)
    clock.sleep(3600)  # this process was suspended: it has not looked
    let(polled(both), seconds=50)
    assert both.trouble is None
    let(polled(both), seconds=12)
    assert both.trouble == ("node lost", f"{read_node(run, 1).host} has not answered for 60 s")
    assert (here.asked, both.poll()) == (["kill"], True)


def polled(ranks):
    while True:
        ranks.poll()
        yield


@pytest.mark.parametrize(
    ("here", "there", "cause"),
    [
        ((1,), (-9,), "n1"),  # rank 0 has lost its peer
        ((-11,), (1,), "n0"),
        ((), (1,), "n1"),  # those of node 0 are killed because of it
        ((1, -9), (), "n0"),
    ],
)
def test_the_first_exit_is_the_cause_on_whatever_node(run, here, there, cause):
    followers, node, own = Followers(run=run, job="7", nodes=2), Node(run), FakeRanks()
    order(run)
    let(node, seconds=3)
    both = AllRanks(1, own, followers)  # type: ignore[arg-type]
    own.end(*here)
    if there:
        node.ranks.end(*there)
    let(node, polled(both), seconds=5)
    if not own.exits:
        assert "limit 5" in own.asked
        own.kill()
    let(polled(both), seconds=11)
    assert both.poll(), "a node that tells nothing is not waited for"
    assert both.exits[0].host == cause


def test_a_node_that_replaces_another_joins_only_the_next_attempt_and_the_former_one_leaves(run):
    former, mine = Node(run), order(run)
    let(former, seconds=3)
    node = Node(run, host="n2")
    let(node, former, seconds=3)
    assert (node.started, former.code) == ([], 143)
    attempts.finish(run, mine, End(kind="node lost"))
    order(run, 2)
    let(node, former, seconds=3)
    assert (node.started, former.started) == ([2], [1])
    assert former.ranks.asked == ["kill"]


def test_a_signal_lets_the_ranks_save_and_the_exits_are_told(run):
    node, _ = Node(run), order(run)
    let(node, seconds=3)
    node.follower.signals.append("SIGTERM")
    let(node, seconds=3)
    assert (node.ranks.asked, node.code) == (["stop 25"], None)
    node.ranks.end(130)
    let(node, seconds=1)
    assert node.code == 143
    told = read_node(run, 1)
    assert (told.is_over, [one.code for one in told.exits]) == (True, [130])


def test_a_follower_ends_with_the_program_that_has_started_it(run):
    node, _ = Node(run), order(run)
    let(node, seconds=3)
    node.is_orphan = True
    let(node, seconds=3)
    assert (node.ranks.asked, node.code) == (["kill"], 143)


@pytest.mark.parametrize("known", [{"job": "8"}, {"end": End(kind="oom")}, {"what": "archive"}])
def test_a_follower_joins_only_open_attempts_of_its_job(run, known):
    node = Node(run)
    attempts.take(run, Attempt(number=1, **{"job": "7", "port": 0 if "what" in known else 29500} | known))
    let(node, seconds=5)
    assert node.started == []


def test_a_leader_says_which_program_of_a_node_has_ended(run):
    ended = SimpleNamespace(args=["ssh", "b"], returncode=255, poll=lambda: 255)
    followers = Followers(run=run, job="7", nodes=2, programs=[ended])
    with pytest.raises(LaunchError, match=r"no answer from node 1") as raised:
        next(followers.gather())
    assert raised.value.why == "['ssh', 'b'] ended with exit status 255"


def test_a_void_attempt_is_not_the_newest(run):
    order(run, end=End(kind="signal"))
    order(run, 2, end=End(kind="void"))
    assert newest(run).number == 1
