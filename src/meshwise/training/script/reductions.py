"""Join a loop's values over ranks: `mw.sum`, `mw.mean`, `mw.gather_samples`.

Inside a loop, a value covers this rank's part of the batch; after the loop, all that this rank read in it. A rank
without samples of a batch gets a padding sample, and its value does not count.

With `grad=True`, each rank's loss depends on sums over the whole batch, and is the same on all ranks. In the backward,
the gradients of such a sum are summed over the ranks, because each rank's part enters all losses.
`mw.backward` weighs ranks as usual, so other terms of the loss are right as well. The sum is on the rank's device, even
if a rank without items gave a zero on the host. Otherwise its collectives would differ from those of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function

from meshwise.parallel.splits.crossing import gather, through
from meshwise.reports.recorder import current
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.tree import all_leaves, map_tensors
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.weighing import as_weight
from meshwise.transfer import collectives

Number = TypeVar("Number", int, float, Tensor)


def sum_over_ranks(engine: Engine, value: Number, *, grad: bool) -> Number:
    """Return the sum of `value` over all ranks, as `mw.sum` does."""
    if grad and _is_alone(engine, "mw.sum", value):
        return value
    if engine.world.size == 1:
        return joined(engine, value)
    samples = _samples_of(engine, "mw.sum", weighed=True)
    if not isinstance(value, Tensor):
        mine = torch.tensor(
            value if samples != 0 else 0, dtype=torch.int64 if isinstance(value, int) else torch.float64
        )
        return joined(engine, type(value)(_added(mine, "mw.sum").item()))
    mine = value.to(engine.world.device) * 1  # `* 1` turns bools into numbers
    mine = mine if samples != 0 else torch.where(torch.zeros_like(mine, dtype=torch.bool), mine, 0)
    total = _added(mine, "mw.sum", grad=grad).to(mine.dtype)
    return total if grad else joined(engine, total.to(value.device))


def mean_over_ranks(
    engine: Engine, value: float | Tensor, weight: float | Tensor | None, *, grad: bool
) -> float | Tensor:
    """Return the mean of `value` over all samples that the ranks have read. See `mw.mean`."""
    if grad and _is_alone(engine, "mw.mean", value):
        return value
    mean = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if engine.world.size > 1:
        samples = _samples_of(engine, "mw.mean", weighed=weight is not None)
        given = 0 if samples == 0 else samples if weight is None else weight
        here = gather(mean.to(engine.world.device)) if isinstance(value, Tensor) else mean
        known = as_weight(1 if given is None else given, here)
        # The mean of a rank without samples is NaN, and must not count.
        counted = torch.where(known != 0, here.to(known.dtype).reshape(-1), 0) * known
        sums = _added(torch.cat([counted, known.reshape(1)]), "mw.mean", grad=grad)
        joint = (sums[:-1] / sums[-1]).view(here.shape)
        mean = joint.to(here.dtype if _is_float(here) else torch.get_default_dtype()).to(
            here.device if grad else mean.device
        )
    if grad:
        return mean
    mean = joined(engine, mean.detach())
    return mean if isinstance(value, Tensor) else mean.item()


def _samples_of(engine: Engine, verb: str, *, weighed: bool) -> int | None:
    """Return how many samples this rank's value for `mw.sum` or `mw.mean` covers; None outside of batches."""
    ended, part = engine.reads.ended, engine.part
    if ended is None:
        engine.reads.check_one_share(verb, weighed=weighed)
        return None if part is None else part.samples
    if ended.padded:
        raise UsageError(
            f"{verb} was called after a loop in which a batch had fewer samples than the {engine.world.size} ranks, "
            f"so the value of some rank includes a padding sample. Call {verb} inside the loop, on each batch's "
            "value."
        )
    return sum(ended.samples)


def gather_over_ranks(engine: Engine, values: Any) -> Any:
    """Gather the rows of all ranks, in the loader's order. See `mw.gather_samples`."""
    tensors = list(all_leaves(values))
    strange = next((type(leaf).__name__ for leaf in tensors if not isinstance(leaf, Tensor)), "")
    if strange or not tensors:
        raise UsageError(
            "mw.gather_samples takes tensors with one row for each sample, or lists and dicts of such tensors, but "
            f"found {strange or 'no tensor'}. Use torch.as_tensor(values)."
        )
    counts = _counts_of(engine, tensors)
    mine = (counts, [(tuple(t.shape), t.dtype) for t in tensors])
    ranks = collectives.gather_objects(mine)
    kinds = [[(shape[1:], dtype) for shape, dtype in shapes] for _, shapes in ranks]
    batches = {None if counts is None else len(counts) for counts, _ in ranks}
    if None in batches or len(batches) > 1 or any(kind != kinds[0] for kind in kinds):
        shown = "; ".join(f"rank {n}: {', '.join(str(s) for s, _ in shapes)}" for n, (_, shapes) in enumerate(ranks))
        raise UsageError(
            f"mw.gather_samples: a rank's rows are not its samples, or the ranks' tensors do not fit together ({shown}"
            "). Pass one row for each sample of this rank's batch, in the loop or after it (torch.cat of all batches), "
            "with the same further dimensions and dtype on all ranks. For values of another loop, pass its loader to "
            "mw.distribute."
        )
    table = torch.tensor([counts for counts, _ in ranks])  # number of samples of each rank in each batch
    gather = partial(rows_of_all, table=table, rank=engine.world.rank, of="mw.gather_samples")
    result = map_tensors(lambda tensor: gather(tensor.detach()), values)
    for tensor in all_leaves(result):
        joined(engine, tensor)
    return result


