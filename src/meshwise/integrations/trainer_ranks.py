"""Weigh a Trainer's loss, and run its Accelerator over all ranks.

The derivative and the graph of the first loss show what it is a mean over. Tested in
tests/training/script/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from meshwise.integrations.private_parts import seed_order
from meshwise.integrations.trainer_loader import TrainerLoader
from meshwise.spec.errors import UsageError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.tree import all_leaves, map_tensors
from meshwise.training.autograd.loss_graph import count_of_sum, cross_entropy_means, is_of_items
from meshwise.training.engine import steps
from meshwise.training.script.reductions import rows_of_all
from meshwise.training.script.trainers import OfTrainer
from meshwise.training.script.verbs import accumulate
from meshwise.transfer import collectives

SUM, MEAN, ITEMS = "a sum over num_items_in_batch", "a mean over samples", "a mean over other items"
MIXED = "a sum over num_items_in_batch and more"


@dataclass(eq=False)
class Ranks(OfTrainer):
    """The state shared by the meshwise classes that override methods of transformers' Trainer and of its
    Accelerator."""

    loss: Tensor | None = None
    weight: Tensor | None = None
    computed: bool = False
    items: bool = False

    def __post_init__(self) -> None:
        self.kinds: dict[bool, str] = {}

    @property
    def kind(self) -> str:
        return self.kinds.get(self.items, MEAN)

    def backward(self, loss: Tensor) -> None:
        """Run `mw.backward` on the loss of this rank's part of the batch."""
        weight = self.weight if self.kind == ITEMS else None
        self.loss = steps.backward(self.engine, loss, weight, "sum" if self.kind == SUM else "mean")

    def whole_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of a whole evaluation batch, given the loss of this rank's part. Collective."""
        own = loss.detach().double().reshape(())
        weight = torch.as_tensor(1.0 if self.kind == SUM else self.samples if self.weight is None else self.weight)
        weight = weight.to(own) * (self.samples > 0)
        total = collectives.all_reduce(torch.stack([torch.where(weight != 0, own * weight, 0), weight]))
        return (total[0] if self.kind == SUM else total[0] / total[1]).to(loss)


def first_loss(ranks: Ranks, compute: Callable[..., Any], items: Any, args: Any, options: dict[str, Any]) -> Any:
    """Compute the first loss, find out what it is a mean over, and return the result of `compute`."""
    if items is not None:
        items = torch.as_tensor(items).detach()
        items = (items if items.is_floating_point() else items.double()).clone().requires_grad_()
        options = {**options, "num_items_in_batch": items}
    with torch.enable_grad():
        result = compute(*args, **options)
    loss, kind, part = loss_of(result), MEAN, ranks.engine.part
    by = None
    if items is not None and loss.requires_grad:
        by = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)[0]
    if by is not None:
        added, near = -(by * items).detach().double(), 1e-5 if torch.finfo(loss.dtype).eps < 1e-5 else 3e-2
        alike = rehearsing() or torch.allclose(added, loss.detach().double(), rtol=near, atol=1e-12, equal_nan=True)
        kind = SUM if alike else MIXED
    elif is_of_items(loss, 1 if part is None else len(part.indices)) or count_of_sum(loss):
        kind = ITEMS
    kinds = collectives.gather_objects(kind)
    kind = next((each for each in (MIXED, SUM, ITEMS) if each in kinds), MEAN)
    if kind == MIXED:
        raise UsageError(
            f"Trainer: the loss of {type(ranks.trainer.model).__name__} is {SUM} plus another term, such as that of a "
            "router. Remove that term (router_aux_loss_coef=0), or pass a compute_loss_func without it."
        )
    ranks.kinds[ranks.items] = kind
    ranks.weight = weight_of(ranks, loss) if kind == ITEMS else None
    return result


