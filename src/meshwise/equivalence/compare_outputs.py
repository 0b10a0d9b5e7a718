"""Compare module outputs: rows of samples, slices, or partial sums.

Slices are parts of the output along the sequence dimension (positions) or along the last dimension (features).

Tested in tests/equivalence/test_outputs.py and tests/equivalence/test_tensor_by_hand.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from meshwise.equivalence.difference import Difference, numbers
from meshwise.equivalence.left_out import Unseen
from meshwise.equivalence.outputs import divided_outputs, has_rows_of_samples, is_sum_of, output_difference
from meshwise.equivalence.peers import Parts, Ways, parts_of, peers_in
from meshwise.equivalence.tolerance import LIMIT
from meshwise.equivalence.trace import Output, StepTrace

_Seen = tuple[Output, Parts | None, tuple[float, float] | None, Ways]


def compared_outputs(step: int, mine: StepTrace, other: StepTrace, unseen: list[Unseen]) -> list[Difference]:
    """Compare the module outputs of a step. Outputs that cannot be compared are appended to `unseen`.

    mine: the step on one device.
    other: the step under the plan.
    """
    theirs: dict[Any, list[Output]] = defaultdict(list)
    for output in other.outputs:
        theirs[output.key].append(output)
    peers, seen = peers_in(other), list[_Seen]()
    for one in mine.outputs:
        part = parts_of(one, peers[one.key]) if one.key in peers else None
        size = part.whole if part else output_difference(one, theirs[one.key]) if theirs[one.key] else None
        by_samples = size or has_rows_of_samples(one, theirs[one.key])
        ways = part.ways if part else [] if by_samples else list(divided_outputs(one, theirs[one.key]))
        seen.append((one, part, size, ways))
    layouts = {layout for *_, ways in seen for layout, far in ways if far[0] <= LIMIT}
    found = list[Difference]()
    for at, (output, part, size, ways) in enumerate(seen):
        near = [(far, not layout.is_last) for layout, far in ways if layout in layouts]  # those of its neighbours
        summed = part is not None and part.summed
        slices, of_positions = min(near, default=(None, False))
        size = (math.inf, 0.0) if summed else slices if part and slices else size or slices
        if size is None and is_sum_of(output, theirs[output.key]):
            size = 0.0, 0.0
        if size is None:
            single = math.prod(output.shape) == 1
            why = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            why = why if theirs[output.key] else "under the plan its forward hooks saw no such call"
            unseen.append(Unseen(step, at, output.module, output.kind, why))
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1, "at": at}
            which = "a sum" if summed else "positions" if of_positions else "features"
            facts |= {"parts": which} if summed or (part and near) else {}
            found.append(Difference("module outputs", step, output.module, *size, facts))
    right = not next(numbers("loss", step, {"loss": mine.loss}, {"loss": other.loss})).fault
    for at in reversed(range(len(found))):  # parts of a sum are right where it is made before the next output
        if found[at].facts.get("parts") == "a sum" and right:
            found[at] = replace(found[at], relative=0.0)
        right = not found[at].fault
    return found


def of_samples(outputs: Iterable[Difference], unseen: list[Unseen]) -> Iterator[Difference]:
    """Yield the module outputs that agree with one device. Append the outputs that differ to `unseen`, the list of
    outputs that could not be compared.

    This is called for steps whose loss and gradients are right. So an output that differs was compared in a wrong way:
    its rows are not samples. Example: by chance, an expert gets as many tokens as there are samples.
    """
    for difference in outputs:
        if difference.fault:
            why = "its rows are not those of the samples, since nothing made of them differs"
            at, kind = difference.facts["at"], difference.facts["class"]
            unseen.append(Unseen(difference.step, at, difference.name, kind, why))
        else:
            yield difference
