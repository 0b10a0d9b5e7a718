"""Warn of what a proof in float64 cannot show.

A cast to a lower precision that only one side makes has no effect in float64. In the plan's own precision it shows as
larger rounding. After a value that is not finite, nothing is proven.

Parameters or moments that only the plan keeps in a lower dtype are told by their values, which it holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from meshwise.checker.compare import Comparison
from meshwise.checker.difference import precision_of
from meshwise.checker.trace import StepTrace, Trace
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.words import some

TIMES = 100.0
"""A plan is not equal if its rounding error exceeds TIMES * max(rounding error of one device, 1.2e-7), in fp32. Another
order of summation stays below this limit. A cast to bfloat16 or float16 exceeds it."""
FIRST_STEP = ("loss", "gradients")
"""Values that are judged in step 1 only. Later values depend on updates, and Adam enlarges rounding errors."""
SOME = 8  # tensors of up to this many values may fit a lower precision by chance
EPS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
NO_ROUNDING = "not looked at (--no-rounding): the plan's own precision, which shows casts of one side."
OTHER_RUN = (
    "not looked at: the plan's own precision, in which start values or the number of steps differ (torch draws other "
    "numbers after torch.set_default_dtype(torch.float64))."
)
OTHER = 2.0**-6  # start values that differ by more than this were not rounded, but drawn otherwise


def rounding_warnings(rounded: Sequence[Comparison], dtypes: Dtypes) -> Iterator[str]:
    """Yield a sentence if the plan rounds the loss or gradients of step 1 much more."""
    if not rounded:
        return
    least = max(torch.finfo(EPS[name]).eps for name in dtypes.by_field.values())
    for kind in FIRST_STEP:
        found = ([d.relative for d in side.differences if d.kind == kind and d.step == 1] for side in rounded)
        one, plan = (max(each, default=0.0) for each in found)
        if plan > TIMES * max(one, least) and not (math.isinf(plan) and dtypes.scaled):  # loss scalers skip such steps
            text = f"rounding of the {kind} in step 1 is {plan:.1e} under the plan and {one:.1e} on one device"
            yield f"{text}: something is cast to a lower precision under the plan alone, or overflows there."


def kept_coarser(rounded: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence if the plan alone keeps parameters or optimizer state in 16 bits."""
    kinds = {"parameters are": "parameters", "the optimizer's state is": "optimizer_state"}
    noise = _of_rounding(rounded[0].steps[0]) if rounded else set()
    for what, kind in kinds.items() if len(rounded) == 2 else ():
        one, plan = (getattr(trace.steps[0], kind) for trace in rounded)
        lower = {name: _lower(t) for name, t in plan.items() if name in one and _lower(t) and not _lower(one[name])}
        lower = {name: held for name, held in lower.items() if name.rpartition(" ")[0] not in noise}
        if lower:
            text = f"{what} kept in {some(sorted(set(lower.values())))} under the plan alone, as all of"
            text = f"{text} {some(lower)} fits it after step 1. Small updates are lost"
            yield f"{text}: keep parameters and optimizer state in float32."


def _of_rounding(step: StepTrace) -> set[str]:
    """Return the parameters whose gradients are only rounding: their state fits 16 bits by chance."""
    gradients = step.clipped_gradients or step.gradients
    sizes = {name: float(t.abs().max()) for name, t in gradients.items() if t.numel()}
    least = TIMES * torch.finfo(torch.float32).eps * max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size <= least}


def _lower(tensor: torch.Tensor) -> str:
    """Return `bfloat16` or `float16` if that dtype represents all values exactly."""
    return precision_of(tensor.double()).replace("float32", "") if tensor.numel() > SOME else ""


def unproven(one: Trace) -> Iterator[str]:
    """Yield a sentence that names the first step with a value that is not finite."""
    for number, step in enumerate(one.steps, 1):
        wrong = [] if math.isfinite(step.loss) else ["the loss"]
        for kind, named in (("the gradient of", step.gradients), ("", step.parameters)):
            wrong += [f"{kind} {name}".strip() for name, t in named.items() if not bool(t.isfinite().all())]
        if wrong:
            yield f"nothing is proven from step {number} on: {wrong[0]} is not finite on both sides."
            return
