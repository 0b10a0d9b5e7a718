"""Who is asked for the state after the last step, how long they are waited for, and the memory that they write in."""

from __future__ import annotations

import pytest

from meshwise.workers import rescue
from meshwise.workers.failure import Failure
from meshwise.workers.kept_memory import KeptMemory
from meshwise.workers.rescue import Rescue


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rescue.time, "monotonic", lambda: now[0])
    return now


def test_ranks_are_asked_once_and_waited_for(clock: list[float]) -> None:
    asked: list[int] = []
    one = Rescue(asked.append)
    assert not one.is_over([0, 2])
    one.heard(0)
    one.heard(2)
    clock[0] += 5
    assert not one.is_over([0, 2])
    one.over(0)
    assert not one.is_over([0, 2])
    one.over(2)
    assert one.is_over([0, 2]) and asked == [0, 2]


def test_a_rank_that_is_stopped_or_ends_is_not_waited_for(clock: list[float]) -> None:
    one = Rescue(lambda rank: None)
    assert not one.is_over([0, 1])
    one.heard(0)
    one.over(0)
    clock[0] += 1.1
    assert one.is_over([0, 1])
    other = Rescue(lambda rank: None)
    assert not other.is_over([0, 1])
    assert other.is_over([])


def test_after_what_has_spoiled_the_state_it_is_not_wanted() -> None:
    one = Rescue(lambda rank: None)
    killed, memory = Failure(0, "killed", ""), Failure(0, "raised", "", smaller=("plan", "why"))
    assert not one.is_wanted(killed)
    one.possible = True
    assert one.is_wanted(killed) and one.is_wanted(memory)
    assert not one.is_wanted(Failure(0, "corrupt", "")) and not one.is_wanted(Failure(0, "raised", ""))


def test_what_is_written_into_kept_memory_is_there_for_others() -> None:
    with KeptMemory(2) as kept:
        with kept.path(1).open("r+b") as file:
            file.write(b"state")
        assert kept.path(1).read_bytes() == b"state" and kept.path(0).read_bytes() == b""
