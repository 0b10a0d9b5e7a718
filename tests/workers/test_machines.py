"""Machines from one attempt to the next: who reports, who leads, and what the others are told (workers/machines.py);
how a machine comes to the others (workers/node_options.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.workers import machines as module
from meshwise.workers import node_options, store
from meshwise.workers.channel import free_port
from meshwise.workers.machines import Machines
from meshwise.workers.node_options import NodeOptions, joined
from meshwise.workers.nodes import Nodes
from meshwise.workers.secret import VARIABLE
from meshwise.workers.store import Store


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines of a test have one in common."""
    monkeypatch.setenv(VARIABLE, "of these machines and nobody else's")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machines]]:
    """Launchers of three machines with two workers each, which have met."""
    monkeypatch.setattr(store, "ROUND", 0.01)
    monkeypatch.setattr(store, "SILENCE", 0.5)
    monkeypatch.setattr(module, "MOVE_TIMEOUT", 2.0)
    port = free_port()

    def meet(node: int) -> Machines:
        one = joined(("127.0.0.1", port), node, 3, 2)
        one.meet()
        return one

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(meet, range(3)))
    yield made
    for one in made:
        end(one)


def end(one: Machines) -> None:
    """A machine is gone."""
    one.meeting.close()
    one.store.close()
    doors = [t for t in threading.enumerate() if t.name.endswith(f" {one.store.port}")]
    for thread in doors:  # they hold the port, and the links
        thread.join(30)
    time.sleep(0.05)  # the others hear that the links are closed
    if one.nodes.listener:
        one.nodes.listener.close()


def look() -> None:
    """Nothing ends the wait."""


def following(one: Machines) -> Nodes | dict[str, Any]:
    one.report({"size": 2})
    return one.next(look)


def test_the_leader_hears_all_and_announces_the_next_attempt(three: list[Machines]) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(following, one) for one in three[1:]]
        three[0].report({"size": 1})
        assert three[0].next(look) is three[0].nodes and three[0].leads
        reports = three[0].reports(look)
        assert {member.node: told["size"] for member, told in reports.items()} == {0: 1, 1: 2, 2: 2}
        members = [replace(member, size=told["size"]) for member, told in reports.items()]
        assert three[0].nodes.listener is not None
        three[0].nodes.listener.close()  # as a launch does
        three[0].announce(2, members, {"plan": "x"})
        found = [other.result(timeout=30) for other in others]
    for nodes in found:
        assert isinstance(nodes, Nodes) and nodes.begins.number == 2 and nodes.begins.facts == {"plan": "x"}
    assert [nodes.first_rank for nodes in found if isinstance(nodes, Nodes)] == [1, 3]


def test_all_are_told_how_the_run_ends(three: list[Machines]) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(following, one) for one in three[1:]]
        three[0].end({"text": "over", "code": 93})
        assert [other.result(timeout=30) for other in others] == [{"text": "over", "code": 93}] * 2


def test_where_the_leader_is_lost_the_next_one_leads(three: list[Machines]) -> None:
    end(three[0])
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(following, three[2])
        assert following(three[1]) is three[1].nodes and three[1].leads
        reports = three[1].reports(look)
        assert sorted(member.node for member in reports) == [1, 2]
        three[1].announce(2, list(reports), {})
        nodes = last.result(timeout=30)
    assert isinstance(nodes, Nodes) and [m.node for m in nodes.members] == [1, 2] and nodes.first_rank == 2
    assert nodes.lost() is None and three[1].nodes.lost() is None


def test_each_machine_may_be_lost_and_come_back_in_turn(three: list[Machines], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_EVERY", 0.1)
    address = three[0].rdzv
    assert address is not None
    number = 1
    with ThreadPoolExecutor(4) as pool:
        for lost, leads in ((0, 1), (1, 2), (2, 0), (0, 1)):
            end(three[lost])
            third = 3 - lost - leads
            follows = pool.submit(following, three[third])
            assert following(three[leads]) is three[leads].nodes and three[leads].leads
            members = list(three[leads].reports(look))
            assert sorted(member.node for member in members) == sorted((leads, third))
            three[leads].announce(number := number + 1, members, {})
            assert isinstance(follows.result(timeout=30), Nodes)
            again = joined(address, lost, 3, 2)
            joins, three[lost] = pool.submit(again.meet), again
            while not (joiners := three[leads].joiners()):
                time.sleep(0.01)
            assert [member.name for member in joiners] == [again.me.name]
            follows = pool.submit(following, three[third])
            three[leads].report({"size": 2})
            listener = three[leads].nodes.listener
            assert listener is not None
            listener.close()  # as a launch does
            three[leads].announce(number := number + 1, [*three[leads].reports(look), *joiners], {})
            assert {follows.result(timeout=30).size, joins.result(timeout=30).size} == {6}


def test_a_machine_that_reaches_no_other_leads_alone(three: list[Machines]) -> None:
    for one in three[:2]:
        end(one)
    assert following(three[2]) is three[2].nodes and three[2].leads
    assert [member.node for member in three[2].reports(look)] == [2]


def test_a_machine_with_another_secret_gets_a_sentence_and_the_others_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_options, "STRANGERS", 0.1)
    address = "127.0.0.1", free_port()
    first = joined(address, 0, 2, 1)
    with monkeypatch.context() as other:
        other.setenv(VARIABLE, "of other machines than these are, and long")
        with pytest.raises(
            UsageError, match=rf"does not know the secret that this machine has \({VARIABLE}\). Start all"
        ):
            joined(address, 1, 2, 1)
    with monkeypatch.context() as late:
        late.setattr(module, "RENDEZVOUS_TIMEOUT", timedelta(0))
        with pytest.raises(WorkerFailed, match="not all 2 machines connected in 0 min"):
            first.meet()
    second = joined(address, 1, 2, 1)
    with ThreadPoolExecutor(2) as pool:
        assert [nodes.size for nodes in pool.map(lambda one: one.meet(), (first, second))] == [2, 2]
    for one in (first, second):
        end(one)


def test_a_port_that_is_taken_is_refused() -> None:
    taken = Store(b"of others")
    with pytest.raises(UsageError, match=rf"cannot meet at --rdzv here:{taken.port} .*Is the port free here"):
        joined(("here", taken.port), 0, 2, 1)
    taken.close()


@pytest.mark.parametrize("rdzv", ["", "node0", "node0:x"])
def test_a_rendezvous_that_cannot_be_is_refused(rdzv: str) -> None:
    with pytest.raises(UsageError, match="this option must be the address and port of machine 0"):
        NodeOptions(nnodes=2, rdzv=rdzv).rendezvous(1)
