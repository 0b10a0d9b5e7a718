"""Rehearsals of published runs, kept apart from prices: what was traced once is priced again in milliseconds.

A piece is what one rank does in a step of few blocks, without its pipeline. It is kept in a file by what it hangs on:
model, shapes and plan. Replicas are traced as two, and counted as many as there are.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwise.hardware.catalog import part
from meshwise.hardware.words import machine_from_words
from meshwise.planner.collective_price import collective_seconds
from meshwise.planner.prices import Prices
from meshwise.planner.simulate import Step, simulate
from meshwise.planner.work import CollectiveOperation, Launch, Operation, What, Work
from meshwise.spec.machine import Machine

KEPT = Path(__file__).parent / "results" / "published-pieces"
MOST = 3
"""Microbatches that are traced at most: the first one, the last one, and one between."""
SCHEDULES = {"1f1b": 1.0, "zb-1p": 1 / 3, "zb-2p": 0.0}
"""What is left of the bubble of 1F1B with as many chunks (Zero Bubble, arXiv 2401.10241, with a backward of weights as
long as a forward)."""


@dataclass(frozen=True)
class Pipeline:
    """stages, and chunks of each; schedule: of SCHEDULES. message: bytes between stages for one microbatch. even: the
    first and the last stage hold a block less, for the embedding and the head."""

    stages: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    message: int = 0
    even: bool = False


@dataclass(frozen=True)
class Replicas:
    """What replicas add to a step of a program whose gradients wait for the end: bytes of gradients that are reduced of
    a block and of all else, bytes that the optimizer moves, and whether the state is divided (ZeRO-1)."""

    count: int = 1
    block: float = 0.0
    rest: float = 0.0
    moved: float = 0.0
    divided: bool = False


@dataclass(frozen=True)
class Case:
    """A published run.

    job: of so many layers, with a global batch for so many microbatches a step. layers, microbatches: those of the row;
    microbatches may be broken where the last one is smaller. reduces: whether each microbatch ends with the reduction
    of its gradients, not the last one alone: such a row is traced with one. tf32: whether products of float32 may be.
    ranks: of DistributedDataParallel, traced as two. within: ranks of a tensor axis. attention: the kernel, where it is
    not torch's; compiled: whether blocks are. memory: whether bytes are asked for. deep: whether the model has blocks.
    fused: `fused` where sums over ranks need no copy, and a bias, the dropout behind it and the sum with what flows
    past the layer are one kernel, as Megatron writes them; `overlapped` where sums of a backward also run beside the
    product for the gradient of the weights.
    differs: what is known to differ from the row.
    """

    job: Callable[[int, int], Any]
    plan: Callable[[int], Any]
    machine: str
    layers: int
    microbatches: float
    reduces: bool = False
    tf32: bool = False
    differs: tuple[str, ...] = ()
    ranks: int = 1
    within: int = 1
    pipeline: Pipeline = Pipeline()
    replicas: Replicas = Replicas()
    attention: str = ""
    compiled: bool = False
    memory: bool = False
    deep: bool = True
    fused: str = ""

    @property
    def traced(self) -> int:
        """Microbatches that are traced."""
        one = self.reduces or self.pipeline.stages > 1 or self.replicas != Replicas()
        return 1 if one else min(max(round(self.microbatches), 1), MOST)

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of the models that are traced. A shard holds up to three at once: the one that runs, the next one's
        parameters and the gradients of the one before, so that fewer would show a peak of their own. A tensor axis
        splits a block that stands alone in another way."""
        few = 3 if self.memory else 1 + (self.within > 1)
        return (few, few + 1) if self.deep else (1,)


@dataclass(frozen=True)
class Piece:
    """work: launches alone. peaks: allocated bytes by phase; reserved: of the allocator; empty where nobody asks."""

    work: Work
    peaks: Mapping[str, float] = field(default_factory=dict)
    reserved: float = 0.0


