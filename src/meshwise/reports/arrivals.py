"""Find when ranks meet in collectives, and how each spends its time.

When each rank arrived at and left each collective shows which ranks are stragglers. The durations of phases cannot show
this, since an all-reduce makes the backward pass of every rank as long as the slowest rank's.

Exactly one kind of time owns each moment of a rank, so the kinds' times add up to the whole. Where spans overlap, the
first kind in this list that is under way owns the moment; this is the attribution priority:

    waiting, communication          of a blocking collective
    forward, backward, optimizer, evaluate, checkpoint, transfer
    waiting, communication          of a collective that overlaps with computing: its exposed part
    backward                        after its last bucket was handed over
    data
    idle                            none of them

A collective counts as waiting until the last rank has arrived, and as communication from then on (but see
`Arrivals.until`). A backward computes until its last bucket is handed over. Communication is hidden while computing
owns the moment: it costs no time, and is counted separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.pipeline_stages import waits_for_stages
from meshwise.reports.spans import (
    KIND,
    KINDS,
    LANE,
    NO_COLLECTIVE,
    PER_SESSION,
    RunSession,
    Spans,
    operation_and_source,
)

Whole = NDArray[np.int64]
TOGETHER = ("all-reduce", "all-gather", "barrier")
"""Collectives that no rank can leave before all ranks have arrived. (The source of a broadcast can leave early.)"""
ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Arrivals:
    """When each rank arrived at and left each collective of a run, in the order of the collectives' numbers."""

    ranks: Whole
    number: Whole
    step: Whole
    bytes: Whole
    name: Whole
    arrival: Whole
    end: Whole
    overlapped: NDArray[np.bool_]
    together: NDArray[np.bool_]
    last_rank: Whole
    complete: NDArray[np.bool_]
    last: Whole
    until: Whole
    of_stages: Mapping[tuple[int, int], int]

    def until_of(self, ranks: Whole, numbers: Whole) -> Whole:
        """Return until when each rank waits in the collective of this number (see `until`).
        ABSENT if unknown."""
        if not len(self.number):
            return np.full(len(numbers), ABSENT)
        at = np.minimum(np.searchsorted(self.number, numbers), len(self.number) - 1)
        column = np.minimum(np.searchsorted(self.ranks, ranks), len(self.ranks) - 1)
        known = (self.number[at] == numbers) & (self.ranks[column] == ranks)
        return np.where(known, self.until[at, column], ABSENT)

    def waits_until(self, spans: Spans) -> Whole:
        """Return the time until which each span waits for another rank, or its start if it does not wait."""
        until = np.where(is_collective(spans), self.until_of(spans["rank"], spans["collective"]), ABSENT)
        if self.of_stages:
            places = zip(spans["rank"].tolist(), spans["start"].tolist(), strict=True)
            received = np.array([self.of_stages.get(place, ABSENT) for place in places], np.int64)
            until = np.where(is_collective(spans) | (spans["kind"] != KIND["communication"]), until, received)
        result: Whole = np.where(until == ABSENT, spans["start"], np.clip(until, spans["start"], spans["end"]))
        return result


def is_collective(spans: Spans) -> NDArray[np.bool_]:
    """Return a mask of the spans that are collectives of all ranks."""
    found: NDArray[np.bool_] = (spans["kind"] == KIND["communication"]) & (spans["collective"] != NO_COLLECTIVE)
    return found


