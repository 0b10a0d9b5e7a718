"""Order the forwards and backwards of each rank of a pipeline.

The order covers one step.

Orders are found by simulating the step, with actions of equal length. So ranks never deadlock, for any number of
microbatches. The 1F1B order is from PipeDream (Narayanan and others, SOSP 2019); the interleaved order is from
Megatron-LM (SC 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

CHUNKS = {"interleaved": 2}
"""The number of stages on each rank, for schedules with several stages on each rank. It is 1 for other schedules."""


@dataclass(frozen=True)
class Action:
    """One entry of a pipeline schedule: the forward or the backward of one microbatch in one stage."""

    forward: bool
    stage: int
    microbatch: int


@cache
def orders(schedule: str, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank in one step, in order. Stage s is on rank s % ranks."""
    chunks = CHUNKS.get(schedule, 1)
    waiting = [_in_turn(rank, ranks, chunks, microbatches) for rank in range(ranks)]
    kept = [_most_kept(schedule, rank, ranks, chunks, microbatches) for rank in range(ranks)]
    done: set[Action] = set()
    found: list[list[Action]] = [[] for _ in range(ranks)]
    while any(forwards or backwards for forwards, backwards in waiting):
        begun = []
        for rank, (forwards, backwards) in enumerate(waiting):
            open_now = sum(1 if action.forward else -1 for action in found[rank])
            back = bool(backwards) and _is_ready(backwards[0], ranks * chunks, done)
            if forwards and open_now < kept[rank] and _is_ready(forwards[0], ranks * chunks, done):
                begun.append((rank, forwards.pop(0)))
            elif back and (not forwards or open_now >= kept[rank]):
                begun.append((rank, backwards.pop(0)))
        for rank, action in begun:
            found[rank].append(action)
            done.add(action)
    return tuple(tuple(order) for order in found)


def _in_turn(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[list[Action], list[Action]]:
    """Return the forwards of a rank in order, and the backwards of the rank in order."""
    every = [(chunk, number) for number in range(microbatches) for chunk in range(chunks)]
    first = sorted(every, key=lambda pair: (pair[1] // ranks, pair[0], pair[1]))
    last = sorted(every, key=lambda pair: (pair[1] // ranks, -pair[0], pair[1]))
    return (
        [Action(True, chunk * ranks + rank, number) for chunk, number in first],
        [Action(False, chunk * ranks + rank, number) for chunk, number in last],
    )


def _most_kept(schedule: str, rank: int, ranks: int, chunks: int, microbatches: int) -> int:
    """Return how many forwards of a rank may wait for their backwards at the same time."""
    if schedule == "gpipe":
        return microbatches
    after = ranks - 1 - rank
    most = after + 1 if chunks == 1 else (chunks - 1) * ranks + 2 * after + 1
    return min(most, chunks * microbatches)


def _is_ready(action: Action, stages: int, done: set[Action]) -> bool:
    if action.forward:
        return action.stage == 0 or Action(True, action.stage - 1, action.microbatch) in done
    if Action(True, action.stage, action.microbatch) not in done:
        return False
    return action.stage == stages - 1 or Action(False, action.stage + 1, action.microbatch) in done


def forwards(ranks: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank for one batch that runs only forward."""
    return tuple(tuple(Action(True, chunk * ranks + rank, 0) for chunk in range(chunks)) for rank in range(ranks))


def stage_ranges(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Return the range of layers of each stage. No stage is empty, and the most expensive stage costs as little as
    possible."""
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0, 0, ())}
    for stage in range(1, stages + 1):
        for end in range(stage, len(costs) - (stages - stage) + 1):
            choices = []
            for begin in range(stage - 1, end):
                if (stage - 1, begin) in best:
                    most, squares, cuts = best[stage - 1, begin]
                    own = before[end] - before[begin]
                    choices.append((max(most, own), squares + own * own + (end - begin) ** 2, (*cuts, begin)))
            best[stage, end] = min(choices)
    return list(pairwise((*best[stages, len(costs)][2], len(costs))))
