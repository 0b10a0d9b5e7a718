"""Choose which parameters `shard` gathers together, and which can be divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.blocks import called_in, repeated_blocks
from meshwise.parallel.skipped import called_in_parts, may_be_skipped
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.sharding import Group, groups_of, leave_forward, place_in_memory
from meshwise.torch_compat.tree import tensors_in
from meshwise.transfer import stages

OFTEN = 8  # forwards between two checks for writes: a check is slow, as it asks autograd about every parameter
SMALL = 4096  # elements: for smaller layers, a collective costs more than keeping parameters gathered


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Return the models with parameters: `model`, or those in it if it is a `ModuleList` or `ModuleDict`."""
    return [root for root in called_in(model) if any(True for _ in root.parameters())]


def units_of(root: nn.Module) -> list[nn.Module]:
    """Return the blocks of `root` that are gathered separately: repeated layers with at least `SMALL` elements."""
    places, holders = _places(root), Counter(id(child) for m in root.modules() for child in m.children())
    units = []
    for name, block in repeated_blocks(root):
        own = all(places[key] == count for key, count in _places(block).items()) and holders[id(block)] == 1
        if own and sum(p.numel() for p in block.parameters()) >= SMALL and not called_in_parts(root, name):
            units.append(block)
    return units


def called_by_all(root: nn.Module, units: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module], list[str]]:
    """Return (units to gather separately, those for which it is unknown whether all ranks call them, notes)."""
    names = {id(module): name for name, module in root.named_modules()}
    found = [(unit, names[id(unit)], may_be_skipped(root, names[id(unit)])) for unit in units]
    skipped: dict[str, list[str]] = {}
    for _, name, why in found:
        if why:
            skipped.setdefault(why, []).append(name)
    said = [
        f"shard: a rank may skip {some(each)} ({why}), so all ranks gather this together with {type(root).__name__}."
        for why, each in skipped.items()
    ]
    return [unit for unit, _, why in found if not why], [unit for unit, _, why in found if why is None], said


def _places(module: nn.Module) -> Counter[int]:
    """Count how many modules within `module` hold each parameter, by the id of the parameter."""
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))


def check_can_be_sharded(model: nn.Module, module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise PlanError, naming the parameter, if `fully_shard` cannot shard `module`.

    ignored: parameters to leave out.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    own = [p for p in module.parameters() if p not in ignored]
    for p in own:
        if p.ndim == 0:
            raise PlanError(
                f"shard: parameter {names[id(p)]} is a single number, which cannot be divided over ranks. It cannot "
                "be whole on every rank in a pipeline, with offloaded parameters, or if it is complex. Give it shape "
                "(1,), or use only data parallelism."
            )
        if p.numel() == 0 and not isinstance(p, DTensor):
            raise PlanError(
                f"shard: parameter {names[id(p)]} of shape {tuple(p.shape)} has no elements, so there is nothing to "
                "divide. Leave it out of the model, or use data alone."
            )
    dtypes = {p.dtype: names[id(p)] for p in own if p.requires_grad and not isinstance(p, DTensor)}
    if len(dtypes) > 1:
        stored = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise PlanError(
            f"shard: the trained parameters of a block must have one dtype, but they are {stored}. Store them in one "
            "dtype (the plan's precision sets the compute dtype), or use only data parallelism."
        )


def make_contiguous(model: nn.Module) -> list[str]:
    """Make non-contiguous parameters contiguous in memory, in place. Returns notes for the user on these parameters."""
    absent = stages.absent_parameters(model)
    changed = [(name, p) for name, p in model.named_parameters() if not p.is_contiguous() and p not in absent]
    for _, p in changed:
        p.data = p.data.contiguous()
    found = some([name for name, _ in changed])
    said = f"shard: {found} were made contiguous, as shards must be. A transposed or channels_last layout is lost."
    return [said] if changed else []


AGAIN = (
    "A sharded model frees its gathered parameters after a backward, so a gradient from torch.autograd.grad(..., "
    "create_graph=True), as in a gradient penalty, cannot be differentiated. Use shard=1, such as --set zero1=true."
)


def refuse_second_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """Register hooks on a module's outputs that raise PlanError in a backward with create_graph=True."""
    for tensor in tensors_in(output) if module.training else ():
        if tensor.requires_grad:
            tensor.register_hook(_check_first_order)


def _check_first_order(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise PlanError(f"shard: {AGAIN}")


class StaysGathered:
    """Checks that a block's forward leaves the values and the memory of its gathered parameters unchanged, by hooks
    around the forward."""

    def __init__(self, module: nn.Module, groups: Sequence[Group] = ()) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._forwards, self._groups, self._writes = 0, groups, [0] * len(groups)
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, prepend=True)

    def enter(self, module: nn.Module, *unused: Any) -> None:
        """Record the memory addresses of the gathered parameters."""
        if self._forwards < 2:
            self._places = {id(p): place_in_memory(p) for p in module.parameters() if not isinstance(p, DTensor)}

    def leave(self, module: nn.Module, *unused: Any) -> None:
        """Raise PlanError if a forward has moved or written the gathered parameters."""
        self._forwards += 1
        if self._forwards > 2:
            if self._forwards % OFTEN == 0:
                self._look_for_writes(module)
            return
        for name, p in module.named_parameters():
            if not isinstance(p, DTensor) and self._places.get(id(p), place_in_memory(p)) != place_in_memory(p):
                raise _written(module, name)
        self._look_for_writes(module, first=True)

    def _look_for_writes(self, module: nn.Module, *, first: bool = False) -> None:
        for place, group in enumerate(() if rehearsing() else self._groups):
            writes = group.versions()
            if (first or writes != self._writes[place]) and (written := group.written()) is not None:
                names = (name for name, p in module.named_parameters() if p is written)
                raise _written(module, next(names, "of a layer"))
            self._writes[place] = writes


def _written(module: nn.Module, name: str) -> PlanError:
    return PlanError(
        f"shard: the forward of {type(module).__name__} changes its parameter {name} (layer.to(dtype), p.data = ..., "
        "p.lerp_(...)). Later steps gather the parameter again, and the change would be lost. Cast where the parameter "
        "is used (F.linear(x, weight.to(dtype))), write a running average in the loop after optimizer.step(), or use "
        "data alone, such as --set zero1=true."
    )


def watch_forward(module: Any) -> None:
    """Register hooks on `module` that raise PlanError for a backward of a backward, and for a write to gathered
    parameters."""
    module.register_forward_hook(refuse_second_backward)
    StaysGathered(module, groups_of(module))


def leave_in_order(root: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `forward`. If it raises, reset FSDP's state."""
    try:
        return forward(*args, **kwargs)
    except BaseException:
        leave_forward(root)
        raise
