"""Define the axis over whose ranks the rows of batches are divided."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.parallel.splits.axis import Axis
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.sharding import groups_of, sharded_modules
from meshwise.transfer import collectives
from meshwise.workers.verb_log import log_verb

READ = "a read of a value"


class Crossing(Exception):
    """Raised in a proof by an operator that needs the rows of another rank."""


class DataAxis(Axis):
    """The ranks that hold the rows of a batch.

    Their exchanges use a separate process group. A rank that reads a value alone then waits in this group, and does
    not receive the bytes of another rank's gradients.
    """

    name = "data"

    def __init__(self) -> None:
        own = collectives.ranks_of(None)
        every = collectives.gather_from_all(own)
        groups = {ranks: dist.new_group(list(ranks), group_desc=self.name) for ranks in sorted(set(every))}
        self.group, self.size, self.rank = groups[own], len(own), collectives.get_rank()
        self.gradient_scale = self.size
        self._averaged = dict[int, weakref.ref[Tensor]]()
        self._sharded = list[weakref.ref[Any]]()
        self.crossings: list[str] | None = None
        """The source lines of a watched model call that needed rows of other ranks. None if no call is watched."""

    def __deepcopy__(self, memo: Any) -> DataAxis:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a split tensor is pickled whole")

    def average(self, model: nn.Module) -> None:
        """Note that the gradients of the model's parameters are averaged over the ranks after a backward."""
        self._note(model.parameters())
        self._sharded += [weakref.ref(module) for _, module in sharded_modules(model)]

    def _note(self, wholes: Iterable[Tensor]) -> None:
        for p in wholes:
            self._averaged[id(p)] = weakref.ref(p, partial(self._forget, id(p)))

    def _forget(self, key: int, _: object) -> None:
        self._averaged.pop(key, None)

    def averages(self, whole: Tensor) -> bool:
        # FSDP makes a whole parameter only when it first gathers, which may be after `average`.
        if id(whole) not in self._averaged and self._sharded and isinstance(whole, nn.Parameter):
            groups = [group for ref in self._sharded if (module := ref()) is not None for group in groups_of(module)]
            self._note(p for group in groups for _, p in group.wholes())
        return id(whole) in self._averaged

    def averages_all(self, wholes: Sequence[Tensor | None]) -> bool:
        """Return whether the gradients of these parameters are averaged, or are not needed."""
        if all(map(self._averaged.__contains__, map(id, wholes))):
            return True
        return all(p is None or self.averages(p) or not p.requires_grad for p in wholes)

    @contextmanager
    def watched(self, found: list[str] | None) -> Iterator[None]:
        """Inside the `with` block, record each exchange in `found`. None: record none."""
        before, self.crossings = self.crossings, found
        try:
            yield
        finally:
            self.crossings = before

    def unheard(self) -> AbstractContextManager[None]:
        return self.watched(None)

    def _crosses(self) -> None:
        if self.crossings is not None:
            self.crossings.append(user_place())

    def _exchanges(self) -> None:
        self._crosses()
        log_verb(READ)

    def divides(self, whole: Tensor, dim: int) -> None:
        """Record a crossing if entries of `whole` along `dim` differ: the program then relies on their order."""
        if self.crossings is not None and not rows_alike(whole, dim):
            self._crosses()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self._exchanges()
        return collectives.all_reduce(tensor, op, self.group, of="values")

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._exchanges()
        return collectives.all_gather(tensor, self.group, of="rows")

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._exchanges()
        return super().reduce_scatter(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._exchanges()
        return super().all_to_all(tensor)

    def pass_on(self, tensor: Tensor) -> Tensor:
        return self.all_gather(tensor)[(self.rank - 1) % self.size]

    def agreed(self, own: bool, op: str) -> bool:
        """Return whether any rank (`max`) or every rank (`min`) says yes. Collective."""
        answer = torch.tensor([int(own)], device=collectives.device_of(self.group))
        return bool(collectives.all_reduce(answer, op, self.group, of="answers"))

    def meet(self, what: str) -> None:
        """Do nothing: the verb log finds a rank that reads alone (workers/verb_log.py)."""


class ProofAxis(Axis):
    """An axis of two ranks, of which only the first exists. Whatever needs the second raises `Crossing`."""

    name, proves, size, rank = "data", True, 2, 0

    def averages(self, whole: Tensor) -> bool:
        return True

    def divides(self, whole: Tensor, dim: int) -> None:
        if not rows_alike(whole, dim):
            raise Crossing("makes a tensor whose rows differ, such as noise")

    def _raises(self, *_: Any) -> Any:
        raise Crossing("needs the rows of other ranks")

    all_reduce = all_gather = reduce_scatter = all_to_all = pass_on = _raises  # type: ignore[assignment]

    def meet(self, what: str) -> None:
        raise Crossing(f"reads a value ({what})")


def rows_alike(whole: Tensor, dim: int) -> bool:
    """Return whether all entries of `whole` along `dim` are equal."""
    with torch.no_grad():
        return whole.shape[dim] < 2 or bool((whole == whole.narrow(dim, 0, 1)).all())
