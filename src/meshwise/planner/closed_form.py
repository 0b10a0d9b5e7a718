"""Guess a plan's cost by formulas, to rehearse the likely best first.

The guesses decide which plans are rehearsed, and are shown to the user only before the first rehearsal. The cost of a
block comes from a few traces of few blocks, one for each combination of `tensor`, `sequence` and `recompute`, or
roughly from one forward pass of the model. Formulas add communication, pipelines and overlap. The errors of the guesses
for plans already rehearsed correct the guesses for similar plans.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwise.parallel.schedule import CHUNKS
from meshwise.planner.estimate import Estimate
from meshwise.planner.prices import Prices, overlap_of
from meshwise.planner.shorter import shortened
from meshwise.planner.trace import trace
from meshwise.planner.tracer import Facts, Tracer
from meshwise.planner.work import Allocate, CollectiveOperation, Free, Launch
from meshwise.spec.dtypes import dtypes_of
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan

BLOCKS = 3
"""How many groups of blocks are traced to know the cost of a block. A group is often a single block."""


@dataclass(frozen=True)
class Kind:
    """The settings for tracing a model with only a few blocks on one rank, in a step with one microbatch."""

    precision: str
    tensor: int = 1
    sequence: bool = False
    recompute: str = "none"
    rows: int = 1


@dataclass(frozen=True)
class Small:
    """Costs on one rank, computed from a trace of a few blocks. `kept` is in bytes, the rest in seconds."""

    forward: float
    backward: float
    outside: float
    sent: float
    kept: float


def small_traces(program: Tracer, machine: Machine) -> Callable[[Kind], Small | None]:
    """Return a function that finds out what a block of the model costs, from a trace of a few blocks."""
    prices = Prices(machine)

    def small(kind: Kind) -> Small | None:
        try:
            stretch = program.model.stretch
            if stretch is None or stretch.count <= BLOCKS or kind.tensor > len(machine.devices):
                return None
            job = replace(shortened(program.job, stretch, BLOCKS), batch_size=kind.rows)
            plan = Plan(precision=kind.precision, tensor=kind.tensor, sequence=kind.sequence, recompute=kind.recompute)
            (traced,) = trace(job, plan)
        except MeshwiseError:
            return None
        first, blocks = stretch.start, BLOCKS * stretch.group
        names = tuple(f"{name}." for name in stretch.names[first : first + blocks])
        seconds, kept = defaultdict[object, float](float), dict[int, int]()
        taken: list[Allocate] = []  # allocations for the next launch
        back = False
        for event in traced.step.events:
            if isinstance(event, Allocate):
                taken.append(event)
            elif isinstance(event, Free) and not back:
                kept.pop(event.storage, None)
            elif isinstance(event, Launch) and event.phase in ("forward", "backward"):
                inside, back = f"{event.module}.".startswith(names), back or event.phase == "backward"
                if (price := prices.of(event.what, 0)) is None:
                    return None
                sent = isinstance(event.what, CollectiveOperation)
                seconds[inside, "sent" if sent else event.phase] += price.seconds
                if inside and not back:
                    kept.update((one.storage, one.size) for one in taken)
                taken.clear()
        forward, backward, between = (seconds[True, name] / blocks for name in ("forward", "backward", "sent"))
        outside = seconds[False, "forward"] + seconds[False, "backward"]
        return Small(forward, backward, outside, between, sum(kept.values()) / blocks)

    return small


PRODUCTS, RATE, MEMORY_RATE, LAUNCH = 0.7, 1e11, 1e10, 1e-5
"""The fraction of the peak FLOP/s that matrix products reach. The FLOP/s and memory bytes/s to assume if unknown. The
seconds to launch an operator from Python."""
SPLIT = 8
"""The largest `tensor` axis in traces of blocks. Costs at other sizes are interpolated linearly in 1 / size."""
STATE = 2.0
"""Bytes of optimizer state per byte of trained parameters, as for Adam."""
ADDED, STEPPED = 3, 7
"""Reads and writes of memory per gradient element to accumulate it, and per parameter element in an optimizer step."""
AGAIN = 1.25
"""The factor by which recompute increases the communication of split layers: one of four collectives runs twice."""
HELD = 1.1
"""The allocator is assumed to hold this many bytes per byte of tensors."""
ALONE = 2
"""How many blocks in a stage cannot overlap their gather or reduction with computing: the first and the last block."""


@dataclass(frozen=True)
class Guess:
    """A rough guess of a plan's cost."""

    seconds: float
    memory: float


