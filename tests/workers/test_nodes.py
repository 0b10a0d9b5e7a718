"""Launchers of several machines: what they tell each other, and that a lost one is noticed (workers/nodes.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers import meeting
from meshwise.workers.meeting import Meeting
from meshwise.workers.nodes import Nodes


class Shared:
    """A store for all, in memory, with a link to each machine that can be cut."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.links: dict[int, str] = {}
        self.nodes: list[Nodes] = []

    def link(self, node: int) -> Any:
        self.links[node] = "up"
        return Link(self, node)


class Link:
    def __init__(self, shared: Shared, node: int) -> None:
        self.shared, self.node = shared, node

    def _pass(self) -> None:
        while self.shared.links[self.node] == "dead":
            time.sleep(0.01)
        if self.shared.links[self.node] == "closed":
            raise RuntimeError("connection closed")

    def set(self, key: str, value: str) -> None:
        self._pass()
        self.shared.kept[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._pass()
        return all(key in self.shared.kept for key in keys)

    def get(self, key: str) -> bytes:
        self._pass()
        return self.shared.kept[key]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    monkeypatch.setattr(meeting, "ROUND", 0.01)
    monkeypatch.setattr(meeting, "SILENCE", 0.3)
    made = Shared()
    yield made
    made.links.update(dict.fromkeys(made.links, "closed"))
    for listener in [node.listener for node in made.nodes if node.listener]:
        listener.close()


def met(shared: Shared, sizes: list[int]) -> list[Nodes]:
    def meet(node: int) -> Nodes:
        return Nodes(Meeting(lambda: shared.link(node), node, len(sizes)), node, len(sizes), sizes[node], "here")

    with ThreadPoolExecutor(len(sizes)) as pool:
        shared.nodes += list(pool.map(meet, range(len(sizes))))
    return shared.nodes


def until(true: Callable[[], object]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_machines_agree_on_their_ranks_and_where_rank_0_listens(shared: Shared) -> None:
    nodes = met(shared, [2, 1, 3])
    assert [(n.first_rank, n.size) for n in nodes] == [(0, 6), (2, 6), (3, 6)]
    assert len({n.port for n in nodes}) == 1
    assert [n.lost() for n in nodes] == [None] * 3


def test_a_machine_behind_a_dead_link_is_lost_to_the_others_and_the_others_to_it(shared: Shared) -> None:
    nodes = met(shared, [2, 2, 1])
    shared.links[1] = "dead"
    for node in nodes:
        until(node.lost)
    texts = [lost.message for lost in (node.lost() for node in nodes) if lost]
    assert texts[0].startswith("machine 1 of 3 (ranks 2 to 3) is lost: no word from it") and "machine 1" in texts[2]
    assert texts[1].startswith("machine 0 of 3 (ranks 0 to 1) is lost")
    lost = nodes[0].lost()
    assert lost is not None and lost.of_machine and lost.exit_code == 85
    assert nodes[1].try_get("failed") is None  # asked of a dead link, and answered at once


def test_the_store_that_is_gone_is_its_machine(shared: Shared) -> None:
    nodes = met(shared, [1, 1])
    shared.links[1] = "closed"
    until(nodes[1].lost)
    lost = nodes[1].lost()
    assert lost is not None and "machine 0 of 2 (rank 0) is lost: its launcher is gone" in lost.message


def test_a_failure_is_heard_before_the_first_machine_leaves(shared: Shared) -> None:
    nodes = met(shared, [1, 1])
    assert nodes[1].failed_elsewhere() is None
    told = threading.Thread(target=nodes[0].fail, args=("rank 0 was killed.", 0, 85))
    told.start()
    until(lambda: nodes[1].try_get("failed"))
    assert told.is_alive()
    error = nodes[1].failed_elsewhere()
    told.join(timeout=30)
    assert error is not None and str(error) == "on another machine:\nrank 0 was killed." and error.exit_code == 85


def test_a_machine_that_is_done_is_not_lost(shared: Shared) -> None:
    nodes = met(shared, [1, 1, 1])
    nodes[1].leave()
    time.sleep(0.6)
    assert nodes[2].lost() is None and nodes[0].lost() is None
    last = threading.Thread(target=nodes[0].leave)
    last.start()
    last.join(timeout=0.1)
    assert last.is_alive()  # the store is needed
    nodes[2].leave()
    last.join(timeout=30)
    assert not last.is_alive()


def test_different_programs_are_refused_on_all_machines(shared: Shared) -> None:
    nodes = met(shared, [1, 1, 1])

    def compared(node: int) -> str:
        try:
            nodes[node].compare({"job": "gpt", "plan": "Plan(data=3)" if node != 2 else "Plan(shard=3)"})
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        texts = set(pool.map(compared, range(3)))
    assert len(texts) == 1 and "machines 0 and 2 differ in their plan: Plan(data=3) and Plan(shard=3)" in texts.pop()


def test_a_meeting_that_cannot_be_is_refused(shared: Shared) -> None:
    def connect() -> Any:
        raise RuntimeError("the port is taken\nand more")

    with pytest.raises(UsageError, match=r"^the port is taken$"):
        Nodes(Meeting(connect, 0, 2), 0, 2, 1, "here")