def _counts_of(engine: Engine, tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how many rows of this rank's tensors belong to each batch, such as `[4, 4, 2]`, or None."""
    rows = {len(t) if t.dim() else -1 for t in tensors}
    ended, part = engine.reads.ended, engine.part
    if ended is None and part is None:
        return list(rows) if len(rows) == 1 and rows != {-1} else None
    read = list(ended.samples) if ended is not None else [part.samples] if part is not None else []
    for number, end in enumerate(accumulate(max(samples, 1) for samples in read), 1):
        if rows == {end}:
            return read[:number]
    return None


def rows_of_all(rows: Tensor, table: Tensor, rank: int, *, of: str) -> Tensor:
    """Gather the rows of all ranks, ordered by batch, and within a batch by rank.

    table: how many samples each rank has in each batch, shape (ranks, batches).
    of: a text for reports that says what is sent."""
    if int(table[rank].min()) == 0 and len(rows) == int(table[rank].clamp(min=1).sum()):  # some rows are padding
        rows = rows[torch.repeat_interleave(table[rank] > 0, table[rank].clamp(min=1)).to(rows.device)]
    most = int(table.sum(1).max())
    padded = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
    gathered = collectives.all_gather(padded, of=of).flatten(0, 1)
    begins = (table.cumsum(1) - table + most * torch.arange(len(table))[:, None]).T.flatten()
    counts = table.T.flatten()
    within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return gathered[(torch.repeat_interleave(begins, counts) + within).to(rows.device)]


def joined(engine: Engine, value: Number) -> Number:
    """Record that `value` was reduced over the ranks, and return it. The record prevents the warning that a loop's
    results were never reduced, and `meshwise check` compares the value."""
    engine.events.send("joined", value)
    return value


REFUSED = (
    "{place}: {verb}(…, grad=True) does not work with {what}: it needs the whole batch, but the backward of the first "
    "microbatch begins before the forward of the last microbatch. Use a plan without pipeline and accumulate, or a "
    "loss that is a mean over samples."
)

NOT_OURS = (
    "torch.autograd.grad or loss.backward() would return {ranks} times the gradient that {verb}(…, grad=True) has on "
    "one device. Call mw.backward instead, and compute what needs this gradient from the .grad that mw.backward leaves."
)


def _is_alone(engine: Engine, verb: str, value: Any) -> bool:
    """Check a call of `mw.sum` or `mw.mean` with grad=True. Return whether its value covers the whole batch."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{user_place()}: {verb}(…, grad=True) needs a tensor, but got a {type(value).__name__}.")
    plan, part = engine.plan, engine.part
    sizes = {"pipeline": plan.pipeline, "accumulate": plan.accumulate}
    if what := ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1):
        raise UsageError(REFUSED.format(place=user_place(), verb=verb, what=what))
    engine.program.joined_at, engine.program.coupled_gradients = engine.program.backwards, True
    if engine.world.size == 1:
        return True
    if part is None or engine.reads.ended is not None:
        raise UsageError(
            f"{user_place()}: {verb}(…, grad=True) works only in a loss, inside the loop over the loader and "
            f"before mw.backward. For a value that is no part of a loss, call {verb} without grad=True."
        )
    return part.whole


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _added(value: Tensor, of: str, *, grad: bool = False) -> Tensor:
    """Return the sum over the ranks. grad: whether to keep its gradient, so that its backward is collective."""
    if not grad:
        return collectives.all_reduce(value.detach().clone(memory_format=torch.contiguous_format), of=of)
    whole = gather(value)
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32)) if _is_float(whole) else whole
    if _is_float(whole) and not whole.requires_grad and torch.is_grad_enabled():
        whole = whole.detach().clone().requires_grad_()  # every rank must run the backward, which is collective
    return through(_Added, whole, of)


class _Added(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, of: str) -> Tensor:
        ctx.of = of
        return collectives.all_reduce(value.clone(memory_format=torch.contiguous_format), of=of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if current().phase != "backward":  # outside mw.backward, this is the gradient of this rank's loss alone
            raise UsageError(NOT_OURS.format(verb=ctx.of, ranks=collectives.world_size()))
        return through(_Added, gradient, ctx.of), None
