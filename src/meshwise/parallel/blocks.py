"""The blocks of a model: its repeated layers, and what stands beside them. Found from the module tree alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of `model` one after another, by name: the entries of its lists and sequences, and every other module
    that holds no such list. Modules without parameters or children of their own are left out."""
    return list(_parts("", model, root=True))


def _parts(name: str, module: nn.Module, *, root: bool = False) -> Iterator[tuple[str, nn.Module]]:
    if root or isinstance(module, CONTAINERS) or _holds_a_list(module):
        for child_name, child in module.named_children():
            yield from _parts(f"{name}.{child_name}" if name else child_name, child)
    elif any(True for _ in module.parameters()):
        yield name, module


def _holds_a_list(module: nn.Module) -> bool:
    return any(isinstance(part, CONTAINERS) and len(part) > 1 for part in module.modules() if part is not module)