def arrival_table(spans: Spans, names: Sequence[str]) -> Arrivals:
    """Build the `Arrivals` of a run: when each rank arrived at and left each collective."""
    found = spans[is_collective(spans)]
    number, first, row = np.unique(found["collective"], return_index=True, return_inverse=True)
    ranks, column = np.unique(found["rank"], return_inverse=True)
    arrival = np.full((len(number), len(ranks)), ABSENT)
    end = arrival.copy()
    arrival[row, column], end[row, column] = found["start"], found["end"]
    facts = found[first]
    text = np.array([operation_and_source(name)[0] for name in names])[facts["name"]]
    complete = (arrival != ABSENT).all(axis=1)
    last_rank = arrival.argmax(axis=1) if len(ranks) else np.empty(0, np.int64)
    if len(ranks) and ranks[0] == 0:
        last_rank = np.where(text == "broadcast", 0, last_rank)
    last = np.take_along_axis(arrival, last_rank[:, None], axis=1)[:, 0] if len(ranks) else np.empty(0, np.int64)
    return Arrivals(
        ranks.astype(np.int64),
        number,
        facts["step"],
        facts["bytes"],
        facts["name"],
        arrival,
        end,
        overlapped=facts["lane"] == LANE["communication"],
        together=complete & np.isin(text, TOGETHER),
        last_rank=last_rank,
        complete=complete,
        last=np.where(complete, last, ABSENT),
        until=np.where(complete[:, None], last[:, None] - _left_later(arrival, end, last_rank), ABSENT),
        of_stages=waits_for_stages(spans, names),
    )


def _left_later(arrival: Whole, end: Whole, last_rank: Whole) -> Whole:
    """Return how many ns later than each rank a collective's last rank left the previous collective.
    Shape: (collectives, ranks)."""
    if not arrival.size:
        return np.zeros(arrival.shape, np.int64)
    row = np.arange(len(arrival))
    left = np.maximum.accumulate(end, axis=0)
    had_left = np.stack(
        [np.searchsorted(left[:, r], arrival[:, r], side="right") for r in range(left.shape[1])], axis=1
    )
    before = np.minimum(had_left[row, last_rank], row) - 1
    known = (before >= 0)[:, None] & (left[before] != ABSENT).all(axis=1, keepdims=True)
    later = left[before, last_rank][:, None] - left[before]
    return np.where(known, np.maximum(later, 0), 0)


OUTSIDE = len(KINDS)
"""A kind of time that is not in KINDS: the time between two sessions of a run, in which no span was recorded."""


OWNERS = np.array(
    [
        *(
            KIND[kind]
            for kind in (
                "waiting",  # a blocking collective
                "communication",
                "forward",
                "backward",
                "optimizer",
                "evaluate",
                "checkpoint",
                "transfer",
                "waiting",  # a collective that overlaps with computing
                "communication",
                "backward",  # the time after its last bucket
                "data",
                "waiting",
            )
        ),
        OUTSIDE,
        KIND["idle"],
    ]
)
"""The owners to which a moment of a rank's time can be attributed. Each item is the kind of time that the owner stands
for. If several owners apply to a moment, the first of them is chosen. The numbers below are indices in this list."""
BLOCKING, COMPUTING, BACKWARD, OVERLAPPED, BACKWARD_END, OUTSIDE_OWNER, NOBODY = 0, range(2, 8), 3, 8, 10, 13, 14
"""Indices of owners. For a pair of waiting and communication, this is the index of waiting, the first of the two."""
OWNER_OF_KIND = np.array([np.flatnonzero(code == OWNERS)[-1] for code in KIND.values()])
"""The owner of a span, by the span's kind. `_claims` itself handles communication and backward."""


@dataclass(frozen=True)
class Attribution:
    """The time of one rank, divided into intervals of one kind each."""

    start: Whole
    length: Whole
    kind: Whole
    hidden: NDArray[np.bool_]

    def sums(self, bins: Whole) -> NDArray[np.float64]:
        """Return the seconds of each kind of time in each bin. The last column is hidden communication. bins: the
        start of each bin."""
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
    """Divide the time of one rank into kinds of time, from the start of its first span to the end of its last span."""
    start, end, owner = _claims(spans, arrivals)
    gaps = _gaps(spans, sessions)
    outside = np.full(len(gaps), OUTSIDE_OWNER)
    edges, own, hidden = sweep(
        np.concatenate([start, gaps[:, 0]]), np.concatenate([end, gaps[:, 1]]), np.concatenate([owner, outside])
    )
    return Attribution(edges[:-1], np.diff(edges), OWNERS[own], hidden)


