"""Diagnose differing outputs of modules that exchange data by hand.

By hand means with torch.distributed collectives that the program itself calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.difference import LIMIT
from meshwise.checker.evidence import Evidence, near, owner_of
from meshwise.checker.outputs import Groups, peers_in
from meshwise.checker.rank_weights import solve
from meshwise.checker.sketches import row_sketches
from meshwise.spec.words import some


def sum_by_hand_is_missing(evidence: Evidence) -> str:
    """Return a sentence if the program must add up the outputs of the first wrong module over the ranks, but does not
    do so."""
    name = evidence.first.name
    if evidence.first.facts.get("parts") == "a sum":
        return (
            f"the ranks have the same samples, and their outputs of {evidence.where(name)} add up to that of one "
            "device. Each rank continues with its part of the sum. An all_reduce of the output is missing."
        )
    if evidence.exchanges_in(name, sums=True):
        return ""
    if evidence.first.facts.get("parts") == "positions" and _follows_features(evidence):
        return (
            f"each rank passes part of the features to {evidence.where(name)}, which returns part of the positions. "
            "Its forward adds nothing up over the ranks: a reduce_scatter or an all_reduce is missing."
        )
    parts = evidence.divided_by_hand(name)
    if not parts:
        return ""
    others = evidence.exchanges_in(name)
    there = f"; it exchanges in {some(others)}" if others else ""
    return (
        f"each rank works with its own part of {some(parts)}, and {evidence.where(name)} adds nothing up over the ranks"
        f"{there}: an all_reduce of its result is missing."
    )


def _follows_features(evidence: Evidence) -> bool:
    """Return True if each rank has only a slice of the features in the last module output before the first wrong
    output."""
    before = [d for d in evidence.of_kind("module outputs") if d.facts["at"] < evidence.first.facts["at"]]
    return bool(before) and before[-1].facts.get("parts") == "features"


def over_another_group(evidence: Evidence) -> str:
    """Return a sentence about the first module with wrong outputs if it sums over the wrong process group."""
    said = evidence.of_another_group(evidence.exchanges(evidence.first.name, True))
    return f"{evidence.where(evidence.first.name)} is the first whose outputs differ; {said}" if said else ""


def exchanges_by_hand(evidence: Evidence) -> str:
    """Return a sentence that names the first module with wrong outputs, and the lines of the collectives that it calls.
    Return "" if it calls none."""
    lines = evidence.exchanges_in(evidence.first.name)
    before = f"everything before it{evidence.not_seen(evidence.first.facts['at'])} is equal"
    text = f"{evidence.where(evidence.first.name)} is the first whose outputs differ; {before}"
    return f"{text}. It exchanges by hand in {some(lines)}." if lines else ""


def counted_by_ranks(evidence: Evidence) -> Cause | None:
    """Explain wrong outputs that are multiplied or divided by the number of ranks, or that contain a bias once for each
    rank. Return None if the outputs are wrong in another way."""
    key = _call(evidence)
    ranks_of = [[output] for output in evidence.steps[1].outputs if output.key == key]
    found = None if evidence.ranks_differ() else next(_scaled(evidence, ranks_of), None)
    if found is None:
        return None
    factor, added, what = found
    sizes = {evidence.plan.devices, evidence.plan.tensor, evidence.plan.context} - {1}
    lines = evidence.exchanges_in(evidence.first.name, sums=True)
    there = f" in {some(lines)}" if lines else ""
    text = f"the outputs of {evidence.where(evidence.first.name)} are"
    if near(factor, 1):
        if not what or abs(added) < LIMIT or (what != "1" and not any(near(added, size - 1) for size in sizes)):
            return None
        return Cause(
            K.DOUBLED_REDUCTION,
            f"{text} those of one device and {added:.6g} {'more' if what == '1' else f'times {what}'}: every rank "
            f"adds it before the sum{there}. Add it after the sum, or on one rank only.",
        )
    apart = f", apart from {what}," if added else ""
    for size in sizes:
        if near(factor, size):
            why = f"equal values of the ranks are added up{there}"
            return Cause(K.DOUBLED_REDUCTION, f"{text}{apart} {size} times those of one device: {why}.")
        if near(factor, 1 / size):
            why = f"the sum{there} is divided by the number of ranks, or is a mean"
            return Cause(K.DOUBLED_REDUCTION, f"{text}{apart} 1/{size} of those of one device: {why}.")
    return None


def ranks_have_parts(evidence: Evidence) -> str:
    """Return a sentence for the user if ranks with the same samples get different outputs from the first wrong
    module."""
    if not evidence.first.facts.get("first rank", 0.0) > LIMIT:
        return ""
    text = f"{evidence.where(evidence.first.name)} returns different outputs on ranks that have the same samples"
    peers = peers_in(evidence.steps[1]).get(_call(evidence), [])
    for factor, added, what in _scaled(evidence, peers):
        if near(factor, 1) and near(added, len(peers[0]) - 1) and what != "1":
            return (
                f"{text}: without {what}, which every rank adds, the outputs add up to that of one device. An "
                f"all_reduce is missing before {what} is added."
            )
    return f"{text}: a sum lacks a part."


def _call(evidence: Evidence) -> tuple[int, str, int]:
    """Return the key (microbatch, module, call number) of the first call with differing outputs."""
    facts = evidence.first.facts
    return facts["microbatch"] - 1, evidence.first.name, facts["call"] - 1


def _scaled(evidence: Evidence, groups: Groups) -> Iterator[tuple[float, float, str]]:
    """Yield (factor, added, what) if the outputs are `factor` times one device's outputs, plus `added` times `what`."""
    key = _call(evidence)
    one = next((output for output in evidence.steps[0].outputs if output.key == key), None)
    rows = _rows(groups)
    if one is None or rows is None or "0" not in one.sketches or len(one.sketches["0"]) != len(rows):
        return
    size, wanted = one.shape[-1] if one.shape else 1, rows.flatten()
    biases = {
        name: p
        for name, p in evidence.reference.initial_parameters.items()
        if owner_of(name) == one.module and p.shape == (size,) and evidence.first.step == 1
    }
    for what, value in ({"": None} | biases | {"1": torch.ones(size, dtype=torch.float64)}).items():
        columns = [one.sketches["0"].flatten()]
        if value is not None:
            shape = (1, one.shape[0] // len(rows), *one.shape[1:]) if one.shape[0] != len(rows) else (1, *one.shape[1:])
            columns.append(row_sketches(value.expand(shape)).expand_as(rows).flatten())
        found = solve(torch.stack(columns, 1), wanted)
        if found is not None and found[1]:
            yield found[0][0], found[0][1] if value is not None else 0.0, what


def _rows(groups: Groups) -> Tensor | None:
    if not groups or any("0" not in rank.sketches for ranks in groups for rank in ranks):
        return None
    return torch.cat([torch.stack([rank.sketches["0"] for rank in ranks]).sum(0) for ranks in groups])
