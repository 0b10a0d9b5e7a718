"""Bound a plan's memory and time from below, before rehearsing it.

Memory: parameters, their gradients and the optimizer's state are all on the devices when the optimizer steps. Time: the
FLOPs of the model at the peak rate of the devices, plus the bubble of the pipeline. The bytes of parameters and
gradients are known from the model. The bytes of the optimizer's state and the FLOPs are known from the first plan that
was rehearsed.

Tested in tests/rehearsal/test_bounds.py.
"""

from __future__ import annotations

from meshwise.parallel.schedule import CHUNKS
from meshwise.rehearsal.estimator import Rehearsed
from meshwise.rehearsal.from_few import Facts
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.spec.units import bytes_text

COMPUTED_IN = ("fp64", "fp32", "tf32", "bf16", "fp16")


class Bounds:
    """Lower bounds on the memory and the step time of any plan of one job on one machine.

    A search uses them to reject plans before it simulates them.
    """

    def __init__(self, model: Facts, machine: Machine, cap: int | None) -> None:
        """cap: the most bytes of each device's memory that a step may use. None for all of the memory."""
        self._model = model
        sizes = [device.memory for device in machine.devices]
        self.room = None if None in sizes else max(size for size in sizes if size is not None)
        self.room = cap if self.room is None or (cap is not None and cap < self.room) else self.room
        peaks = [max((device.peak.get(word, 0.0) for word in COMPUTED_IN), default=0.0) for device in machine.devices]
        self._peaks = peaks if all(peaks) else []
        self._state = 0.0
        self._flops = 0.0

    def learn(self, found: Rehearsed) -> None:
        """Learn the size of the optimizer's state and the FLOPs of a step from a simulated plan.

        Only the first suitable plan is used. A suitable plan has no mesh axes except `data` and `shard`, and no ZeRO-1,
        offload or unequal shares of the batch. The size of the state is stored as bytes per byte of parameters.
        """
        plan, work = found.estimate.plan, found.traces[0].step
        simple = plan.devices == plan.data * plan.shard and not plan.shares
        if self._flops or plan.state_parts > 1 or plan.offload or not simple:
            return
        self._state = work.holds("optimizer") / max(work.holds("parameters"), 1)
        once = 1.0 if plan.recompute == "none" else 3 / 4  # the forward is at most a fourth, and runs twice
        self._flops = work.flops * plan.devices * once

    def too_large(self, plan: Plan) -> str:
        """Return the reason why the plan cannot fit in memory even without activations."""
        if self.room is None or plan.offload or plan.param_dtype is not None:
            return ""
        ways = plan.shard * plan.tensor * plan.pipeline * plan.expert
        model = self._model
        state = model.parameters * self._state / plan.state_parts
        if (model.parameters + model.trained + state) / ways <= self.room:
            return ""
        return f"parameters, gradients and the optimizer's state alone take more than {bytes_text(self.room)}"

    def seconds(self, plan: Plan) -> float:
        """Return a lower bound on the seconds of a step under the plan. Return 0 if nothing is known yet."""
        if not self._peaks:
            return 0.0
        bubble = 1 + (plan.pipeline - 1) / (plan.accumulate * CHUNKS.get(plan.schedule, 1))
        return self._flops * bubble / sum(self._peaks[: plan.devices])
