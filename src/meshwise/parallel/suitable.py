"""What a model must be so that several ranks can train it: known from its modules, before anything is laid out."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from meshwise.spec.errors import PlanError


def check_can_be_divided(model: nn.Module) -> None:
    """Raises PlanError for a model that no plan of several devices can train: without shapes, or with sparse gradients.

    Which parameters a shard cannot divide, it says itself (`check_can_be_sharded`).
    """
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise PlanError(
                f"parameter {name} has no shape yet: it belongs to a lazy module, and ranks would make it each by "
                "itself. Run a batch through the model before it is distributed, or write its sizes."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise PlanError(
                f"module {name or type(module).__name__} makes sparse gradients (sparse=True), which are not averaged "
                "over ranks. Leave sparse=True out, or use one device."
            )


def lay_contiguously(model: nn.Module) -> list[str]:
    """Lay parameters one number after the other in memory, in place, where they are not; returns their names."""
    moved = []
    for name, p in model.named_parameters():
        if not p.is_contiguous():
            p.data = p.data.contiguous()
            moved.append(name)
    return moved
