"""What a plan has done to a model, and what it does not do as one device: a sentence each, for the user to read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwise.spec.plan import Plan
from meshwise.spec.world import World


def differences(model: nn.Module, plan: Plan, world: World, joined: bool = False) -> tuple[str, ...]:
    """What a model under a plan does not do as on one device with whole batches, a sentence each."""
    kinds = " ".join({type(module).__name__ for module in model.modules()})
    notes = []
    if "BatchNorm" in kinds and not joined and world.size > 1:
        notes.append("batch norm: each rank takes the statistics of its own share, so numbers are not one device's.")
    if "BatchNorm" in kinds and plan.accumulate > 1:
        notes.append(
            f"batch norm: accumulate={plan.accumulate} takes the statistics of each microbatch by itself, so numbers "
            "are not those of accumulate=1 (they are alike on any number of devices)."
        )
    if "Dropout" in kinds and world.size > 1:
        notes.append("dropout: each rank draws its own masks, keyed by (seed, step, rank).")
    return tuple(notes)


def of_contiguous(parameters: Sequence[str]) -> tuple[str, ...]:
    """Parameters that had to be laid contiguously."""
    if not parameters:
        return ()
    return (f"shard: {_some(parameters)} lie contiguously now, as parts must; transposed or channels_last is undone.",)


def of_compiled(blocks: Sequence[str], whole: bool) -> tuple[str, ...]:
    """Blocks that are compiled. whole: the user had compiled the whole model."""
    if not blocks:
        return ()
    before = "torch.compile was laid over the model, and is taken off: " if whole else ""
    return (f"compile: {before}each of {len(blocks)} blocks is compiled by itself: {_some(blocks)}.",)


def of_recomputed(blocks: Sequence[str], recompute: str | tuple[str, ...]) -> tuple[str, ...]:
    """Blocks that run again in the backward."""
    if not blocks:
        return ()
    again = "all but matrix products and attention" if recompute == "selective" else "all of it"
    return (f"recompute: {again} runs again in the backward, in {len(blocks)} blocks: {_some(blocks)}.",)


def _some(names: Sequence[str]) -> str:
    return ", ".join(name or "the whole model" for name in names[:3]) + (" and so on" if len(names) > 3 else "")
