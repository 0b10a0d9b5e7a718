"""Who is asked for the state after the last step, how long they are waited for, and the memory that they write in.

Of workers/rescue.py and workers/kept_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwise.workers import rescue
from meshwise.workers.failure import Failure
from meshwise.workers.kept_memory import KeptMemory
from meshwise.workers.rescue import Rescue

KILLED = Failure(1, "killed", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rescue.time, "monotonic", lambda: now[0])
    return now


def possible(ask: Callable[[int], None] = lambda rank: None) -> Rescue:
    one = Rescue(ask)
    one.hear(0, "rescues")
    return one


def test_ranks_are_asked_once_and_waited_for(clock: list[float]) -> None:
    asked: list[int] = []
    one = possible(asked.append)
    assert not one.is_over(KILLED, [0, 2])
    one.hear(0, "rescuing")
    one.hear(2, "rescuing")
    clock[0] += 5
    assert not one.is_over(KILLED, [0, 2])
    one.hear(0, "rescued")
    assert not one.is_over(KILLED, [0, 2])
    one.hear(2, "rescued")
    assert one.is_over(KILLED, [0, 2]) and asked == [0, 2]


def test_a_rank_that_is_stopped_or_ends_is_not_waited_for(clock: list[float]) -> None:
    one = possible()
    assert not one.is_over(KILLED, [0, 1])
    one.hear(0, "rescuing")
    one.hear(0, "rescued")
    clock[0] += 1.1
    assert one.is_over(KILLED, [0, 1])
    other = possible()
    assert not other.is_over(KILLED, [0, 1])
    assert other.is_over(KILLED, [])


def test_after_what_has_spoiled_the_state_nobody_is_asked() -> None:
    asked: list[int] = []
    assert Rescue(asked.append).is_over(KILLED, [0])  # nobody keeps anything
    assert possible(asked.append).is_over(Failure(0, "corrupt", ""), [0])
    assert possible(asked.append).is_over(Failure(0, "raised", ""), [0])
    assert asked == []
    assert not possible(asked.append).is_over(Failure(0, "raised", "", smaller=("plan", "why")), [0])
    assert asked == [0]


def test_what_is_written_into_kept_memory_is_there_for_others() -> None:
    with KeptMemory(2) as kept:
        with kept.path(1).open("r+b") as file:
            file.write(b"state")
        assert kept.path(1).read_bytes() == b"state" and kept.path(0).read_bytes() == b""