def sweep(start: Whole, end: Whole, owner: Whole) -> tuple[Whole, Whole, NDArray[np.bool_]]:
    """Make overlapping intervals disjoint. Return their edges, owners, and a mask of where communication is hidden."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    edges = times[order]
    change = np.concatenate([np.ones(len(start), np.int32), np.full(len(end), -1, np.int32)])[order]
    who = np.concatenate([owner, owner])[order].astype(np.int8)
    own = np.full(len(edges), NOBODY, np.int8)
    overlapped = np.zeros(len(edges), bool)
    for claimant in np.unique(owner)[::-1].tolist():
        active = np.cumsum(np.where(who == claimant, change, 0)) > 0
        own[active] = claimant
        if claimant in (OVERLAPPED, OVERLAPPED + 1):
            overlapped |= active
    own, overlapped = own[:-1], overlapped[:-1]
    return edges, own.astype(np.int64), overlapped & np.isin(own, COMPUTING)


def _claims(spans: Spans, arrivals: Arrivals) -> tuple[Whole, Whole, Whole]:
    """Return the start and the end of each interval that a rank's spans cover, and the owner to which it belongs."""
    spans = spans[(spans["lane"] != LANE["blocks"]) & (spans["end"] > spans["start"])]
    kind, start, end = spans["kind"], spans["start"], spans["end"]
    communication, backward = kind == KIND["communication"], kind == KIND["backward"]
    whole = ~communication & ~backward
    until = arrivals.waits_until(spans[communication])
    overlapped = spans["lane"][communication] == LANE["communication"]
    handed = handed_over(start[backward], end[backward], np.sort(start[communication][overlapped]))
    owners = (
        OWNER_OF_KIND[kind[whole]],
        np.where(overlapped, OVERLAPPED, BLOCKING),
        np.where(overlapped, OVERLAPPED, BLOCKING) + 1,
        np.full(len(handed), BACKWARD),
        np.full(len(handed), BACKWARD_END),
    )
    starts = np.concatenate([start[whole], start[communication], until, start[backward], handed])
    ends = np.concatenate([end[whole], until, end[communication], handed, end[backward]])
    return starts.astype(np.int64), ends.astype(np.int64), np.concatenate(owners).astype(np.int64)


def handed_over(start: Whole, end: Whole, begun: Whole) -> Whole:
    """Return when the last collective within each backward pass began, or the end of a pass without collectives."""
    if not len(begun):
        return end
    at = np.searchsorted(begun, end, side="left") - 1
    last = begun[np.maximum(at, 0)]
    return np.where((at >= 0) & (last >= start), last, end)


def _gaps(spans: Spans, sessions: tuple[RunSession, ...]) -> Whole:
    """Return the gaps between a rank's sessions, of shape (gaps, 2)."""
    if len(sessions) < 2 or not len(spans):
        return np.empty((0, 2), np.int64)
    session = session_of(spans["start"], sessions)
    cut = np.flatnonzero(np.diff(session)) + 1
    ends = np.maximum.accumulate(spans["end"])
    return np.stack([ends[cut - 1], spans["start"][cut]], axis=1).astype(np.int64)


def session_of(times: Whole, sessions: tuple[RunSession, ...]) -> Whole:
    """Return the index of the session in which each time lies, or 0 if no session is known."""
    began = np.array([session.began for session in sessions], dtype=np.int64)
    return np.maximum(np.searchsorted(began, times, side="right") - 1, 0)


def step_starts_of(spans: Spans, sessions: tuple[RunSession, ...]) -> tuple[Whole, Whole]:
    """Return when each step of a rank begins, and a number that identifies this step on all ranks."""
    number = np.maximum.accumulate(session_of(spans["start"], sessions) * PER_SESSION + spans["step"])
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return spans["start"][first].astype(np.int64), number[first]