def key_of(case: Case, layers: int) -> str:
    """What a piece hangs on, besides the sources."""
    job, plan = case.job(layers, case.traced), case.plan(case.traced)
    made = [(one.func.__name__, one.args, sorted(one.keywords.items())) for one in (job.model, job.optimizer)]
    of = case.machine if case.memory else ""
    return hashlib.sha256(repr((made, job.batch_size, plan, case.tf32, of)).encode()).hexdigest()[:20]


@functools.lru_cache(maxsize=4096)
def _read(key: str) -> Piece | None:
    path = KEPT / f"{key}.pickle.gz"
    if not path.exists():
        return None
    found: Piece = pickle.loads(gzip.decompress(path.read_bytes()))  # written by `piece_of`
    return found


def kept_piece(case: Case, layers: int) -> Piece | None:
    """What was traced, if it was."""
    return _read(key_of(case, layers))


def trace_piece(case: Case, layers: int) -> None:
    """Trace and keep. Raises as `trace` does."""
    import torch

    from meshwise.planner.trace import trace

    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    traced = trace(case.job(layers, case.traced), case.plan(case.traced))[0]
    peaks, reserved = _memory(traced, machine_in(case.machine).devices[0].part) if case.memory else ({}, 0.0)
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{key_of(case, layers)}.pickle.gz"
    partial = path.with_suffix(".partial")
    partial.write_bytes(gzip.compress(pickle.dumps(Piece(_launches(traced.step), peaks, reserved)), 3))
    partial.replace(path)
    _read.cache_clear()


def _launches(work: Work) -> Work:
    """Without its memory. What is alike is one object."""
    places, same = {}, {}
    found: list[Launch] = []
    for place, event in enumerate(work.events):
        if isinstance(event, Launch):
            places[place] = len(found)
            what = same.setdefault(event.what, event.what)
            after = tuple(places[one] for one in event.after)
            found.append(replace(event, what=what, module="", after=after))
    return replace(work, held=(), events=tuple(found), notes=())


def _memory(traced: Any, name: str) -> tuple[dict[str, float], float]:
    """Peaks by phase over both steps, and reserved bytes."""
    from meshwise.planner.allocator import reserved_on
    from meshwise.planner.memory import memory_curve

    peaks: dict[str, float] = {}
    for number, work in enumerate((traced.first, traced.step)):
        curve = memory_curve(work)
        phases = _phases(work.events)
        for place, total in zip(curve.places.tolist(), curve.total.tolist(), strict=True):
            phase = f"{number} {phases[place] if place >= 0 else 'held'}"
            peaks[phase] = max(peaks.get(phase, 0.0), total)
    return peaks, float(reserved_on((traced.first, traced.step), name))


def _phases(events: Sequence[Any]) -> list[str]:
    """For each event the phase of the launch that follows it, and which microbatch's."""
    found, phase, numbers = [""] * len(events), "end", microbatch_numbers(events)
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        if isinstance(event, Launch):
            phase = f"{event.phase} {numbers[place]}"
        found[place] = phase
    return found


def microbatch_numbers(events: Sequence[Any]) -> list[int]:
    """For each event its microbatch: a forward after a backward begins the next one."""
    found, number, backward = [], 0, False
    for event in events:
        if isinstance(event, Launch):
            if event.phase == "forward" and backward:
                number, backward = number + 1, False
            backward = backward or event.phase == "backward"
        found.append(number)
    return found


# ---- Prices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one step of few blocks. low, high: its interval. ends: of each microbatch's backward. ideal:
    of its products at the device's peak."""

    seconds: float
    low: float
    high: float
    ends: tuple[float, ...]
    ideal: float = 0.0


@functools.lru_cache(maxsize=64)
def prices_of(machine: str, compiled: bool) -> Prices:
    """Of a machine in words; kept until the constants change (`cache_clear`)."""
    return Prices(machine_in(machine), compiled=compiled)


SWITCHED = " switched"
"""What stands behind the words of a machine whose devices have all of their links to each other, as in a DGX-2."""


