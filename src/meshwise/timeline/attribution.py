"""What each moment of a rank was spent on: exactly one thing, so that the parts add up to the whole.

Where spans overlap, the first of these that is under way owns the moment:

    waiting, communication          of a collective that the rank waits for at once
    forward, backward, optimizer, evaluate, checkpoint, transfer
    waiting, communication          of a collective that runs beside the computing: what is owned here is exposed
    backward                        after its last bucket was handed over
    data
    idle                            none of them

A collective is waiting until the last rank has come to it, and communication from there (but see `Arrivals.until`). A
backward computes until its last bucket is handed over. Communication under computing is hidden: it costs nothing, and
is counted beside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.arrivals import Arrivals
from meshwise.timeline.spans import KIND, KINDS, LANE
from meshwise.timeline.timeline import PER_SESSION, RunSession, Spans

Whole = NDArray[np.int64]
OUTSIDE = len(KINDS)
"""Beside the kinds: before the first span of a session and after its last."""

# Owners in the order of their rights, each with the kind that it counts as.
OWNERS: tuple[tuple[str, int], ...] = (
    ("waiting at once", KIND["waiting"]),
    ("communication at once", KIND["communication"]),
    ("forward", KIND["forward"]),
    ("backward", KIND["backward"]),
    ("optimizer", KIND["optimizer"]),
    ("evaluate", KIND["evaluate"]),
    ("checkpoint", KIND["checkpoint"]),
    ("transfer", KIND["transfer"]),
    ("waiting beside", KIND["waiting"]),
    ("communication beside", KIND["communication"]),
    ("backward's end", KIND["backward"]),
    ("data", KIND["data"]),
    ("waiting", KIND["waiting"]),
    ("idle", KIND["idle"]),
    ("outside", OUTSIDE),
)
OWNER = {name: right for right, (name, _) in enumerate(OWNERS)}
KIND_OF_OWNER = np.array([kind for _, kind in OWNERS] + [KIND["idle"]])
HIDING = [OWNER[name] for name in ("forward", "backward", "optimizer", "evaluate", "checkpoint", "transfer")]
BESIDE = [OWNER["waiting beside"], OWNER["communication beside"]]


@dataclass(frozen=True)
class Attribution:
    """The moments of one rank: stretches from `start` of `length` ns, each of one kind (index in KINDS, or OUTSIDE).

    hidden: whether communication went on meanwhile, under computing.
    """

    start: Whole
    length: Whole
    kind: Whole
    hidden: NDArray[np.bool_]

    def sums(self, bins: Whole) -> NDArray[np.float64]:
        """Seconds of each kind from each of the ascending times `bins` to the next, the last without end.

        Shape (bins, kinds + 2): the kinds, OUTSIDE, and last the hidden communication. Stretches that begin before the
        first bin are left out. No stretch may lie across a bin's beginning.
        """
        at = np.searchsorted(bins, self.start, side="right") - 1
        inside = at >= 0
        width = OUTSIDE + 2
        total = np.bincount(
            at[inside] * width + self.kind[inside], weights=self.length[inside], minlength=len(bins) * width
        ).reshape(len(bins), width)
        under = inside & self.hidden
        total[:, -1] = np.bincount(at[under], weights=self.length[under], minlength=len(bins))
        result: NDArray[np.float64] = total / 1e9
        return result


def attribution_of(spans: Spans, arrivals: Arrivals, sessions: tuple[RunSession, ...] = ()) -> Attribution:
    """The account of one rank's spans, from the first beginning to the last end."""
    start, end, owner = _owned(spans, arrivals)
    gaps = _gaps(spans, sessions)
    start, end = np.concatenate([start, gaps[:, 0]]), np.concatenate([end, gaps[:, 1]])
    owner = np.concatenate([owner, np.full(len(gaps), OWNER["outside"])])
    edges, own, hidden = sweep(start, end, owner)
    return Attribution(edges[:-1], np.diff(edges), KIND_OF_OWNER[own], hidden)


