"""Pair the steps of a script's ranks with those of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshwise.checker.difference import FLOOR, LIMIT, apart
from meshwise.checker.finding import Finding
from meshwise.checker.plain.record import Record, Step
from meshwise.checker.rank_weights import solve

Tensors = Mapping[str, Tensor]
NEAR = 1e-6  # for weights, which are solved for


@dataclass(frozen=True, eq=False)
class At:
    """One step of an optimizer, on the ranks and in one process.

    number: counts the steps of all optimizers, from 1.
    trained: the names of all parameters that an optimizer has.
    joined: those of them that differ between ranks after some step, and are equal again at the start of a later one.
    """

    number: int
    ranks: list[Step]
    one: Step
    before: At | None
    trained: frozenset[str]
    joined: frozenset[str]

    @cached_property
    def many(self) -> dict[str, Tensor]:
        """The gradients before any clipping, each of the first rank that has it."""
        return {k: g for step in reversed(self.ranks) for k, g in step.before_clipping.gradients.items()}

    @cached_property
    def apart(self) -> set[str]:
        """The parameters whose gradients differ between ranks."""
        first, *others = (step.gradients for step in self.ranks)
        return {name for other in others for name in first.keys() & other.keys() if far_apart(first, other, [name])}

    @property
    def is_local(self) -> bool:
        """Whether each rank makes this step by itself, in a program that averages parameters later."""
        starts = [step.starts for step in self.ranks]
        return bool(self.apart & self.joined) or among(starts, self.joined) is not None

    @property
    def reads_others(self) -> bool:
        """Whether one process seems to read other samples than all ranks together, in a program without a DataLoader:
        its gradients are other, and not a sum of those of several ranks."""
        by_loader = not self.one.batches or any(self.one.batches)
        if by_loader or far_apart(self.one.before_clipping.gradients, self.many) is None:
            return False
        weights = weights_of(self, total(self.one.own))
        return weights is None or sum(abs(weight) > NEAR for weight in weights) < 2

    def last_step_of(self, name: str) -> At | None:
        """Return the newest step before this one that updates a parameter on some rank."""
        at = self.before
        while at is not None and not any(name in step.parameters for step in at.ranks):
            at = at.before
        return at

    def says(self, kind: str, evidence: str, *places: str, instead: str = "") -> Finding:
        """Return a finding of this step."""
        where = tuple(dict.fromkeys(place for place in places if place))
        return Finding(kind, True, where, f"step {self.number}: {evidence}", instead)


def steps_of(ranks: Sequence[Record], one: Record) -> Iterator[At]:
    """Yield the steps that all ranks make, in the order of rank 0. What one process lacks is empty."""
    sides = [_by_optimizer(record) for record in (*ranks, one)]
    trained = frozenset(name for record in ranks for step in record.steps for name in step.parameters)
    before: At | None = None
    joined_of = dict[int, frozenset[str]]()
    made = dict.fromkeys(sides[0], 0)
    for number, first in enumerate(ranks[0].steps, 1):
        of, at = first.optimizer, made[first.optimizer]
        made[of] += 1
        found = [side.get(of, [])[at : at + 1] for side in sides]
        if not all(found[:-1]):
            continue
        if of not in joined_of:
            of_ranks = zip(*(side[of] for side in sides[:-1]), strict=False)
            joined_of[of] = _joined([list(each) for each in of_ranks])
        alone = found[-1][0] if found[-1] else Step()
        before = At(number, [step for (step,) in found[:-1]], alone, before, trained, joined_of[of])
        yield before


def _by_optimizer(record: Record) -> dict[int, list[Step]]:
    found = dict[int, list[Step]]()
    for step in record.steps:
        found.setdefault(step.optimizer, []).append(step)
    return found


def _joined(steps: Sequence[list[Step]]) -> frozenset[str]:
    """Return the parameters that ranks update from other gradients, and that are equal again at a later start."""
    parted, found = set[str](), set[str]()
    for first, *others in steps:
        starts = [first.starts, *(other.starts for other in others)]
        found |= {name for name in parted if among(starts, [name]) is None}
        for other in others:
            held = first.gradients.keys() & other.gradients.keys()
            parted |= {name for name in held if far_apart(first.gradients, other.gradients, [name])}
    return frozenset(found)


def far_apart(one: Tensors, other: Tensors, names: Iterable[str] | None = None) -> tuple[float, str] | None:
    """Return the largest difference between tensors of the same name, relative to the tensor's norm or a thousandth of
    the largest, and the name. Return None if it is at most LIMIT."""
    most = FLOOR * max((float(value.nan_to_num().norm()) for value in one.values()), default=0.0)
    found = list[tuple[float, str]]()
    for name in sorted((one.keys() if names is None else set(names)) & one.keys() & other.keys()):
        alike = one[name].shape == other[name].shape
        far = float(apart(one[name], other[name]).norm()) if alike else float("inf")
        size = max(float(one[name].nan_to_num().norm()), most)
        found.append((far / size if size else far and float("inf"), name))
    worst = max(found, default=(0.0, ""))
    return None if worst[0] <= LIMIT else worst


def among(held: Sequence[Tensors], names: Iterable[str]) -> tuple[float, str] | None:
    """Return the difference of the first rank's tensors from those of another rank, or None."""
    return next((far for other in held[1:] if (far := far_apart(held[0], other, names))), None)


def total(own: Sequence[Tensors]) -> dict[str, Tensor]:
    """Add up the gradients of all backwards of a step."""
    return {name: sum((g[name] for g in own if name in g), torch.zeros(())) for name in set().union(*own)}


def weights_of(at: At, wanted: Tensors) -> list[float] | None:
    """Return the weights with which the gradients of each rank's losses, in order, add up to the wanted gradients."""
    own = [named for step in at.ranks for named in step.own]
    names = sorted(wanted.keys() & set().union(*own))
    if not names or any(name not in named for named in own for name in names):
        return None
    *columns, right = (torch.cat([named[name] for name in names]) for named in (*own, wanted))
    found = solve(torch.stack(columns, 1), right)
    return found[0] if found is not None and found[1] else None


def differ_by_rank(at: At, weights: Sequence[float]) -> bool:
    """Return whether ranks weigh differently in some microbatch."""
    count = len(weights) // len(at.ranks)
    return any(max(weights[m::count]) - min(weights[m::count]) > NEAR for m in range(count))


def are_means(at: At, weights: Sequence[float]) -> bool:
    """Return whether the weights of the ranks add up to 1 in each microbatch, on average."""
    return abs(sum(weights) - len(at.one.own)) <= NEAR