def loss_of(result: Any) -> Tensor:
    """Return the loss from the result of `compute_loss`, which may be a tuple (loss, model outputs)."""
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def weight_of(ranks: Ranks, loss: Tensor) -> Tensor:
    """Return the number by which a sum was divided to compute the loss, such as the number of tokens."""
    found = count_of_sum(loss) or [over for over, _, _ in cross_entropy_means(loss)]
    if len(found) != 1:
        raise UsageError(
            f"Trainer: the loss of {type(ranks.trainer.model).__name__} must have exactly one cross entropy over items "
            f"such as tokens, but has {len(found)}. Pass a compute_loss_func that divides a sum by num_items_in_batch."
        )
    return found[0]


class DistributedAccelerator:
    """A base class that is added to the class of a Trainer's Accelerator. It overrides the methods that prepare
    objects, run the backward and exchange values between processes, so that meshwise does this over all ranks."""

    meshwise: Ranks

    def prepare_model(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        self.meshwise.add([model])
        return super().prepare_model(model, *args, **options)  # type: ignore[misc]

    def prepare_optimizer(self: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        self.meshwise.engine.add_optimizer(getattr(optimizer, "optimizer", optimizer))
        return super().prepare_optimizer(optimizer, *args, **options)  # type: ignore[misc]

    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(data_loader, DataLoader):
            return data_loader
        if self.use_seedable_sampler and type(data_loader.sampler) is RandomSampler:
            seed_order(data_loader, self.dataloader_config.data_seed)
        return TrainerLoader(self.meshwise.share(data_loader), self.gradient_state)

    def backward(self: Any, loss: Tensor, **options: Any) -> None:
        self.meshwise.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def no_sync(self: Any, model: Any = None) -> contextlib.AbstractContextManager[None]:
        return accumulate()

    def clip_grad_norm_(self: Any, *args: Any, **options: Any) -> Any:
        return self.meshwise.engine.program.plain(super().clip_grad_norm_(*args, **options))  # type: ignore[misc]

    def wait_for_everyone(self: Any) -> None:
        collectives.barrier(collectives.everyone())

    def gather(self: Any, tensor: Any) -> Any:
        return map_tensors(functools.partial(_rows, self.meshwise, None if self.meshwise.samples else 0), tensor)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in all_leaves(input_data)):
            own = list(input_data) if self.meshwise.samples else []
            return [each for rank in collectives.gather_objects(own) for each in rank]
        # Keep one row for each sample, also of a loss, which Trainer repeats for each sample of its batch.
        part = self.meshwise.engine.part
        return map_tensors(functools.partial(_rows, self.meshwise, part and part.samples), input_data)

    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if self.meshwise.alone or reduction == "none":
            return tensor
        ranks = collectives.all_reduce(torch.tensor(int(self.meshwise.samples > 0))).item()
        by = 1 / ranks if reduction == "mean" else 1

        def reduced(own: Tensor) -> Tensor:
            return collectives.all_reduce(own.clone() if self.meshwise.samples else torch.zeros_like(own)) * by

        return map_tensors(reduced, tensor)

    def pad_across_processes(
        self: Any, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        if self.meshwise.alone:
            return tensor
        return map_tensors(lambda own: _padded(own, dim, pad_index, pad_first), tensor)


def _rows(ranks: Ranks, most: int | None, tensor: Tensor) -> Tensor:
    """Return the rows of all ranks in the loader's order, at most `most` of each rank."""
    mine = tensor.detach()[:most] if tensor.ndim else tensor.detach()
    ranks.engine.events.send("joined", None)
    if ranks.alone:
        return mine
    mine = mine if mine.ndim else mine.reshape(1)[: ranks.samples]
    counts = collectives.all_gather(torch.tensor([len(mine)])).cpu()
    return rows_of_all(mine, counts, ranks.engine.world.rank, of="a Trainer's rows")


def _padded(own: Tensor, dim: int, value: float, first: bool) -> Tensor:
    """Pad dimension `dim` of a tensor with `value` to its greatest size on any rank."""
    if dim >= own.ndim:
        return own
    most = int(collectives.all_reduce(torch.tensor(own.shape[dim]), "max"))
    if most == own.shape[dim]:
        return own
    shape = list(own.shape)
    shape[dim] = most - own.shape[dim]
    more = own.new_full(shape, value)
    return torch.cat([more, own] if first else [own, more], dim)
