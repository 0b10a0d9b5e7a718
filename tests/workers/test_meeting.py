"""Launchers of one attempt meet at torch's store: who may come, what they compare, who is lost, who failed first.

Each launcher is a thread here. With processes on hosts of their own: tests/faults/test_machines.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed
from meshwise.workers import meeting as module
from meshwise.workers import rendezvous
from meshwise.workers.board import KEY
from meshwise.workers.failure import Failure
from meshwise.workers.meeting import Meeting
from meshwise.workers.places.place import Place
from tests.hosts import free_port

SIZES = (2, 1, 3)  # workers of each machine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.05)
    monkeypatch.setattr(module, "SILENCE", 1.0)
    monkeypatch.setattr(module, "STOOD", 0.5)
    monkeypatch.setattr(rendezvous, "TRY", 1.0)


def place(node: int, port: int, nodes: int = 3, key: str = "job 7") -> Place:
    address = ("127.0.0.1", port)
    return Place("Slurm", rank=node, size=nodes, node=node, nodes=nodes, address=address, key=key)


def all_of(one: Callable[[int], Any], count: int = 3) -> list[Any]:
    """What each machine returns, or the error that it raises."""

    def told(node: int) -> Any:
        try:
            return one(node)
        except MeshwiseError as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(told, range(count)))


@pytest.fixture
def three() -> Iterator[list[Meeting]]:
    port = free_port()

    def come(node: int) -> Meeting:
        made = Meeting(place(node, port), SIZES[node])
        made.meet()
        return made

    made = all_of(come)
    yield made
    all_of(lambda node: made[node].leave())
    assert not module.hangs()


def until(condition: Callable[[], Any]) -> Any:
    limit = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def frozen(one: Meeting) -> None:
    """A machine says nothing more."""
    one._over.set()


def test_ranks_are_counted_by_machine_and_all_know_where_rank_0_is(three: list[Meeting]) -> None:
    assert [(one.first_rank, one.size) for one in three] == [(0, 6), (2, 6), (3, 6)]
    assert three[0].listener is not None
    port = three[0].listener.getsockname()[1]
    assert {(one.master, one.port) for one in three} == {("127.0.0.1", port)}


def test_what_is_alike_is_accepted(three: list[Meeting]) -> None:
    assert all_of(lambda node: three[node].compare({"plan": "data=6"})) == [None] * 3


def test_what_differs_is_refused_on_every_machine_with_both_values(three: list[Meeting]) -> None:
    told = all_of(lambda node: three[node].compare({"plan": "data=6" if node < 2 else "shard=6"}))
    assert all(getattr(error, "exit_code", 0) == 2 for error in told)
    assert all("machines 0 and 2 differ in their plan: data=6 and shard=6." in str(error) for error in told)


def test_values_come_to_the_others_and_a_new_one_takes_the_place_of_the_old(three: list[Meeting]) -> None:
    three[1].set("halt", 15)
    until(lambda: [*three[0].of_others("halt")] == [*three[2].of_others("halt")] == [(1, 15)])
    three[1].set("halt", 10)
    until(lambda: three[2].said(1, "halt") == 10)


def test_the_first_failure_counts_on_every_machine(three: list[Meeting]) -> None:
    def fail(node: int) -> WorkerFailed:
        if node == 2:
            return until(three[node].failed_elsewhere)  # type: ignore[no-any-return]
        return three[node].fail(f"rank {node} was killed", Failure(node, "killed", "it"), 1 + node)

    first, second, third = all_of(fail)
    assert first.failure.rank == second.failure.rank == third.failure.rank in (0, 1)
    assert {first.exit_code, second.exit_code, third.exit_code} == {1 + first.failure.rank}
    assert str(third) == f"on another machine:\nrank {first.failure.rank} was killed"


def test_a_silent_machine_is_lost_for_the_others(three: list[Meeting]) -> None:
    frozen(three[1])
    lost = until(three[2].lost)
    assert (lost.rank, lost.kind, lost.exit_code) == (2, "lost", 85)
    assert lost.message.startswith("machine 1 of 3 (rank 2) is lost: it has not answered for 1.")
    with pytest.raises(WorkerFailed, match=r"machine 1 of 3"):
        three[0].get(1, "something")


def test_a_machine_that_stood_still_itself_hears_the_others_before_it_judges_them(three: list[Meeting]) -> None:
    assert three[0].lost() is None
    three[0]._looked -= 10.0
    for machine in three[0]._machines:
        machine.at -= 10.0
    assert three[0].lost() is None


def test_a_machine_that_has_left_is_not_lost(three: list[Meeting]) -> None:
    three[2].leave()
    until(lambda: three[0].said(2, "left"))
    time.sleep(1.2)
    assert three[0].lost() is None


def test_all_are_done_once_each_machine_is(three: list[Meeting]) -> None:
    assert not three[0].all_done() and not three[1].all_done()
    time.sleep(0.3)
    assert not three[0].all_done()
    until(three[2].all_done)
    until(three[0].all_done)


def test_another_start_at_the_port_is_refused(three: list[Meeting]) -> None:
    other = Meeting(place(1, three[0].place.address[1], key="job 8"), 1)  # type: ignore[index]
    with pytest.raises(UsageError, match=r"the meeting point of another start: job 7 on 3 machines, not job 8 on 3"):
        other.meet()


@pytest.mark.parametrize(("engine", "code"), [("", 2), ("KUBERNETES_SERVICE_HOST", 85)])
def test_a_second_launcher_of_a_machine_is_refused(
    engine: str, code: int, three: list[Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine:
        monkeypatch.setenv(engine, "10.0.0.1")
    other = Meeting(three[1].place, 1)
    with pytest.raises(WorkerFailed, match=r"machine 1 is there already: an earlier start has not ended") as it:
        other.meet()
    assert it.value.exit_code == code
    assert three[1].lost() is None and three[0].lost() is None


def test_a_port_that_is_in_use_is_named(three: list[Meeting]) -> None:
    with pytest.raises(UsageError, match=r"cannot listen at port \d+ \(Address already in use\). Set MASTER_PORT"):
        Meeting(replace(three[0].place, key="job 8"), 1).meet()


def stranger(one: Meeting) -> Any:
    """The store, as another program that reaches the port sees it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", one.place.address[1], None, False, wait_for_workers=False)  # type: ignore[index]


FORGED = json.dumps({"node": 1, "text": "no", "exit_code": 93, "failure": None})


def test_with_a_key_nobody_else_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "only these launchers know it")
    port = free_port()

    def come(node: int) -> Meeting:
        made = Meeting(place(node, port, 2), 1)
        made.meet()
        return made

    one, two = all_of(come, 2)
    told = stranger(one).get("meshwise/said/1").decode()
    for forged in ("0" * 64 + FORGED, told[:64] + FORGED, FORGED):
        stranger(one).set("meshwise/failed", forged)
        for each in (one, two):
            lost = until(each.lost)
            assert lost.exit_code == 85 and each.failed_elsewhere() is None
    all_of(lambda node: (one, two)[node].leave(), 2)


def test_garbage_of_a_stranger_ends_the_attempt_and_nothing_else(three: list[Meeting]) -> None:
    stranger(three[0]).set("meshwise/failed", b"\xff\x00")
    assert until(three[2].lost).exit_code == 85
