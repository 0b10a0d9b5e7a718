"""List what a comparison leaves out, and why.

Each item gets one sentence.

Tested in tests/equivalence/test_pieces.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwise.data.keyed import GENERATOR
from meshwise.equivalence.trace import Named, Trace
from meshwise.spec.words import some

NORMALISED = ("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "sum")
"""Keys of `optimizer.state`. An optimizer with such a key divides a gradient by its magnitude, as Adam does."""
ADAPTIVE_STEPS = (
    "This optimizer divides the gradient by its size, so in float32 the bias takes random steps of up to the learning "
    "rate, which depend on the number of devices. Training is the same. An evaluation differs a little, because "
    "running statistics lag behind. Write bias=False in that layer."
)


@dataclass(frozen=True)
class Unseen:
    """A module call with an output that could not be compared, and the reason.

    at: the position of the call in the step.
    kind: the class of the module.
    """

    step: int
    at: int
    module: str
    kind: str
    why: str


def left_out(reference: Trace, actual: Trace, unseen: Sequence[Unseen], noise: Named) -> Iterator[str]:
    """Yield sentences that say what the comparison leaves out.

    unseen: the module outputs that could not be compared.
    noise: masks of the parameter elements that were not compared.
    """
    for (module, kind, why), calls in Counter((each.module, each.kind, each.why) for each in unseen).items():
        yield f"outputs of {module or 'the model'} ({kind}): {why} ({calls} call{'s' * (calls > 1)})."
    small = {name: int(mask.sum()) for name, mask in noise.items() if bool(mask.any())}
    if small:
        count, total = sum(small.values()), sum(mask.numel() for mask in noise.values())
        many = [name for name, few in small.items() if few * 10 > noise[name].numel()]
        where = f", most of them in {some(many)}" if many else ""
        yield (
            f"{count:,} of {total:,} values of the parameters after a step{where}: "
            "their gradients are so small that rounding is a large part of them."
        )
        if biases := _of_norms(reference, many):
            yield (
                f"of these, {some(biases)}: a bias in front of a batch norm, which subtracts it again, so its gradient "
                f"is zero except for rounding. {ADAPTIVE_STEPS}"
            )
    for name in sorted(reference.unkeyed | actual.unkeyed):
        differ = "each rank draws from its own" if name.endswith(GENERATOR) else "ranks draw different numbers"
        yield f"draws of {name}: it is not keyed, so {differ}."


def _of_norms(reference: Trace, names: Sequence[str]) -> list[str]:
    """Return the biases in front of a batch norm or instance norm, among the parameters in `names`. The gradient of
    such a bias is only rounding noise. A bias is returned only if its optimizer divides gradients by their magnitude,
    as Adam does, because the division turns the noise into full steps."""
    calls = [output for step in reference.steps[:1] for output in step.outputs]
    behind = {one.module: following.kind for one, following in pairwise(calls)}
    adapted = {n.rpartition(" ")[0] for n in reference.steps[0].optimizer_state if n.rpartition(" ")[2] in NORMALISED}
    kinds = {name: behind.get(name.removesuffix(".bias"), "") for name in names if name in adapted}
    return [name for name, kind in kinds.items() if "BatchNorm" in kind or "InstanceNorm" in kind]
