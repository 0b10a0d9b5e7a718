"""The step gate: whatever the ranks are doing when a halt comes, all of them stop after the same step."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from meshwise.workers.gate import StepGate

PATIENCE = 20  # seconds until a thread that does not end counts as stuck


class Line:
    """Stands for a rank's channel: keeps its answers, and gives it what the launcher says."""

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.answers: queue.Queue[int] = queue.Queue()

    def send(self, kind: str, **facts: Any) -> None:
        if kind == "halting":
            self.answers.put(facts["begun"])
        else:
            self.said = kind, facts

    def halt(self) -> int:
        self.listeners["halt"]({"kind": "halt"})
        return self.answers.get(timeout=PATIENCE)

    def last(self, step: int) -> None:
        self.listeners["last"]({"kind": "last", "step": step})


class Ranks:
    """Threads that go through their gates until these stop them; `step(rank, number)` is a rank's work."""

    def __init__(self, count: int, step: Callable[[int, int], None] = lambda rank, number: None) -> None:
        self.lines = [Line() for _ in range(count)]
        self.gates = [StepGate(line) for line in self.lines]  # type: ignore[arg-type]
        self.steps = [0] * count
        self.errors: list[Exception] = []
        self._step = step
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(count)]

    def _run(self, rank: int) -> None:
        try:
            while self.gates[rank].begin():
                self.steps[rank] += 1
                self._step(rank, self.steps[rank])
        except Exception as error:
            self.errors.append(error)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def halt(self) -> list[int]:
        """What a launcher does; returns the answers."""
        answers = [line.halt() for line in self.lines]
        for line in self.lines:
            line.last(max(answers))
        return answers

    def ended(self) -> bool:
        for thread in self._threads:
            thread.join(timeout=PATIENCE)
        return not any(thread.is_alive() for thread in self._threads)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ranks_that_run_freely_all_stop_after_the_largest_step_begun(count: int) -> None:
    for _ in range(3):
        ranks = Ranks(count)
        ranks.start()
        answers = ranks.halt()
        assert ranks.ended()
        assert ranks.steps == [max(answers)] * count


@pytest.mark.parametrize("halt_at", [1, 2, 7])
def test_no_rank_waits_in_a_collective_for_one_that_stopped_earlier(halt_at: int) -> None:
    together = threading.Barrier(3)
    reached = threading.Event()

    def step(rank: int, number: int) -> None:
        if rank == 0 and number == halt_at:
            reached.set()
        together.wait(timeout=PATIENCE)  # a collective: breaks when a rank does not come

    ranks = Ranks(3, step)
    ranks.start()
    assert reached.wait(PATIENCE)
    ranks.halt()
    assert ranks.ended()
    assert ranks.errors == []
    assert len(set(ranks.steps)) == 1


def test_a_rank_behind_catches_up_and_a_rank_at_the_last_step_stops() -> None:
    ranks = Ranks(2)
    ahead, behind = ranks.gates
    assert [ahead.begin() for _ in range(5)] == [True] * 5
    assert [behind.begin() for _ in range(2)] == [True] * 2
    assert ranks.halt() == [5, 2]
    assert ahead.begin() is False
    assert [behind.begin() for _ in range(4)] == [True, True, True, False]
    assert behind.begin() is False  # and it stays so


def test_a_frozen_gate_lets_nobody_through_until_the_last_step_is_known() -> None:
    ranks = Ranks(1)
    line, gate = ranks.lines[0], ranks.gates[0]
    gate.begin()
    assert line.halt() == 1
    passed: queue.Queue[bool] = queue.Queue()
    threading.Thread(target=lambda: passed.put(gate.begin()), daemon=True).start()
    with pytest.raises(queue.Empty):
        passed.get(timeout=0.05)
    line.last(2)
    assert passed.get(timeout=PATIENCE) is True


def test_the_answer_counts_every_step_that_gets_through() -> None:
    for _ in range(20):  # the freeze races with begin: a step must be counted before the answer or wait after it
        ranks = Ranks(1)
        ranks.start()
        answer = ranks.lines[0].halt()
        ranks.lines[0].last(answer)
        assert ranks.ended()
        assert ranks.steps == [answer]


def test_a_halt_before_the_first_step_stops_before_it() -> None:
    ranks = Ranks(2)
    assert ranks.halt() == [0, 0]
    ranks.start()
    assert ranks.ended()
    assert ranks.steps == [0, 0]


def test_without_a_channel_every_step_begins() -> None:
    gate = StepGate()
    assert all(gate.begin() for _ in range(100))


def test_a_stopped_loop_says_after_which_step() -> None:
    ranks = Ranks(1)
    assert isinstance(ranks.gates[0].stop(12, 3), KeyboardInterrupt)
    assert ranks.lines[0].said == ("stopping", {"step": 12, "epoch": 3, "saves": False})


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_script_that_has_come_to_no_step_is_interrupted(interrupts: bool) -> None:
    ranks = Ranks(1)
    ranks.gates[0].interrupts = interrupts
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        threading.Thread(target=ranks.halt, daemon=True).start()
        assert came.wait(PATIENCE if interrupts else 0.1) == interrupts
    finally:
        signal.signal(signal.SIGINT, before)
