"""Save the state that module calls may write, and restore it.

This covers buffers, attributes, and the containers and globals that are used by the modules' methods, or by functions
that these call by name. State in other objects is not covered.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.spec.user_code import named_outside
from meshwise.torch_compat.modules import buffers_in
from meshwise.torch_compat.tree import all_leaves

OF_TORCH = {"_parameters", "_modules", "_buffers", "forward", "__deepcopy__", "__getstate__"}
NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
VALUES = (Tensor, *NUMBERS)
CONTAINERS = (list, dict, set, deque, defaultdict, Counter, OrderedDict)


class ModuleState:
    """A saved copy of the state that module calls may write."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        every = [b for m in modules for b in buffers_in(m).values() if b is not None]
        self.buffers = [(b, b.detach().clone()) for b in every]
        self.attributes = [(m, {k: v for k, v in vars(m).items() if k not in OF_TORCH}) for m in modules]
        classes = {kind for m in modules for kind in type(m).__mro__}
        self.outside = named_outside(value for thing in (*classes, *modules) for value in vars(thing).values())
        self.containers: dict[int, tuple[Any, Any]] = {}
        for _, before in (*self.attributes, *self.outside):
            self._hold(before.values())
        self.written: list[tuple[nn.Module, str]] = []
        self.held = [(buffers_in(m), dict(buffers_in(m))) for m in modules]

    def _hold(self, values: Iterable[Any]) -> None:
        for each in values:
            if type(each) in CONTAINERS and id(each) not in self.containers:
                self.containers[id(each)] = each, copy.copy(each)
                self._hold(_inside(each))

    def now(self) -> list[Any]:
        """Return the values that a run may have written: buffers, and other changed values."""
        found: list[Any] = [b for m in self.modules for b in buffers_in(m).values()]
        for module, before in self.attributes:
            for name, value in vars(module).items():
                if name not in OF_TORCH and value is not before.get(name):
                    found += _inside(value)
                    self.written += [(module, name)] if isinstance(value, VALUES) else []
        for names, before in self.outside:
            found += [each for k in before if names[k] is not before[k] for each in _inside(names[k])]
        found += [each for container in self._changed() for each in _inside(container[0])]
        # Leave out parameters: a list in an LSTM may hold gathered ones that FSDP has freed.
        return [each for each in all_leaves(found) if isinstance(each, VALUES) and not isinstance(each, nn.Parameter)]

    def _changed(self) -> list[tuple[Any, Any]]:
        """Return the containers whose contents have changed, with copies from before."""
        every = self.containers.values()
        return [(each, before) for each, before in every if [*map(id, _inside(each))] != [*map(id, _inside(before))]]

    def put_back(self) -> None:
        """Undo what a run has written."""
        with torch.no_grad():
            for holder, before in self.held:
                holder.update(before)
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for module, before in self.attributes:
            for name in [k for k in vars(module) if k not in OF_TORCH and k not in before]:
                del module.__dict__[name]
            module.__dict__.update(before)
        for names, before in self.outside:
            names.update(before)
        for container, before in self._changed():
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if type(value) in CONTAINERS else [value]