def machine_in(words: str) -> Machine:
    """As the tool reads them, but for a switch that its catalog does not know of."""
    found = machine_from_words(words.removesuffix(SWITCHED))
    known = part(found.devices[0].part)
    if not words.endswith(SWITCHED) or known is None or known.link is None:
        return found
    width, kind = known.link.width, known.link.kind
    links = tuple(replace(link, width=width) if link.kind == kind else link for link in found.links)
    return replace(found, links=links)


@functools.lru_cache(maxsize=8192)
def _adapted(key: str, ranks: int, attention: str, old: bool, fused: str) -> Work:
    """The piece with so many replicas and with this kernel of attention. old: on devices without bfloat16."""
    piece = _read(key)
    assert piece is not None
    work, changed = _fused(piece.work) if fused else piece.work, {}
    work = _overlapped(work) if fused == "overlapped" else work

    def other(what: Any) -> Any:
        if isinstance(what, CollectiveOperation) and ranks > 1 and what.ranks == (0, 1):
            return replace(what, ranks=tuple(range(ranks)))
        if isinstance(what, Operation) and attention and "attention" in what.name:
            what = replace(what, name=what.name.replace("aten.", f"aten.{attention}"))
        if isinstance(what, Operation) and old and "bf16" in what.dtypes:
            what = replace(what, dtypes=tuple("fp16" if word == "bf16" else word for word in what.dtypes))
        return what

    events = []
    for event in work.events:
        if id(event.what) not in changed:
            changed[id(event.what)] = other(event.what)
        events.append(replace(event, what=changed[id(event.what)]))
    return replace(work, ranks=max(ranks, work.ranks), events=tuple(events))


