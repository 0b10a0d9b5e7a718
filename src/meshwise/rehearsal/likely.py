"""Guess a plan's cost, to rehearse the likely best first.

Nobody is told these figures but as a first order. They come from one forward of the model on one device, the rates of
the machine, and how far they were off for plans that were rehearsed.

Tested in tests/rehearsal/test_likely.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwise.parallel.schedule import CHUNKS
from meshwise.rehearsal.estimate import Estimate
from meshwise.rehearsal.from_few import Facts
from meshwise.rehearsal.prices import Prices
from meshwise.rehearsal.work import CollectiveOperation
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan

PRODUCTS, RATE, MEMORY_RATE, LAUNCH = 0.7, 1e11, 1e10, 1e-5
"""Of the peak, what matrix products reach; FLOP/s and bytes a second where no peak is known; seconds to launch an
operator from Python."""
EXPOSED = 0.1
"""Of what communicates under computing, what is not hidden: the first gather, the last reduction."""
STATE = 2.0
"""Bytes of an optimizer's state for each of the trained parameters': Adam's."""


@dataclass(frozen=True)
class Guess:
    """Of a plan: seconds of a step and bytes of a device."""

    seconds: float
    memory: float


class Likely:
    """Guesses of the plans of one job on one machine."""

    def __init__(self, model: Facts, machine: Machine) -> None:
        self._model, self._forward = model, model.forward
        self._prices, self._machine = Prices(machine), machine
        self._off: dict[tuple[object, ...], tuple[float, float]] = {}
        self._first = functools.cache(self._guess)

    def __call__(self, plan: Plan) -> Guess:
        """By how far guesses of plans were off that are like this one."""
        first = self._first(plan)
        seconds, memory = self._factors(plan)
        return Guess(first.seconds * seconds, first.memory * memory)

    def learn(self, found: Estimate) -> None:
        """From a plan that was rehearsed."""
        first = self._first(found.plan)
        seconds = found.seconds.value / first.seconds if found.seconds is not None and first.seconds else 1.0
        for key in _likenesses(found.plan):
            self._off[key] = seconds, found.memory.total.value / max(first.memory, 1.0)

    def _factors(self, plan: Plan) -> tuple[float, float]:
        return next((self._off[key] for key in _likenesses(plan) if key in self._off), (1.0, 1.0))

    def _guess(self, plan: Plan) -> Guess:
        return Guess(self._seconds(plan), self._bytes(plan))

    def _seconds(self, plan: Plan) -> float:
        forward, devices, word = self._forward, self._machine.devices[: plan.devices], plan.dtypes.computed
        rate = min(device.peak.get(word, 0.0) or RATE for device in devices) * PRODUCTS
        memory = min(device.memory_rate or device.memory_bandwidth or MEMORY_RATE for device in devices)
        products = forward.flops / rate / plan.devices
        moved = 3 * self._narrow(plan) * (forward.kept + forward.outside) / memory / plan.devices
        again = {"none": 0.0, "selective": moved}.get(str(plan.recompute), products + moved)
        computing = 3 * (products + moved) + again
        host = LAUNCH * forward.operators * plan.accumulate * (3 + (plan.recompute != "none")) / plan.pipeline
        bubble = 1 + (plan.pipeline - 1) / (plan.accumulate * CHUNKS.get(plan.schedule, 1))
        hidden, shown = self._communication(plan)
        return max(computing, host) * bubble + shown + max(hidden - computing, EXPOSED * hidden)

    def _communication(self, plan: Plan) -> tuple[float, float]:
        """Seconds of what goes beside computing (parameters, gradients), and of what does not (activations)."""
        inner = plan.context * plan.tensor
        apart = inner * plan.pipeline * plan.expert
        part = self._model.parameters / (plan.tensor * plan.pipeline * plan.expert)
        blocks = max(self._forward.blocks // plan.pipeline, 1)
        hidden = shown = 0.0
        if plan.shard > 1:
            gather = self._one("all-gather", part * self._narrow(plan) / blocks, plan.shard, apart)
            reduce = self._one("reduce-scatter", part / blocks, plan.shard, apart)
            often = 1 if plan.pipeline > 1 else plan.accumulate
            hidden += blocks * (gather * (1 + plan.reshard) * often + reduce * (often if plan.reduce_each else 1))
        if plan.data > 1:
            hidden += self._one("all-reduce", part / plan.shard, plan.data, apart * plan.shard)
        if plan.tensor > 1:
            sent = self._forward.inputs * self._narrow(plan) / max(self._forward.blocks, 1)
            sent /= plan.replicas * plan.accumulate
            times = 4 + 2 * (plan.recompute == "full")
            shown += times * blocks * plan.accumulate * self._one("all-reduce", sent, plan.tensor, 1)
        return hidden, shown

    def _one(self, kind: str, size: float, ranks: int, apart: int) -> float:
        price = self._prices.of(_collective(kind, int(size), ranks, apart), 0)
        return 0.0 if price is None else price.seconds

    def _bytes(self, plan: Plan) -> float:
        forward, trained = self._forward, self._model.trained
        split = plan.tensor * plan.pipeline * plan.expert
        ways = split * plan.shard
        state = STATE * trained / (ways * (plan.data if plan.zero1 else 1)) * ("optimizer" not in plan.offload)
        waiting = plan.shard > 1 and (plan.pipeline > 1 or plan.accumulate > 1) and not plan.reduce_each
        held = self._model.parameters / ways + trained / (split if waiting else ways) + state
        # Of tensors between split layers a third is whole on every rank.
        inside = 1 / plan.tensor if plan.sequence else 1 / 3 + 2 / 3 / plan.tensor
        kept = {"none": forward.kept * inside, "selective": forward.products / plan.tensor}.get(str(plan.recompute), 0)
        if plan.recompute != "none":
            kept += forward.inputs / (plan.tensor if plan.sequence else 1) + forward.largest * inside
        activations = kept * min(plan.pipeline, plan.accumulate) / plan.pipeline + forward.outside / plan.tensor
        return held + activations * self._narrow(plan) / (plan.replicas * plan.accumulate * plan.context)

    def _narrow(self, plan: Plan) -> float:
        return 0.5 if plan.dtypes.computed in ("bf16", "fp16") and self._model.wide else 1.0


@functools.cache
def _collective(kind: str, size: int, ranks: int, apart: int) -> CollectiveOperation:
    return CollectiveOperation(kind, size, tuple(range(0, ranks * apart, apart)), "fp32")


def _likenesses(plan: Plan) -> list[tuple[object, ...]]:
    """What plans are alike by, the closest first."""
    mesh = plan.tensor > 1, plan.pipeline > 1, plan.shard > 1, plan.devices > 1
    return [(mesh, plan.recompute, plan.sequence), (mesh,), (plan.recompute,), ()]
