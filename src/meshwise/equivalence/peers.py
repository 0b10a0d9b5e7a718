"""Classify outputs of ranks with the same samples.

A program may divide the work of its modules by hand. Ranks with the same samples then have equal outputs, slices of the
whole output, or parts of a sum. The same holds for the gradients that reach the outputs.

Tested in tests/equivalence/test_tensor_by_hand.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwise.equivalence.outputs import (
    Layout,
    divided_outputs,
    has_rows_of_samples,
    output_difference,
    rows_difference,
)
from meshwise.equivalence.tolerance import LIMIT
from meshwise.equivalence.trace import Output, StepTrace

Ways = list[tuple[Layout, tuple[float, float]]]
Groups = Sequence[Sequence[Output]]
"""The output of one module call on all ranks. Each inner list holds the outputs of ranks that have the same samples."""


@dataclass(frozen=True)
class Parts:
    """Possible explanations why ranks with the same samples have different outputs of one module call. Each field
    compares these outputs with the output on one device.

    whole: the (relative, absolute) difference, if each rank has the whole output for its samples. None if the shapes
        exclude this.
    ways: pairs (layout, difference) for each layout in which each rank may have a slice of the output. The difference
        is (relative, absolute).
    summed: whether the ranks' outputs add up to the output on one device.
    """

    whole: tuple[float, float] | None
    ways: Ways
    summed: bool


def peers_in(step: StepTrace) -> dict[Any, Groups]:
    """Return the module outputs of ranks that have the same samples. The key is (microbatch, module, number of the
    output). Return an empty dict if each rank has its own samples."""
    sides = [[{output.key: output for output in rank} for rank in ranks] for ranks in step.peers]
    first = sides[0][0] if sides else {}
    return {
        key: [[rank[key] for rank in ranks] for ranks in sides]
        for key in first
        if all(key in rank for ranks in sides for rank in ranks)
    }


def parts_of(one: Output, groups: Groups) -> Parts | None:
    """Look for explanations why ranks with the same samples have different outputs of a module call. Return None if the
    outputs of these ranks are equal.

    one: the output on one device.
    groups: the outputs of all ranks, where ranks with the same samples form a group.
    """
    if all(_alike(ranks[0], other) for ranks in groups for other in ranks[1:]):
        return None
    firsts = [ranks[0] for ranks in groups]
    whole = output_difference(one, firsts) if has_rows_of_samples(one, firsts) else None
    ways = list(divided_outputs(one, groups[0])) if len(groups) == 1 else []
    return Parts(whole, ways, adds_up_to(one, groups))


def adds_up_to(one: Output, groups: Groups) -> bool:
    """Return whether the outputs of ranks that share samples add up to the output of one device."""
    if any(other.shape != ranks[0].shape for ranks in groups for other in ranks):
        return False
    found = output_difference(one, [_total(ranks) for ranks in groups])
    return found is not None and found[0] <= LIMIT


def _total(ranks: Sequence[Output]) -> Output:
    layouts = [layout for layout in ranks[0].sketches if layout != "unordered"]
    return replace(ranks[0], sketches={each: torch.stack([r.sketches[each] for r in ranks]).sum(0) for each in layouts})


def _alike(a: Output, b: Output) -> bool:
    same = a.shape == b.shape and a.sketches.keys() == b.sketches.keys()
    return same and rows_difference(a.sketches["whole"], b.sketches["whole"])[0] <= LIMIT
