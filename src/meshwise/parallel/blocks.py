"""Find a model's repeated blocks and the modules between them.

Only the module tree is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from meshwise.torch_compat.compiling import unwrapped

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

HOLDERS = 3
"""The fewest modules with repeated layers, such as nn.Conv2d, for which each of these modules is recomputed as a whole.
If a model has fewer such modules, its repeated layers are recomputed one by one."""


def called_in(model: nn.Module) -> list[nn.Module]:
    """Return the models that the program calls: `model` itself, or the entries of a list or dictionary of models."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return [root for child in model.children() for root in called_in(child)]
    return [unwrapped(model)]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of which `model` consists, in order, with their names, such as a transformer's embedding, each
    of its layers, and its head.

    A container (module list, dictionary or sequence) is replaced by its entries. A module that holds a container with
    several entries is replaced by its children. Modules without parameters are left out.
    """
    return list(_parts("", model, root=True))


def _parts(name: str, module: nn.Module, *, root: bool = False) -> Iterator[tuple[str, nn.Module]]:
    inner = (part for part in module.modules() if part is not module)
    if root or isinstance(module, CONTAINERS) or any(isinstance(part, CONTAINERS) and len(part) > 1 for part in inner):
        for child_name, child in module.named_children():
            yield from _parts(f"{name}.{child_name}" if name else child_name, child)
    elif any(True for _ in module.parameters()):
        yield name, module


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that `model` repeats, such as the layers of a transformer, with their names. The list is empty
    if nothing is repeated.

    Layers are entries of a container (module list, dictionary or sequence) whose class occurs at least twice in the
    model. Containers inside a layer are not searched. A container inside a container is searched if it is no sequence,
    or if it is a sequence of repeated layers, such as a stage of a ResNet.
    """
    entries = dict[nn.Module, str]()  # a dict, because a container with two parents is searched twice
    for name, module in _entries("", model):
        entries.setdefault(module, name)
    kinds = Counter(map(type, entries))
    return [(name, module) for module, name in entries.items() if kinds[type(module)] > 1]


def _entries(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = isinstance(module, CONTAINERS)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if inside and not (
            isinstance(child, CONTAINERS) and (_holds_layers(child) or not isinstance(child, nn.Sequential))
        ):
            if any(True for _ in child.parameters()):
                yield full, child
        else:
            yield from _entries(full, child)


def _holds_layers(container: nn.Module) -> bool:
    """Return whether several entries of `container` have the same class and have submodules."""
    kinds = Counter(type(child) for child in container.children() if any(True for _ in child.children()))
    return any(count > 1 for count in kinds.values())


def blocks_to_recompute(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of `model` that recompute='full' and 'selective' run again in the backward, with their
    names."""
    blocks = repeated_blocks(model) or blocks_of(model)
    found: dict[str, nn.Module] = {}
    for name, block in blocks:
        holder = name if any(True for _ in block.children()) else name.rpartition(".")[0]
        if holder and not isinstance(module := model.get_submodule(holder), nn.ModuleList | nn.ModuleDict):
            found[holder] = module
    outermost = [
        (name, module) for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)
    ]
    return outermost if len(outermost) >= HOLDERS else blocks
