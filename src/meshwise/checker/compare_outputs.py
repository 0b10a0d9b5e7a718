"""Compare module outputs, and list what a comparison leaves out.

A rank's output is the rows of its samples, a slice, or a partial sum.

A slice is a part along the sequence dimension (positions) or along the last dimension (features).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.checker.difference import LIMIT, Difference, numbers
from meshwise.checker.outputs import (
    Parts,
    Ways,
    adds_up_to,
    divided_outputs,
    has_rows_of_samples,
    output_difference,
    parts_of,
    peers_in,
)
from meshwise.checker.trace import Named, Output, StepTrace, Trace
from meshwise.spec.words import some
from meshwise.training.data.keyed import GENERATOR


@dataclass(frozen=True)
class Unseen:
    """A module call with an output that could not be compared, and the reason."""

    step: int
    at: int
    module: str
    kind: str
    why: str


def left_out(reference: Trace, actual: Trace, unseen: Sequence[Unseen], noise: Named) -> Iterator[str]:
    """Yield sentences that say what the comparison leaves out."""
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
    for name in sorted(reference.unkeyed | actual.unkeyed):
        differ = "each rank draws from its own" if name.endswith(GENERATOR) else "ranks draw different numbers"
        yield f"draws of {name}: it is not keyed, so {differ}."


_Seen = tuple[Output, Parts | None, float | None, Ways]


def compared_outputs(step: int, mine: StepTrace, other: StepTrace, unseen: list[Unseen]) -> list[Difference]:
    """Compare the module outputs of a step. Add the outputs that cannot be compared to `unseen`."""
    theirs: dict[Any, list[Output]] = defaultdict(list)
    for output in other.outputs:
        theirs[output.key].append(output)
    peers, seen = peers_in(other), list[_Seen]()
    for one in mine.outputs:
        part = parts_of(one, peers[one.key]) if one.key in peers else None
        size = part.whole if part else output_difference(one, theirs[one.key]) if theirs[one.key] else None
        by_samples = size is not None or has_rows_of_samples(one, theirs[one.key])
        ways = part.ways if part else [] if by_samples else list(divided_outputs(one, theirs[one.key]))
        seen.append((one, part, size, ways))
    layouts = {layout for *_, ways in seen for layout, far in ways if far <= LIMIT}
    found = list[Difference]()
    for at, (output, part, size, ways) in enumerate(seen):
        # A layout in which no output agrees is probably not one that the ranks use.
        near = [(far, not layout.is_last) for layout, far in ways if layout in layouts]
        summed = part is not None and part.summed
        slices, of_positions = min(near, default=(None, False))
        size = math.inf if summed else slices if size is None or (part and slices is not None) else size
        if size is None and theirs[output.key] and adds_up_to(output, [theirs[output.key]]):
            size = 0.0
        if size is None:
            single = math.prod(output.shape) == 1
            why = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            why = why if theirs[output.key] else "under the plan its forward hooks saw no such call"
            unseen.append(Unseen(step, at, output.module, output.kind, why))
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1, "at": at}
            which = "a sum" if summed else "positions" if of_positions else "features"
            facts |= {"parts": which} if summed or (part and near) else {}
            found.append(Difference("module outputs", step, output.module, size, facts))
    right = not next(numbers("loss", step, {"loss": mine.loss}, {"loss": other.loss})).fault
    for at in reversed(range(len(found))):  # a partial sum is right if the next output (or the loss) is
        if found[at].facts.get("parts") == "a sum" and right:
            found[at] = replace(found[at], relative=0.0)
        right = not found[at].fault
    return found


def of_samples(outputs: Iterable[Difference], unseen: list[Unseen]) -> Iterator[Difference]:
    """Yield the module outputs that agree with one device. Add the others to `unseen`: their rows are not samples."""
    for difference in outputs:
        if difference.fault:
            why = "its rows are not those of the samples, since nothing made of them differs"
            at, kind = difference.facts["at"], difference.facts["class"]
            unseen.append(Unseen(difference.step, at, difference.name, kind, why))
        else:
            yield difference