def _fused(work: Work) -> Work:
    """Without the copies before sums over ranks; a bias and a sum around a dropout are its own; the softmax of scores
    reads what lies before each position; products take heads where they lie."""
    found: list[Launch] = []
    places: list[int] = []  # of each launch, that of the one that now stands for it
    whats = [launch.what for launch in work.launches]
    for launch, following in zip(work.launches, [*whats[1:], None], strict=True):
        what, before = launch.what, found[-1].what if found else None
        if isinstance(what, Operation) and "softmax" in what.name and len(what.shapes[0]) == 4:
            launch = replace(launch, what=replace(what, read=what.read // 2))
        if _is_within(what, following) or _is_layout(what, before, following):
            places.append(len(found))
        elif isinstance(before, Operation) and isinstance(what, Operation) and _is_sum_behind(what, before):
            found[-1] = replace(found[-1], what=replace(before, read=before.read + what.read // 2))
            places.append(len(found) - 1)
        else:
            places.append(len(found))
            found.append(replace(launch, after=tuple(min(places[one], len(found) - 1) for one in launch.after)))
    return replace(work, events=tuple(found))


def _is_within(what: What, following: What | None) -> bool:
    """Whether it is part of what follows: a copy of what is summed over ranks, or a bias."""
    if not isinstance(what, Operation) or following is None:
        return False
    if isinstance(following, CollectiveOperation):
        return what.name == "aten.clone" and following.kind == "all-reduce" and following.size == what.written
    bias = what.name == "aten.add" and len(what.shapes[-1]) == 1
    return bias and isinstance(following, Operation) and following.name in ("aten.native_dropout", "aten.add")


def _is_layout(what: What, before: What | None, following: What | None) -> bool:
    """Whether it copies queries, keys and values for a product, or their gradients behind one: Megatron's lie by head,
    as products of batches take them."""
    if not isinstance(what, Operation) or what.name != "aten.clone" or len(what.shapes[0]) != 4:
        return False
    names = [one.name if isinstance(one, Operation) else "" for one in (before, following)]
    return names[0] == "aten.cat" or (names[1] in ("aten.bmm", "aten.clone") and what.shapes[0][1] < what.shapes[0][2])


def _is_sum_behind(what: Operation, before: Operation) -> bool:
    dropped = before.name == "aten.native_dropout" and what.name == "aten.add"
    return dropped and before.shapes[0] == what.shapes[0] == what.shapes[-1]


def _overlapped(work: Work) -> Work:
    """With sums of a backward on a stream of their own, from when the gradient of the input is there until what follows
    the gradient of the weights."""
    found: list[Launch] = []
    waited: tuple[int, ...] = ()
    for launch in work.launches:
        what, place = launch.what, len(found)
        last = [one.what for one in found[-3:] if isinstance(one.what, Operation) and one.what.name != "aten.sum"][-2:]
        both = len(last) == 2 and all(one.name == "aten.mm" for one in last)
        summed = isinstance(what, CollectiveOperation) and what.kind in ("all-reduce", "reduce-scatter")
        if summed and both and launch.phase == "backward":
            while found[place - 1].what is not last[1]:
                place -= 1
            found.insert(place - 1, replace(launch, stream="tensor", after=(place - 2,)))
            waited = (place - 1,)
        else:
            found.append(replace(launch, after=waited))
            waited = ()
    return replace(work, events=tuple(found))


@functools.lru_cache(maxsize=8192)
def _times_kept(
    key: str, ranks: int, attention: str, machine: str, compiled: bool, interval: bool, fused: str
) -> Times:
    old = "bf16" not in prices_of(machine, compiled).machine.devices[0].peak
    return _times(_adapted(key, ranks, attention, old, fused), machine, compiled, interval)


def _times(work: Work, machine: str, compiled: bool, interval: bool) -> Times:
    step = simulate([work], prices_of(machine, compiled), interval=interval)
    peak = prices_of(machine, compiled).machine.devices[0].peak
    done = [launch.what for launch in work.launches if isinstance(launch.what, Operation) and launch.what.flops]
    rates = dict(peak) | {"": max(peak.get("bf16", 0.0), peak.get("fp16", 0.0))}
    ideal = sum(what.flops / rates.get(what.dtypes[0] if what.dtypes else "", rates[""]) for what in done)
    return Times(step.seconds, step.low, step.high, _ends(step, work), ideal)


def _ends(step: Step, work: Work) -> tuple[float, ...]:
    numbers, ends = microbatch_numbers(work.events), dict[int, float]()
    for done in step.done[work.rank]:
        if done.launch.phase in ("forward", "backward"):
            number = numbers[done.place]
            ends[number] = max(ends.get(number, 0.0), done.end)
    return tuple(ends[number] for number in sorted(ends))


def forget_prices() -> None:
    """After a constant has changed."""
    prices_of.cache_clear()
    _times_kept.cache_clear()


def estimate(case: Case, interval: bool = True) -> dict[str, Any]:
    """Seconds and bytes of the row's own depth and microbatches. Raises KeyError where a piece is not there yet."""
    keys = [key_of(case, depth) for depth in case.depths]
    if any(_read(key) is None for key in keys):
        raise KeyError("not traced yet")
    return seconds_of(case, keys, interval) | (bytes_of(case, keys) if case.memory else {})


def seconds_of(case: Case, keys: Sequence[str], interval: bool) -> dict[str, Any]:
    """Of pieces that are there."""
    found = [
        _times_kept(key, case.ranks, case.attention, case.machine, case.compiled, interval, case.fused) for key in keys
    ]
    one, other = found[0], found[-1]

    def at(get: Callable[[Times], float], layers: float) -> float:
        """In a straight line: the blocks in the middle are alike."""
        first, second = get(one), get(other)
        return first if len(found) == 1 else first + (second - first) * (layers - case.depths[0])

    if case.pipeline.stages > 1 or case.replicas != Replicas():
        seconds = _staged(case, at)
    else:
        middle = at(lambda t: t.seconds, case.layers)
        first = 0 if case.reduces else 1
        further = at(lambda t: _further(t, first), case.layers)
        more = further * (case.microbatches - case.traced)
        if not case.reduces and case.traced < MOST and case.microbatches != case.traced:  # a smaller last one
            more = middle * (case.microbatches / case.traced - 1)
        seconds = middle + more
    ideal = at(lambda t: t.ideal, case.layers) / case.pipeline.stages * case.microbatches / case.traced
    low, high = (at(get, case.layers) / at(lambda t: t.seconds, case.layers) for get in (_low, _high))
    return {"seconds": seconds, "low": seconds * low, "high": seconds * high, "ideal": ideal}


def _low(times: Times) -> float:
    return times.low


def _high(times: Times) -> float:
    return times.high


def _further(times: Times, first: int) -> float:
    """Seconds of one microbatch between the others."""
    if len(times.ends) <= first:
        return 0.0
    return times.ends[first] - (times.ends[first - 1] if first else 0.0)


def _staged(case: Case, at: Callable[[Callable[[Times], float], float], float]) -> float:
    """A step of stages that take turns, and of replicas whose gradients are reduced behind it: the slowest stage, the
    last one, holds the head. Messages are waited for twice a microbatch."""
    machine, pipe = prices_of(case.machine, case.compiled).machine, case.pipeline
    own = (case.layers + 2 * pipe.even) / pipe.stages
    bare, ends = at(lambda t: t.ends[0], 0), at(lambda t: t.ends[0], case.layers)
    block = (ends - bare) / case.layers
    message = _message(pipe, case, machine)
    middle, last = own * block + message, (own - pipe.even) * block + bare + message
    count = max(case.microbatches, 1.0)
    bubble = (pipe.stages - 1) * middle / pipe.chunks * SCHEDULES[pipe.schedule]
    slowest = max(middle, last)
    after = _after(case, machine, own, at(lambda t: t.seconds - t.ends[0], own))
    return count * (slowest if pipe.stages > 1 else last) + bubble + after


def _message(pipe: Pipeline, case: Case, machine: Machine) -> float:
    if pipe.stages == 1:
        return 0.0
    away = min(case.within * case.replicas.count, len(machine.devices) - 1)
    sent = collective_seconds(CollectiveOperation("send", pipe.message, (0, away)), machine)
    return 2 * pipe.chunks * (sent.seconds if sent else 0.0)


def _after(case: Case, machine: Machine, own: float, optimizer: float) -> float:
    """What comes behind the last backward: reduced gradients, the optimizer on float32 beside what is trained."""
    replicas = case.replicas
    size = replicas.block * own + replicas.rest
    reduced = 0.0
    if replicas.count > 1:
        ranks = tuple(range(0, replicas.count * case.within, case.within))
        found = collective_seconds(CollectiveOperation("all-reduce", int(size), ranks), machine)
        reduced = found.seconds if found else 0.0
    parts = replicas.count if replicas.divided else 1
    moved = int(replicas.moved * size / parts)
    step = Operation("aten._fused_adamw_", ((1,),), ("fp32",), 0, moved // 2, moved - moved // 2)
    price = prices_of(case.machine, False).of(step, 0)
    return reduced + max(optimizer, 0.0) / parts + (price.seconds if price and moved else 0.0)


def bytes_of(case: Case, keys: Sequence[str]) -> dict[str, float]:
    """Allocated and reserved, in a straight line over depth, by phase."""
    found = [piece for key in keys if (piece := _read(key)) is not None]
    one, other = found[0], found[-1]

    def at(first: float, second: float) -> float:
        return first if len(found) == 1 else first + (second - first) * (case.layers - case.depths[0])

    allocated = max(at(one.peaks[phase], other.peaks[phase]) for phase in one.peaks.keys() & other.peaks.keys())
    reserved = max(at(one.reserved, other.reserved), allocated)
    return {"allocated": allocated, "reserved": reserved}


def padded(vocabulary: int, tensor: int) -> int:
    """Megatron's padded vocabulary: a multiple of 128 and of the tensor ranks."""
    return math.ceil(vocabulary / (128 * tensor)) * 128 * tensor
