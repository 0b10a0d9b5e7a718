"""Launchers of several machines: what they tell each other, and that a lost one is noticed (workers/nodes.py, by
workers/store.py)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers import store as stores
from meshwise.workers.failure import Failure
from meshwise.workers.machines import Machines
from meshwise.workers.nodes import Member, Nodes
from meshwise.workers.secret import Secret
from meshwise.workers.store import Answer, Link, Meeting, Store

SECRET = Secret(b"known to these alone", Path("nowhere"))


class Cluster:
    """Machines of which each keeps a store, with a link to each machine that can be cut."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.links: dict[int, str] = {}
        self.machines: list[Machines] = []

    def link(self, node: int, store: Any) -> Any:
        self.links[node] = "up"
        return Cut(self, node, store)


class Cut:
    def __init__(self, cluster: Cluster, node: int, store: Any) -> None:
        self.cluster, self.node, self.store = cluster, node, store

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        while self.cluster.links[self.node] == "dead":
            time.sleep(0.01)
        if self.cluster.links[self.node] == "closed":
            raise ConnectionResetError("connection closed")
        answer: Answer = self.store.exchange(name, told, since)
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(stores, "ROUND", 0.01)
    monkeypatch.setattr(stores, "SILENCE", 0.3)
    made = Cluster()
    yield made
    made.links.update(dict.fromkeys(made.links, "closed"))
    for machines in made.machines:
        if machines.nodes.listener:
            machines.nodes.listener.close()
    for store in made.stores:
        store.close()


def met(cluster: Cluster, sizes: list[int]) -> list[Nodes]:
    def meet(node: int) -> Nodes:
        store = Store(SECRET.value)
        cluster.stores.append(store)
        first = cluster.stores[0]
        one = Meeting(lambda: cluster.link(node, first), f"{node}.name")
        me = Member(node, f"{node}.name", sizes[node], "127.0.0.1", store.port)
        machines = Machines(one, store, me, len(sizes), SECRET)
        cluster.machines.append(machines)
        return machines.meet()

    cluster.stores.append(Store(SECRET.value))
    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(meet, range(len(sizes))))


def until(true: Callable[[], object]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_machines_agree_on_their_ranks_and_where_rank_0_listens(cluster: Cluster) -> None:
    nodes = met(cluster, [2, 1, 3])
    assert [(n.first_rank, n.size) for n in nodes] == [(0, 6), (2, 6), (3, 6)]
    assert len({n.port for n in nodes}) == 1 and [n.leads for n in nodes] == [True, False, False]
    assert [n.lost() for n in nodes] == [None] * 3


def test_a_machine_behind_a_dead_link_is_lost_to_the_others_and_the_others_to_it(cluster: Cluster) -> None:
    nodes = met(cluster, [2, 2, 1])
    cluster.links[1] = "dead"
    for node in nodes:
        until(node.lost)
    texts = [lost.message for lost in (node.lost() for node in nodes) if lost]
    assert texts[0].startswith("machine 1 of 3 (ranks 2, 3) is lost: it has not answered") and "machine 1" in texts[2]
    assert texts[1].startswith("machine 0 of 3 (ranks 0, 1) is lost")
    lost = nodes[0].lost()
    assert lost is not None and lost.of_machine and lost.exit_code == 85
    assert nodes[1].try_get("failed/0") is None  # asked of a dead link, and answered at once


def test_the_store_that_is_gone_is_its_machine(cluster: Cluster) -> None:
    nodes = met(cluster, [1, 1])
    cluster.links[1] = "closed"
    until(nodes[1].lost)
    lost = nodes[1].lost()
    assert lost is not None and "machine 0 of 2 (rank 0) is lost: its launcher is gone" in lost.message


def test_a_failure_is_heard_before_the_first_machine_leaves(cluster: Cluster) -> None:
    nodes = met(cluster, [1, 1])
    assert nodes[1].failed_elsewhere() is None
    failure = Failure(0, "killed", "was killed", exit_code=85, step=3)
    told = threading.Thread(target=nodes[0].fail, args=("rank 0 was killed.", failure, 85))
    told.start()
    until(lambda: nodes[1].try_get("failed/0"))
    assert told.is_alive()
    error = nodes[1].failed_elsewhere()
    told.join(timeout=30)
    assert error is not None and str(error) == "on another machine:\nrank 0 was killed." and error.exit_code == 85
    assert error.failure is not None and (error.failure.kind, error.failure.step) == ("killed", 3)


def test_all_wait_until_the_work_is_done_everywhere_and_the_first_until_all_have_left(cluster: Cluster) -> None:
    nodes = met(cluster, [1, 1, 1])
    assert not nodes[1].all_done() and not nodes[2].all_done()
    until(nodes[0].all_done)
    until(nodes[1].all_done)
    nodes[1].leave()
    last = threading.Thread(target=nodes[0].leave)
    last.start()
    last.join(timeout=0.1)
    assert last.is_alive()  # the store is needed
    nodes[2].leave()
    last.join(timeout=30)
    assert not last.is_alive()


def test_different_programs_are_refused_on_all_machines(cluster: Cluster) -> None:
    nodes = met(cluster, [1, 1, 1])

    def compared(node: int) -> str:
        try:
            nodes[node].compare({"job": "gpt", "plan": "Plan(data=3)" if node != 2 else "Plan(shard=3)"})
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        texts = set(pool.map(compared, range(3)))
    assert len(texts) == 1 and "machines 0 and 2 differ in their plan: Plan(data=3) and Plan(shard=3)" in texts.pop()


def test_a_launcher_that_was_started_again_is_not_the_one_that_was_there(cluster: Cluster) -> None:
    nodes = met(cluster, [1, 1])
    Meeting(lambda: cluster.stores[0], "1.again").set("machine/1", {"name": "1.again"})
    until(nodes[0].lost)
    lost = nodes[0].lost()
    assert lost is not None and "machine 1 of 2 (rank 1) is lost: its launcher was started again" in lost.message


def test_a_store_answers_over_a_link_and_ends_those_that_are_no_launchers(cluster: Cluster) -> None:
    store = Store(SECRET.value)
    cluster.stores.append(store)
    stranger, link = (Link(("127.0.0.1", store.port), SECRET.value, 3.0) for _ in range(2))
    stranger._line.send(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger._line.receive() == b""
    first = link.exchange("1", {"a": "x"}, 0)
    assert dict(first.new) == {"a": "x"} and list(first.silent) == ["1"]
    store.exchange("0", {"a": "y", "b": "z"}, 0)
    second = link.exchange("1", {}, first.version)
    assert dict(second.new) == {"a": "y", "b": "z"} and dict(link.exchange("1", {}, second.version).new) == {}
    for each in (stranger, link):
        each.close()
    until(lambda: store.exchange("0", {}, 0).silent["1"] == math.inf)
    store.forget_gone()  # it may be at another store, and come back
    assert list(store.exchange("0", {}, 0).silent) == ["0"]
