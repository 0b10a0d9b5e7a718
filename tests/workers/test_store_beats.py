"""Counters in torch's store: who is silent is named, who stood still itself blames nobody."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from meshwise.spec.world import World
from meshwise.workers import store_beats
from meshwise.workers.store_beats import BEATS, DONE, LOST, Silence, StoreBeats


def test_silence_is_added_up_until_a_change_and_time_without_a_look_counts_little() -> None:
    times = iter([0.0, 0.5, 1.0, 1.5, 100.0, 100.5])
    silence = Silence(lambda: next(times))
    assert [silence.look(value) for value in (7, 7, 7, 7, 8)] == [0.0, 0.5, 1.0, 2.0, 0.0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_beats, "ROUND", 0.01)


Lost = queue.SimpleQueue[tuple[str, list[int]]]


def beats_of(rank: int, store: Any, limit: float) -> tuple[StoreBeats, Lost]:
    lost = Lost()

    def tell(text: str, ranks: list[int]) -> None:
        lost.put((text, ranks))

    return StoreBeats(World(rank, 3, rank, 3, "cpu"), store, f"n{rank}", tell, lambda: limit), lost


def test_rank_0_names_a_silent_rank_to_all_and_not_one_that_has_ended() -> None:
    store = HashStore()
    store.set(f"{BEATS}/1", "41 n1, process 7")
    store.set(f"{BEATS}/2", DONE)
    first, lost = beats_of(0, store, 0.05)
    first.begin()
    said, ranks = lost.get(timeout=60)
    assert ranks == [1] and said.startswith("rank 1 (n1, process 7): silent for") and store.get(LOST).decode() == said
    second, lost = beats_of(2, store, 1000.0)
    second.begin()
    assert lost.get(timeout=60) == (said, [])


def test_a_store_that_does_not_answer_is_rank_0s_silence() -> None:
    class Cut(HashStore):  # type: ignore[misc]
        answers = 3

        def set(self, key: str, value: str) -> None:
            self.answers -= 1
            if self.answers < 0:
                threading.Event().wait()
            super().set(key, value)

    store = Cut()
    HashStore.set(store, f"{BEATS}/0", "5 n0")
    beats, lost = beats_of(1, store, 0.05)
    beats.begin()
    said, ranks = lost.get(timeout=60)
    assert ranks == [0] and said.startswith("rank 0 (n0): silent for")


def test_the_end_of_a_program_is_no_silence() -> None:
    store = HashStore()
    first, lost = beats_of(0, store, 1000.0)
    first.begin()
    first.end()
    store.wait([f"{BEATS}/0"])
    assert lost.empty()
