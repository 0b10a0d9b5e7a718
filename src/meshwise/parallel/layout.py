"""Choose along which dim each weight is split over an axis.

The result is exact for any choice; a good choice is fast.

    column    the weight is split along its outputs: the layer's output is split too, and nothing is sent
    row       the weight is split along its inputs: the input is split, and the ranks' products are added up

A column layer followed by a row layer needs one all-reduce forward and one backward (Megatron-LM, arXiv:1909.08053).
The model's own plan (`tp_plan` of transformers) says which kind each layer is. Without such a plan, the last layer of a
group is a row layer if its output has the width of the first layer's input.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.blocks import repeated_blocks
from meshwise.torch_compat.dispatch import over
from meshwise.torch_compat.fake import failing_quietly
from meshwise.torch_compat.modules import parameters_in, twin_with
from meshwise.torch_compat.torch_function import called, on_parts

UNEVEN = 8  # dims shorter than UNEVEN * ranks are split evenly or not at all


@dataclass(frozen=True)
class Layer:
    """A layer with a weight parameter that can be split.

    outputs, inputs: the dims of the weight for output and input features.
    """

    name: str
    module: nn.Module
    outputs: int
    inputs: int

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def out_length(self) -> int:
        return self.weight.shape[self.outputs]

    @property
    def in_length(self) -> int:
        return self.weight.shape[self.inputs]


@dataclass(frozen=True)
class Cut:
    """How one parameter is split over the ranks: along its dim number `dim`."""

    dim: int
    sections: int = 1
    gathered: bool = False


def cuts_of(model: nn.Module, ranks: int, *, packed: bool = True) -> dict[int, Cut]:
    """Return how to split parameters over the ranks, as a dict from the id of a split parameter to its `Cut`."""
    found = _of_multi_head(model, ranks) if packed else {}
    layers = [layer for layer in _layers(model) if id(layer.weight) not in found]
    rows = _rows(model, layers)
    first = _first(model, layers)
    widths = {layer.in_length for layer in layers if layer.name in rows}
    for layer in layers:
        row, sections = layer.name in rows, 1
        dim = layer.inputs if row else layer.outputs
        if not _divides(layer.weight.shape[dim], ranks):
            dim, row = (layer.outputs, False) if row else (layer.inputs, True)
            if isinstance(layer.module, nn.Embedding) or not _divides(layer.weight.shape[dim], ranks):
                continue
        likely = {n for n in (2, 3) if layer.out_length % n == 0 and layer.out_length // n in widths}
        if (packed or dim) and not row and likely:
            sections = sections_of(model, layer.name, layer.module, layer.in_length, layer.out_length)
            sections = sections if sections in likely and layer.out_length % (sections * ranks) == 0 else 1
        cut = found.setdefault(id(layer.weight), Cut(dim, sections, not row and layer.name in first))
        bias = getattr(layer.module, "bias", None)
        if not row and isinstance(bias, Tensor) and (cut.dim, cut.sections) == (dim, sections):
            found.setdefault(id(bias), Cut(0, sections if packed else 1))
    return found


def _of_multi_head(model: nn.Module, ranks: int) -> dict[int, Cut]:
    """Return how the parameters of nn.MultiheadAttention are split. Its input projections are one packed parameter."""
    found = {}
    for module in model.modules():
        if not isinstance(module, nn.MultiheadAttention) or module.num_heads % ranks or module.bias_k is not None:
            continue
        if module.in_proj_weight is not None:
            if "weight" in parameters_in(module.out_proj):
                found[id(module.out_proj.weight)] = Cut(1)
            found |= {id(p): Cut(0, 3) for p in (module.in_proj_weight, module.in_proj_bias) if p is not None}
    return found


def _divides(length: int, ranks: int) -> bool:
    """Return whether a dim of this length can be split (almost) evenly over the ranks."""
    return length % ranks == 0 or length >= UNEVEN * ranks


def _layers(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        if parameters_in(module).get("weight") is None:  # the weight is computed (parametrized or pruned)
            continue
        if isinstance(module, nn.Linear):
            yield Layer(name, module, 0, 1)
        elif isinstance(module, nn.Embedding):
            if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq:
                yield Layer(name, module, 0, 1)
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if module.groups == 1 and not module.transposed:
                yield Layer(name, module, 0, 1)
        elif type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int):  # GPT-2's linear layer
            yield Layer(name, module, 1, 0)


def _rows(model: nn.Module, layers: list[Layer]) -> set[str]:
    """Return the names of the layers with a weight that is split along its inputs."""
    own = getattr(model, "tp_plan", None)
    if isinstance(own, Mapping) and own:
        styles = {layer.name: _style(layer.name, own) for layer in layers}
        if any(styles.values()):
            found = {name for name, style in styles.items() if "rowwise" in style and "embedding" not in style}
            return found | {name for name in _derived(model, layers) if not styles[name]}
    return _derived(model, layers)


def _style(name: str, plan: Mapping[str, str]) -> str:
    for pattern, style in plan.items():
        if fnmatch.fnmatchcase(name, pattern) and isinstance(style, str):
            return style
    return ""


def _first(model: nn.Module, layers: list[Layer]) -> set[str]:
    """Return the names of the layers that seem to feed the first of the model's repeated blocks."""
    blocks = tuple(f"{name}." for name, _ in repeated_blocks(model))
    begin = next((n for n, layer in enumerate(layers) if layer.name.startswith(blocks)), 0) if blocks else 0
    return {
        layer.name
        for layer in layers[:begin]
        if layer.out_length == layers[begin].in_length and not isinstance(layer.module, nn.Embedding)
    }