def sweep(start: Whole, end: Whole, owner: Whole) -> tuple[Whole, Whole, NDArray[np.bool_]]:
    """Intervals with owners, as disjoint stretches: their edges (one more than stretches), the owner of each by right
    (len(OWNERS): none), and whether something that runs beside went on under an owner that hides it."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    edges = times[order]
    change = np.concatenate([np.ones(len(start), np.int32), np.full(len(end), -1, np.int32)])[order]
    who = np.concatenate([owner, owner])[order].astype(np.int8)
    own = np.full(len(edges), len(OWNERS), np.int8)
    beside = np.zeros(len(edges), bool)
    for right in np.unique(owner)[::-1].tolist():
        active = np.cumsum(np.where(who == right, change, 0)) > 0
        own[active] = right
        if right in BESIDE:
            beside |= active
    stretches = slice(0, max(len(edges) - 1, 0))
    own, beside = own[stretches], beside[stretches]
    return edges, own.astype(np.int64), beside & np.isin(own, HIDING)


def _owned(spans: Spans, arrivals: Arrivals) -> tuple[Whole, Whole, Whole]:
    """The intervals of a rank's spans, each with its owner."""
    spans = spans[(spans["lane"] != LANE["blocks"]) & (spans["end"] > spans["start"])]
    kind, start, end = spans["kind"], spans["start"], spans["end"]
    communication, backward = kind == KIND["communication"], kind == KIND["backward"]
    parts = []
    for name in ("forward", "optimizer", "evaluate", "checkpoint", "transfer", "data", "waiting", "idle"):
        which = kind == KIND[name]
        parts.append((start[which], end[which], np.full(int(which.sum()), OWNER[name])))
    split = arrivals.waits_until(spans[communication])
    beside = spans["lane"][communication] == LANE["communication"]
    for name, a, b in (("waiting", start[communication], split), ("communication", split, end[communication])):
        parts.append((a, b, np.where(beside, OWNER[f"{name} beside"], OWNER[f"{name} at once"])))
    handed = handed_over(start[backward], end[backward], np.sort(start[communication][beside]))
    parts.append((start[backward], handed, np.full(len(handed), OWNER["backward"])))
    parts.append((handed, end[backward], np.full(len(handed), OWNER["backward's end"])))
    starts, ends, owners = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
    return starts, ends, owners


def handed_over(start: Whole, end: Whole, begun: Whole) -> Whole:
    """When each backward from `start` to `end` began its last collective (of those at the sorted times `begun`), which
    is when it had computed all; its end where it began none."""
    if not len(begun):
        return end
    at = np.searchsorted(begun, end, side="left") - 1
    last = begun[np.maximum(at, 0)]
    return np.where((at >= 0) & (last >= start), last, end)


def _gaps(spans: Spans, sessions: tuple[RunSession, ...]) -> Whole:
    """From the rank's last end in a session to its first beginning in the next: shape (gaps, 2)."""
    if len(sessions) < 2 or not len(spans):
        return np.empty((0, 2), np.int64)
    session = session_of(spans["start"], sessions)
    cut = np.flatnonzero(np.diff(session)) + 1
    ends = np.maximum.accumulate(spans["end"])
    return np.stack([ends[cut - 1], spans["start"][cut]], axis=1).astype(np.int64)


def session_of(times: Whole, sessions: tuple[RunSession, ...]) -> Whole:
    """The number of the session in which each time lies."""
    began = np.array([session.began for session in sessions], dtype=np.int64)
    return np.maximum(np.searchsorted(began, times, side="right") - 1, 0)


@dataclass(frozen=True)
class StepStarts:
    """The steps of one rank, each from its first span to the next step's first: shape (windows,).

    A step that was done again after a stop has a window in each session.
    """

    start: Whole
    step: Whole
    session: Whole

    @property
    def key(self) -> Whole:
        """Ascending numbers that are the same on all ranks for the same step of the same session."""
        return self.session * PER_SESSION + self.step


def step_starts_of(spans: Spans, sessions: tuple[RunSession, ...]) -> StepStarts:
    """Where the steps of a rank's spans (sorted by start) begin. What lies before its first step is step 0."""
    session = session_of(spans["start"], sessions) if sessions else np.zeros(len(spans), np.int64)
    key = session * PER_SESSION + spans["step"]
    step = np.maximum.accumulate(key) if len(spans) else np.empty(0, np.int64)
    first = np.flatnonzero(np.diff(step, prepend=-1))
    return StepStarts(spans["start"][first].astype(np.int64), step[first] % PER_SESSION, session[first])
