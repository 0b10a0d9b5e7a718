"""Measure bytes held on this rank between phases, by purpose.

Tested in tests/recording/test_recording.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwise.compat.sharding import groups_of, local_of, sharded_modules
from meshwise.compat.tree import tensors_in
from meshwise.engine.program import Program


def held_bytes(program: Program) -> dict[str, float]:
    """Return how many bytes this rank holds on its device, in a dict with the keys `parameters`, `gradients`,
    `optimizer` (its state) and `buffers`. Gradients that are not reduced yet count as 0."""
    models, device = program.models, torch.device(program.world.device).type
    groups = (group for model in models for _, module in sharded_modules(model) for group in groups_of(module))
    gathered = {whole: part for group in groups for whole, part in group.made_from().items()}
    parameters = [gathered.get(id(p), p) for p in program.named_parameters().values()]
    waiting = program.reduction is not None and program.reduction.unreduced

    def size(tensors: Iterable[Tensor | None]) -> float:
        own = {id(t): local_of(t) for t in tensors if t is not None}.values()
        return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in own if t.device.type == device)

    return {
        "parameters": size(parameters),
        "gradients": 0 if waiting else size(p.grad for p in parameters),
        "optimizer": size(t for optimizer in program.optimizers for t in tensors_in(list(optimizer.state.values()))),
        "buffers": size(b for model in models for b in model.buffers()),
    }
