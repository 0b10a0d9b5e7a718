"""Measure a pipeline's stages: compute, waiting, bubble.

From a step's first forward to its last backward, the bubble is the share of time in which a rank runs neither a forward
nor a backward, as the mean over ranks. The schedule's own bubble is found by simulating the recorded order of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.run_report import PipelineReport, StageReport
from meshwise.reports.spans import KIND, LANE, NO_COLLECTIVE, Spans, stage_and_microbatch

Table = NDArray[np.int64]
Place = tuple[bool, int, int]
"""Identifies an action by its direction (True for forward, False for backward), its stage, and its microbatch."""


Actions = NDArray[np.void]
"""An array of actions, with dtype ACTION, sorted by rank, then by start."""
ACTION = np.dtype(
    [(name, "<i8") for name in ("pipe", "rank", "step", "stage", "microbatch", "start", "end")]
    + [("forward", "?"), ("seconds", "<f8")]
)
"""A forward or backward pass of a microbatch through a stage. `pipe` is the number of the pipeline: the ranks of one
pipeline work on the same samples. `seconds` is the duration without waiting for another stage."""


def actions_of(spans: Spans, names: Sequence[str]) -> Actions:
    """Extract the forward and backward passes of pipeline stages from a timeline's spans."""
    places = np.array([stage_and_microbatch(name) or (-1, -1) for name in names], np.int64).reshape(-1, 2)
    found = spans[places[spans["name"], 0] >= 0]
    found = found[np.lexsort((found["start"], found["rank"]))]
    actions = np.empty(len(found), ACTION)
    for field in ("rank", "step", "start", "end"):
        actions[field] = found[field]
    actions["forward"] = found["kind"] == KIND["forward"]
    actions["stage"], actions["microbatch"] = places[found["name"]].T
    actions["pipe"] = _pipes(actions["rank"], actions["stage"])
    for rank in np.unique(found["rank"]).tolist():
        mine, received = found["rank"] == rank, _received(spans[spans["rank"] == rank], names)
        start, end = found["start"][mine], found["end"][mine]
        actions["seconds"][mine] = (end - start - (_covered(received, end) - _covered(received, start))) / 1e9
    return actions


def _place(action: Any) -> Place:
    return bool(action["forward"]), int(action["stage"]), int(action["microbatch"])


def waits_for_stages(spans: Spans, names: Sequence[str]) -> dict[tuple[int, int], int]:
    """Return when each receive of a pipeline stops waiting for another stage, by the receive's (rank, start)."""
    actions = actions_of(spans, names)
    places = actions[["pipe", "step", "forward", "stage", "microbatch", "end"]].tolist()
    ended = {(pipe, step, tuple(place)): end for pipe, step, *place, end in places}
    until = {}
    for rank in np.unique(actions["rank"]).tolist():
        mine = actions[actions["rank"] == rank]
        received = _received(spans[spans["rank"] == rank], names)
        following = np.searchsorted(mine["end"], received["start"], side="right")
        for start, at in zip(received["start"].tolist(), following.tolist(), strict=True):
            if at < len(mine):
                forward, stage, microbatch = _place(mine[at])
                source = (forward, stage - 1 if forward else stage + 1, microbatch)
                until[rank, start] = ended.get((int(mine["pipe"][at]), int(mine["step"][at]), source), start)
    return until


