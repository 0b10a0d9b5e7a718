"""A hang of several machines: explained by the one where it is, and told on all."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwise.workers import hang, heartbeat, remote_beats
from meshwise.workers.hang import HangWatch
from meshwise.workers.heartbeat import Heartbeat, beat_path
from meshwise.workers.remote_beats import RemoteBeats

ALL = "0,1,2/"


class Machine:
    """A launcher with one rank; `said` is what launchers have said to each other."""

    def __init__(self, rank: int, folder: Path, said: list[dict[str, str]]) -> None:
        self.rank = rank

        def tell(name: str, value: Any) -> None:
            said[rank][name] = json.dumps(value)

        def of_others(name: str) -> Iterator[tuple[int, Any]]:
            for node, values in enumerate(said):
                if node != rank and name in values:
                    yield node, json.loads(values[name])

        meeting = SimpleNamespace(set=tell, of_others=of_others, ranks_of=lambda node: range(node, node + 1))
        self.remote = RemoteBeats(meeting)  # type: ignore[arg-type]
        self.watch = HangWatch(folder, 60.0)
        self.beat = Heartbeat(beat_path(folder, rank))
        self.beat.loop(ours=False, compiles=False)

    def step(self, number: int) -> None:
        self.beat.step(number)
        self.beat.phase("forward")
        self.beat.leave(self.beat.enter("all-reduce of gradients", ALL))

    def look(self) -> Iterator[str]:
        found = self.watch.look({self.rank: None}, self.remote.heard())
        self.remote.tell(partial(self.watch.here, {self.rank: None}))
        if found:
            self.remote.say(found.text)
            yield found.text
        yield from self.remote.news()


class Cluster:
    def __init__(self, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter_ns=lambda: round(self.now * 1e9))
        for module in (hang, remote_beats, heartbeat):
            monkeypatch.setattr(module, "time", clock)
        self.said: list[dict[str, str]] = [{} for _ in range(count)]
        self.machines = [Machine(rank, folder, self.said) for rank in range(count)]
        for step in range(1, 10):
            self.now += 0.01
            for machine in self.machines:
                machine.step(step)

    def told(self, seconds: float) -> list[list[str]]:
        """What each machine says in this time."""
        found: list[list[str]] = [[] for _ in self.machines]
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for machine in self.machines:
                found[machine.rank] += machine.look()
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(3, tmp_path, monkeypatch)


def test_the_machine_of_the_late_rank_explains_and_all_say_it(cluster: Cluster) -> None:
    for waiting in (0, 2):
        cluster.machines[waiting].beat.enter("all-reduce of gradients", ALL)
    said = cluster.told(12)
    (text,) = said[1]
    assert "in step 9: rank 1 is in its phase forward" in text
    assert "for it in all-reduce of gradients (collective 10) since" in text
    assert said[0] == said[2] == [f"machine 1: {text}"]
    cluster.machines[1].beat.step(10)
    on = cluster.told(1)
    assert on[1][0].startswith("rank 1 goes on after") and on[0] == [f"machine 1: {on[1][0]}"]


def test_nothing_is_said_while_the_rank_for_which_others_wait_goes_on(cluster: Cluster) -> None:
    cluster.told(2)
    for waiting in (0, 2):
        cluster.machines[waiting].beat.enter("all-reduce of gradients", ALL)
    for _ in range(40):
        cluster.machines[1].beat.phase("forward")
        assert cluster.told(0.5) == [[], [], []]


def test_ranks_of_two_machines_in_different_collectives_are_told_once(cluster: Cluster) -> None:
    cluster.machines[0].beat.enter("all-reduce of gradients", "0,1/")
    cluster.machines[1].beat.enter("all-gather of parameters", ALL)
    cluster.machines[2].beat.enter("all-gather of parameters", ALL)
    said = cluster.told(12)
    assert [len(each) for each in said] == [1, 1, 1] and said[1] == said[2] == [f"machine 0: {said[0][0]}"]
    assert "ranks wait for each other in different collectives" in said[0][0]


def test_a_collective_that_all_have_come_to_is_told_by_the_first_of_them(cluster: Cluster) -> None:
    for machine in cluster.machines:
        machine.beat.enter("all-reduce of gradients", ALL)
    said = cluster.told(12)
    assert said[1] == said[2] == [f"machine 0: {said[0][0]}"]
    assert "ranks 0, 1, 2 are in all-reduce of gradients (collective 10), and it does not end" in said[0][0]


def test_silence_of_all_is_no_hang_in_a_loop_of_ones_own(cluster: Cluster) -> None:
    assert cluster.told(30) == [[], [], []]


def test_machines_tell_nothing_new_while_all_beat(cluster: Cluster) -> None:
    cluster.told(1.5)
    before = copy.deepcopy(cluster.said)
    assert before == [{"silent": "{}"}] * 3
    for _ in range(10):
        for machine in cluster.machines:
            machine.beat.phase("forward")
        cluster.told(0.5)
    assert cluster.said == before


def test_on_one_machine_there_is_nobody_to_tell() -> None:
    alone = RemoteBeats(None)
    alone.tell(dict)
    alone.say("rank 1 hangs")
    assert alone.heard() == {} and list(alone.news()) == []