class ClosedForm:
    """Guesses the costs of plans of one job on one machine, before the plans are simulated."""

    def __init__(
        self, model: Facts, machine: Machine, batch: int, small: Callable[[Kind], Small | None] = lambda kind: None
    ) -> None:
        """batch: the size of the global batch. small: returns the costs of a block, from a trace of a few blocks with
        the given settings (see `small_traces`)."""
        self._model, self._forward, self._batch = model, model.forward, batch
        self._prices, self._machine = Prices(machine), machine
        self._off: dict[tuple[object, ...], tuple[float, float]] = {}
        self._first = functools.cache(lambda plan: Guess(self._seconds(plan), self._bytes(plan)))
        self._small = functools.cache(lambda kind: small(kind) or self._rough(kind))
        self._memory_rate = min(one.memory_rate or one.memory_bandwidth or MEMORY_RATE for one in machine.devices)
        self._overlap = overlap_of(machine.devices[0])
        self._parts = 1 << (min(SPLIT, len(machine.devices)).bit_length() - 1)

    def __call__(self, plan: Plan) -> Guess:
        """Guess the step time and memory of a plan, without simulating it."""
        first = self._first(plan)
        seconds, memory = self._factors(plan)
        return Guess(first.seconds * seconds, first.memory * memory)

    def learn(self, found: Estimate) -> None:
        """Remember the error of a simulated plan's guess, to correct the guesses for similar plans."""
        first = self._first(found.plan)
        seconds = found.seconds.value / first.seconds if found.seconds is not None and first.seconds else 1.0
        for key in _likenesses(found.plan):
            self._off[key] = seconds, found.memory.total.value / max(first.memory, 1.0)

    def _factors(self, plan: Plan) -> tuple[float, float]:
        return next((self._off[key] for key in _likenesses(plan) if key in self._off), (1.0, 1.0))

    def _seconds(self, plan: Plan) -> float:
        """Return the seconds of a step: microbatches, communication that does not overlap, and the optimizer."""
        count, stages = plan.accumulate, plan.pipeline
        rows, blocks = self._batch / (plan.replicas * count), max(self._forward.blocks / stages, 1)
        part = self._model.parameters / (plan.tensor * stages * plan.expert)
        hidden = self._hidden * rows / plan.context
        one = self._block(plan, rows)
        passed = blocks * (stages - 1) * hidden / self._memory_rate  # a stage makes a tensor per block that it skips
        forward = blocks * one.forward + one.outside / 3 + passed
        backward = blocks * one.backward + one.outside * 2 / 3 + (count > 1) * ADDED * part / self._memory_rate
        gather, reduce = self._gather(plan, part, blocks), self._reduce(plan, part, blocks)
        launches = LAUNCH * self._forward.operators / stages
        again = (2 + (plan.recompute != "none")) * launches
        forward = max(self._together(forward, gather), launches)
        both = self._together(backward, gather * plan.reshard + reduce)
        back = max(both if plan.reduce_each else self._together(backward, gather * plan.reshard), again)
        alone = min(ALONE / blocks, 1) * (gather + reduce) + self._step(plan, part)
        if stages == 1:
            return count * forward + (count - 1) * back + max(both, again) + alone
        turns = count + (stages - 1) / CHUNKS.get(plan.schedule, 1)
        send = self._one("send", hidden, 2, plan.context * plan.tensor)
        if plan.shard == plan.tensor == 1:  # each stage reduces before it sends a gradient, so reductions add up
            reduce = stages * (both - back)
        return turns * (forward + back + send) + reduce + alone

    def _step(self, plan: Plan, part: float) -> float:
        """Return the seconds of the optimizer step, with the broadcast if replicas divide the optimizer state."""
        divided = part / (plan.shard * plan.state_parts)
        sent = self._one("broadcast", part, plan.state_parts, plan.within_samples * plan.shard)
        return (self._model.stepped or STEPPED) * divided / self._memory_rate + sent

    def _gather(self, plan: Plan, part: float, blocks: float) -> float:
        """Return the seconds to all-gather the parameters of a stage's blocks."""
        if plan.shard == 1:
            return 0.0
        size = part * (self._narrow(plan) if plan.tensor == 1 else 1)
        return blocks * self._one("all-gather", size / blocks, plan.shard, plan.within_samples)

    def _reduce(self, plan: Plan, part: float, blocks: float) -> float:
        """Return the seconds to reduce the gradients of a stage's blocks over the axes `shard` and `data`."""
        apart, seconds = plan.within_samples, 0.0
        if plan.shard > 1:
            seconds += blocks * self._one("reduce-scatter", part / blocks, plan.shard, apart)
        if plan.data > 1:
            seconds += blocks * self._one("all-reduce", part / plan.shard / blocks, plan.data, apart * plan.shard)
        return seconds

    def _together(self, computing: float, sent: float) -> float:
        """Return how long computing and communication take if they begin at the same time and slow each other."""
        slower, longer = self._overlap.compute, self._overlap.communication
        if sent * longer < computing * slower:
            return computing + sent * longer * (1 - 1 / slower)
        return sent + computing * slower * (1 - 1 / longer)

    @property
    def _hidden(self) -> float:
        """The bytes of a block's input for one sample."""
        return self._forward.inputs / max(self._forward.blocks, 1) / self._batch

    def _block(self, plan: Plan, rows: float) -> Small:
        """Return the costs of one block under a plan, including the collectives of tensor parallelism."""
        word, parts, part, rows = plan.precision, self._parts, 1 / plan.tensor, rows / plan.context
        few = max(self._batch // len(self._machine.devices), 1)
        one, two, many = Kind(word, rows=few), Kind(word, rows=2 * few), Kind(word, parts, rows=parts * few)
        split = replace(many, sequence=plan.sequence) if plan.tensor > 1 else one

        def at(name: str) -> float:
            """Return a cost of the block for this microbatch, such as `forward`."""
            fixed = max(2 * few * (self._each(one, name) - self._each(two, name)), 0.0)
            whole = self._each(one, name) - fixed / few
            rest = self._between(whole, self._each(split, name) - fixed / few / parts**2, part)
            gathered = name == "kept" and plan.shard > 1 and plan.tensor == 1  # FSDP frees the fixed part
            return fixed * part * (not gathered) + rest * rows

        forward, backward, sent, kept = at("forward"), at("backward"), 0.0, at("kept")
        if plan.tensor > 1:
            size = self._hidden * self._narrow(plan)
            sent = self._small(split).sent / max(self._one("all-reduce", size * split.rows, parts, 1), 1e-12)
            sent *= self._one("all-reduce", size * rows, plan.tensor, 1)
        sends = sent * (AGAIN if plan.recompute != "none" else 1) - sent / 2
        if plan.recompute == "selective":
            again = [
                (replace(kind, recompute="selective"), kind) for kind in ((one, many) if plan.tensor > 1 else (one,))
            ]
            more = [self._each(kind, "backward") - self._each(none, "backward") for kind, none in again]
            backward += rows * (more[0] * part if plan.sequence else self._between(more[0], more[-1], part))
            whole, divided = (self._each(again[place][0], "kept") for place in (0, -1))
            kept = rows * self._between(whole, divided, part)
            if plan.sequence:  # each rank keeps the block's whole input
                kept = rows * (self._hidden + (whole - self._hidden) * part)
        elif plan.recompute != "none":
            backward, kept = backward + forward, self._hidden * rows * (part if plan.sequence else 1)
        return Small(forward + sent / 2, backward + sends, at("outside"), sent, kept)

    def _each(self, kind: Kind, name: str) -> float:
        """Return a cost of a block per sample. name: which cost, a field of `Small` such as `forward`."""
        return float(getattr(self._small(kind), name)) / kind.rows

    def _between(self, whole: float, split: float, part: float) -> float:
        """Estimate the cost of the fraction `part` of a layer, by linear interpolation between two known costs."""
        if part == 1 or self._parts == 1:
            return whole
        divided = (whole - split) / (1 - 1 / self._parts)
        return whole - divided + divided * part

    def _rough(self, kind: Kind) -> Small:
        """Estimate the costs of a block that was not traced, from one forward pass of the model."""
        forward, devices, word = self._forward, self._machine.devices, dtypes_of(kind.precision).computed
        rate = min(device.peak.get(word, 0.0) or RATE for device in devices) * PRODUCTS
        each = kind.rows / self._batch / max(forward.blocks, 1)
        narrow = 0.5 if word in ("bf16", "fp16") and self._model.wide else 1.0
        moved = 3 * narrow * each / self._memory_rate * forward.kept * _inside(kind.tensor, kind.sequence)
        computed = forward.flops * each / rate / kind.tensor + moved
        outside = 9 * narrow * forward.outside * kind.rows / self._batch / self._memory_rate / kind.tensor
        sent = 4 * self._one("all-reduce", self._hidden * narrow * kind.rows, kind.tensor, 1)
        selective = kind.recompute == "selective"
        kept = forward.products / kind.tensor if selective else forward.kept * _inside(kind.tensor, kind.sequence)
        kept = narrow * each * (kept + forward.inputs * selective)
        return Small(computed, 2 * computed + moved * selective, outside, sent, kept)

    def _one(self, kind: str, size: float, ranks: int, apart: int) -> float:
        if ranks == 1:
            return 0.0
        price = self._prices.of(_collective(kind, int(size), ranks, apart), 0)
        return 0.0 if price is None else price.seconds

    def _bytes(self, plan: Plan) -> float:
        forward, trained, model = self._forward, self._model.trained, self._model
        split = plan.tensor * plan.pipeline * plan.expert
        ways = split * plan.shard
        state = STATE * trained / (ways * plan.state_parts) * ("optimizer" not in plan.offload)
        waiting = plan.shard > 1 and (plan.pipeline > 1 or plan.accumulate > 1) and not plan.reduce_each
        buckets = trained / ways * (plan.data > 1 and plan.shard == plan.tensor == 1)
        held = model.parameters / ways + trained / (split if waiting else ways) + buckets + state
        part = 1 / (plan.replicas * plan.accumulate)  # the fraction of the batch in one microbatch
        blocks = max(forward.blocks, 1) / plan.pipeline
        last = blocks * self._block(plan, self._batch * part).kept
        again = forward.largest * _inside(plan.tensor, plan.sequence) * (plan.recompute != "none")
        outside = (forward.outside / plan.tensor + again) * part / plan.context * self._narrow(plan)
        stepping = trained / ways  # temporary memory of the optimizer's step
        return HELD * (held + max(last + outside, last * min(plan.pipeline, plan.accumulate), stepping))

    def _narrow(self, plan: Plan) -> float:
        return 0.5 if plan.dtypes.computed in ("bf16", "fp16") and self._model.wide else 1.0


def _inside(tensor: int, sequence: bool) -> float:
    """Return the fraction of a block's activations that a rank holds under tensor parallelism."""
    return 1 / tensor if sequence else 1 / 3 + 2 / 3 / tensor


@functools.cache
def _collective(kind: str, size: int, ranks: int, apart: int) -> CollectiveOperation:
    return CollectiveOperation(kind, size, tuple(range(0, ranks * apart, apart)), "fp32")


def _likenesses(plan: Plan) -> list[tuple[object, ...]]:
    """Return keys for finding similar plans, from the most specific key to the least specific."""
    mesh = plan.tensor > 1, plan.pipeline > 1, plan.shard > 1, plan.devices > 1
    return [(mesh, plan.recompute, plan.sequence), (mesh,), (plan.recompute,), ()]