def pipeline_report(spans: Spans, names: Sequence[str], steps: Table) -> PipelineReport | None:
    """Report the stages and the bubble of the pipeline in these steps.
    None if there is no pipeline."""
    actions = actions_of(spans, names)
    if not actions["stage"].any() or not actions["forward"].any():
        return None
    inside = actions[np.isin(actions["step"], steps)]
    stages = [_stage(inside[inside["stage"] == stage]) for stage in np.unique(actions["stage"])]
    own = {(forward, each.stage): each.forward_seconds if forward else each.backward_seconds
           for each in stages for forward in (True, False)}  # fmt: skip
    mean = {forward: float(np.mean([own[forward, each.stage] for each in stages])) for forward in (True, False)}
    found = []
    for step in np.unique(inside["step"]):
        for pipe in np.unique(actions["pipe"]):
            some = inside[(inside["step"] == step) & (inside["pipe"] == pipe)]
            orders = [list(map(_place, some[some["rank"] == rank])) for rank in np.unique(some["rank"])]
            equal = played_bubble(orders, lambda place: mean[place[0]])
            unequal = played_bubble(orders, lambda place: own[place[:2]])
            if equal is not None and unequal is not None:
                found.append((_bubble(some), equal, unequal))
    if not found:
        return None
    bubble, equal, unequal = np.median(np.array(found), axis=0).tolist()
    return PipelineReport(stages, int(actions["microbatch"].max()) + 1, bubble, equal, unequal)


def played_bubble(orders: Sequence[Sequence[Place]], seconds: Callable[[Place], float]) -> float | None:
    """Simulate one step of a pipeline, and return its bubble: the fraction of the step that a rank spends waiting, as
    the mean over the ranks. None if the order is incomplete."""
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    ends: dict[Place, float] = {}
    done, free = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                place = forward, stage, microbatch = order[done[rank]]
                before = (forward, stage - 1, microbatch) if forward else (False, stage + 1, microbatch)
                if not forward and stage == last:
                    before = (True, stage, microbatch)
                first = forward and stage == 0
                if not first and before not in ends:
                    break
                free[rank] = ends[place] = max(free[rank], 0.0 if first else ends[before]) + seconds(place)
                done[rank] += 1
                moved = True
    if not ends or any(count < len(order) for count, order in zip(done, orders, strict=True)):
        return None
    whole = max(ends.values()) * len(orders)
    return 1 - sum(map(seconds, ends)) / whole if whole > 0 else None


def _bubble(some: Actions) -> float:
    whole = (some["end"].max() - some["start"].min()) / 1e9
    busy = some["seconds"].sum() / len(np.unique(some["rank"]))
    return float(1 - busy / whole) if whole > 0 else 0.0


def _stage(some: Actions) -> StageReport:
    ways = (some["seconds"][some["forward"]], some["seconds"][~some["forward"]])
    seconds = [float(np.median(way)) if len(way) else 0.0 for way in ways]
    return StageReport(int(some["stage"][0]), np.unique(some["rank"]).tolist(), *seconds)


def _pipes(rank: Table, stage: Table) -> Table:
    """Return for each action the number of its pipeline."""
    stages = {one: frozenset(stage[rank == one].tolist()) for one in np.unique(rank).tolist()}
    alike: dict[frozenset[int], list[int]] = {}
    for one, own in stages.items():
        alike.setdefault(own, []).append(one)
    pipe = {one: alike[own].index(one) for one, own in stages.items()}
    return np.array([pipe[one] for one in rank.tolist()], np.int64)


def _received(spans: Spans, names: Sequence[str]) -> Spans:
    """Return the spans in which a rank waits for a message of another stage, in order."""
    is_receive = np.array([name.startswith("receive") for name in names], bool)
    chosen = (spans["kind"] == KIND["communication"]) & (spans["lane"] == LANE["main"])
    found: Spans = spans[chosen & (spans["collective"] == NO_COLLECTIVE) & is_receive[spans["name"]]]
    return found


def _covered(received: Spans, times: Table) -> NDArray[np.float64]:
    """Return how many ns were spent in receives before each of these times. The receives must not overlap."""
    if not len(received):
        return np.zeros(len(times))
    edges = np.stack([received["start"], received["end"]], axis=1)
    before = np.cumsum(edges[:, 1] - edges[:, 0])
    known = np.stack([before - (edges[:, 1] - edges[:, 0]), before], axis=1)
    covered: NDArray[np.float64] = np.interp(times, edges.ravel(), known.ravel())
    return covered
