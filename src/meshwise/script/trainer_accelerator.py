"""Replace a Trainer's Accelerator by one over all ranks.

That Accelerator distributes what it prepares, and gathers from all ranks.

Tested in tests/script/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from meshwise.compat.trainers import seed_order
from meshwise.compat.tree import all_leaves, map_tensors
from meshwise.script.trainer_loader import TrainerLoader
from meshwise.script.trainer_loss import Ranks
from meshwise.script.verbs import accumulate
from meshwise.transfer import collectives


class AcceleratorOnRanks:
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
        part = self.meshwise.engine.part  # Trainer repeats the loss of a batch as often as a whole batch has samples
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
    """Return the rows of all ranks in the loader's order. A tensor without dimensions becomes one row per rank.
    Collective.

    most: how many rows of each rank to take at most; None takes all of them."""
    mine = tensor.detach()[:most] if tensor.ndim else tensor.detach()
    ranks.engine.events.send("joined", None)
    if ranks.alone:
        return mine
    mine = mine if mine.ndim else mine.reshape(1)[: ranks.samples]
    counts = [int(count) for count in collectives.all_gather(torch.tensor([len(mine)])).flatten()]
    filled = torch.cat([mine, mine.new_zeros((max(counts) - len(mine), *mine.shape[1:]))])
    gathered = collectives.all_gather(filled.contiguous())
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _padded(own: Tensor, dim: int, value: float, first: bool) -> Tensor:
    """Pad dimension `dim` of a tensor with `value` to the greatest size that this dimension has on any rank.
    Collective."""
    if dim >= own.ndim:
        return own
    most = int(collectives.all_reduce(torch.tensor(own.shape[dim]), "max"))
    if most == own.shape[dim]:
        return own
    shape = list(own.shape)
    shape[dim] = most - own.shape[dim]
    more = own.new_full(shape, value)
    return torch.cat([more, own] if first else [own, more], dim)
