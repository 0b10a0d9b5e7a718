"""Check that a user's state is finite before saves and after restores.

Values that are not finite on purpose do not count, such as a parameter that is initialized to -inf, or inf in the state
of an optimizer that does not come from torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from meshwise.spec.words import ranks_text
from meshwise.torch_compat.sharding import local_of
from meshwise.transfer import collectives, stages

_Named = tuple[str, Tensor, bool]
"""(name, tensor, whether infinity is an error; NaN always is)."""
_OWN = "torch.optim"  # the package of torch's own optimizers, whose state must never be infinite


def not_finite_names(models: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the names of the parameters that contain NaN or infinity on this rank."""
    return frozenset(_bad(_named(models, {})))


def not_finite_in(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], known: frozenset[str]
) -> tuple[str, str]:
    """Return the name of the first entry with NaN or infinity, and the ranks with such entries, or ("", ""). Entries
    in `known` do not count."""
    every = collectives.gather_from_all(not_finite_here(models, optimizers, known))
    ranks = [rank for rank, name in enumerate(every) if name]
    return (every[ranks[0]], ranks_text(ranks)) if ranks else ("", "")


def not_finite_here(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], known: frozenset[str]) -> str:
    """Return the name of the first entry of this rank's state that contains NaN or infinity, or ""."""
    return next((name for name in _bad(_named(models, optimizers)) if name not in known), "")


def _named(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> Iterator[_Named]:
    """Yield this rank's parameters, and each tensor of optimizer state that belongs to them."""
    names, lacking = dict[Tensor, str](), set[Tensor]()
    for of, model in models.items():
        lacking.update(stages.absent_parameters(model))  # parameters of other pipeline stages, which are NaN here
        for name, p in model.named_parameters():
            names[p] = name
            if p not in lacking and not p.is_meta and not isinstance(p, UninitializedParameter):
                yield f"the parameter {name}" + (f" of model {of}" if of else ""), local_of(p.detach()), True
    for optimizer in optimizers.values():
        kind, strict = type(optimizer).__name__, type(optimizer).__module__.startswith(_OWN)
        for of_state, entry in optimizer.state.items():
            for key, value in entry.items() if of_state not in lacking and isinstance(entry, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"{key} of {kind} for {names.get(of_state, 'a parameter')}", local_of(value.detach()), strict


def _bad(named: Iterable[_Named]) -> Iterator[str]:
    """Yield the names of tensors that contain NaN, or an infinity that they must not contain."""
    found = [each for each in named if each[1].is_floating_point() or each[1].is_complex()]
    floats = [(name, tensor, strict) for name, tensor, strict in found if tensor.numel() and tensor.itemsize > 1]
    sums = [tensor.sum(dtype=torch.float32 if tensor.itemsize == 2 else None).isfinite() for _, tensor, _ in floats]
    fine = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    for (name, tensor, strict), whole in zip(floats, fine, strict=True):
        if not whole and bool((~tensor.isfinite() if strict else tensor.isnan()).any()):
            yield name
