"""Find whether a layer's output packs queries, keys and values.

A trial run of the layer's parent module shows it.

The parent runs with a stand-in for the layer. The output of the stand-in records how the parent's code slices it. A
wrong finding costs only communication, because the result is exact for any number of sections.

Tested in tests/splits/test_split_rules.py and tests/parallel/test_split_models.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.dispatch import over
from meshwise.compat.fake import failing_quietly
from meshwise.compat.modules import twin_with
from meshwise.compat.torch_function import called, on_parts


class _Taken(Exception):
    """Raised in a trial run when code divides the last dim of a `_Result` into sections, by `chunk`, `split` or a
    reshape. Its argument is the number of sections, or 1 if the sections are unequal."""


class _Result(Tensor):
    """Stands for a layer's output in a trial run of the layer's parent module. It records in `slices` which slices of
    its last dim the parent's code takes."""

    slices: list[tuple[int, int]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with on_parts():
            watched = next(each for each in args if isinstance(each, _Result))
            length, made = watched.shape[-1], func(*args, **(kwargs or {}))
            name = called(func)
            if name == "__getitem__":
                key = args[1][-1] if isinstance(args[1], tuple) else None
                if isinstance(key, slice):
                    watched.slices.append(key.indices(length)[:2])
                return made
            if isinstance(made, tuple | list) and name in ("chunk", "split"):
                lengths = {piece.shape[-1] for piece in made}
                raise _Taken(len(made) if len(lengths) == 1 and len(made) * lengths.pop() == length else 1)
            if isinstance(made, Tensor) and made.shape[-1] == length and made.numel() == watched.numel():
                return _watched(made, watched.slices)
            if isinstance(made, Tensor) and made.numel() == watched.numel():
                before = [dim for dim in range(made.dim()) if made.shape[dim:].numel() == length]
                raise _Taken(made.shape[before[-1]] if before else 1)
            return made


def _watched(result: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    result.__class__ = over(_Result, type(result))
    result.slices = slices  # type: ignore[attr-defined]
    return result


def sections_of(model: nn.Module, name: str, layer: nn.Module, takes: int, gives: int) -> int:
    """Return how many equal sections a layer's output consists of: 3 if queries, keys and values are computed by one
    layer. Return 1 if this is unknown.

    takes, gives: the number of input and output features of the layer.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    weight, slices = next(layer.parameters()), list[tuple[int, int]]()
    stand_in = nn.Module()
    stand_in.forward = lambda x: _watched(x.new_zeros(*x.shape[:-1], gives), slices)
    twin = twin_with(parent, name.rpartition(".")[2], stand_in)
    names = [p.name for p in inspect.signature(type(parent).forward).parameters.values() if p.default is p.empty][1:]
    given = [torch.zeros(1, 2, takes, dtype=weight.dtype, device=weight.device), *[None] * (len(names) - 1)]
    sections = 0
    _watched(weight.new_zeros(gives), slices)  # an error of ours is not taken for one of the module
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(None), failing_quietly():
            type(parent).forward(twin, *given[: sum(n not in ("args", "kwargs") for n in names)])
    except _Taken as taken:
        sections = taken.args[0]
    except Exception:  # whatever a module raises that is given nothing for a mask
        pass
    if not sections and len(slices) > 1 and len({end - begin for begin, end in slices}) == 1:
        sections = len(slices)
    return sections or 1