def _derived(model: nn.Module, layers: list[Layer]) -> set[str]:
    rows = set()
    for block_name, _ in repeated_blocks(model):
        inside = [layer for layer in layers if layer.name.startswith(f"{block_name}.")]
        inside = [layer for layer in inside if not isinstance(layer.module, nn.Embedding)]
        if not inside:
            continue
        groups: dict[str, list[Layer]] = {}
        for layer in inside:
            groups.setdefault(_group_of(layer.name, inside), []).append(layer)
        ends = dict[str, str]()
        for name, group in groups.items():
            width, last = group[0].in_length, group[-1]
            rows |= {layer.name for layer in group if layer.out_length == width != layer.in_length}
            around = [layer for layer in inside if layer.name.startswith(f"{name}.")]  # this includes nested groups
            if len(around) > 1 and around[-1] is last and around[0].in_length == last.in_length == last.out_length:
                ends[name] = last.name
        ended = {inner for inner in ends for name in ends if len(groups[name]) == 1 and inner.startswith(f"{name}.")}
        rows |= {last for name, last in ends.items() if name not in ended}
    return rows


def _group_of(name: str, inside: list[Layer]) -> str:
    """Return the name of the innermost module that contains the layer `name` and at least one other layer of
    `inside`."""
    parent = name.rpartition(".")[0]
    while parent and sum(layer.name.startswith(f"{parent}.") for layer in inside) == 1:
        parent = parent.rpartition(".")[0]
    return parent


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
    layer."""
    parent = model.get_submodule(name.rpartition(".")[0])
    weight, slices = next(layer.parameters()), list[tuple[int, int]]()
    stand_in = nn.Module()
    stand_in.forward = lambda x: _watched(x.new_zeros(*x.shape[:-1], gives), slices)
    twin = twin_with(parent, name.rpartition(".")[2], stand_in)
    names = [p.name for p in inspect.signature(type(parent).forward).parameters.values() if p.default is p.empty][1:]
    given = [torch.zeros(1, 2, takes, dtype=weight.dtype, device=weight.device), *[None] * (len(names) - 1)]
    sections = 0
    _watched(weight.new_zeros(gives), slices)  # outside of the `try`, so that meshwise's own errors are raised
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(None), failing_quietly():
            type(parent).forward(twin, *given[: sum(n not in ("args", "kwargs") for n in names)])
    except _Taken as taken:
        sections = taken.args[0]
    except Exception:  # the forward may raise anything if other arguments are None
        pass
    if not sections and len(slices) > 1 and len({end - begin for begin, end in slices}) == 1:
        sections = len(slices)
    return sections or 1
