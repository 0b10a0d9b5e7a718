"""Shorten a job's model to few of its repeated blocks.

If blocks are alike, the cost of a step with many of them can be computed from steps with few.

Blocks are alike if their modules have the same classes, settings, parameters and buffers, except for the block's index,
and if their forwards run the same operators. In a sequence of such blocks, all but the first few are never built:
modules in their place return their input. Groups of blocks can also be alike, such as groups of three blocks with
windowed attention and one with full attention.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwise.parallel.blocks import blocks_of, repeated_blocks
from meshwise.planner.insertions import NotExtrapolable
from meshwise.torch_compat.dispatch import gives_view
from meshwise.torch_compat.fake import calls_so_far
from meshwise.torch_compat.profiling import flops_of
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.job.job import Job

LONGEST_GROUP = 6
_OWN_NUMBER = re.compile(r"idx|index|number|layer_id")
_OF_MODULES = set(vars(nn.Module()))


@dataclass(frozen=True)
class Stretch:
    """A sequence of equal groups of blocks in a model. A group is often a single block."""

    names: tuple[str, ...]
    start: int
    group: int
    count: int
    kinds: tuple[type[nn.Module], ...]

    @property
    def is_whole(self) -> bool:
        """Whether this sequence contains all blocks in `names`."""
        return self.count * self.group == len(self.names)

    def beginning(self, count: int) -> Stretch:
        """Return this sequence as it is in a model shortened to `count` groups."""
        more = (self.count - count) * self.group
        return replace(self, count=count, names=self.names[: len(self.names) - more])


@dataclass
class Forward:
    """The size of one forward pass on the global batch. All fields except the counts are in bytes."""

    flops: int = 0
    operators: int = 0
    kept: int = 0
    products: int = 0
    largest: int = 0
    outside: int = 0
    inputs: int = 0
    blocks: int = 0


class ForwardRecorder:
    """Records a forward pass: the operators of each block, with their inputs, and the FLOPs and bytes of all
    operators."""

    def __init__(self) -> None:
        self.done: dict[str, list[object]] = defaultdict(list)
        self.totals = Forward()
        self._inside: list[str] = []
        self._made = 0  # bytes of results in the current block so far

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an operator by calling `run`, record the operator, and return its output."""
        if self._inside:
            plain = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, bool))
            given = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in((args, kwargs)))
            self.done[self._inside[-1]].append((func, given, plain))
        out = run()
        if not gives_view(func):
            self._add(flops_of(func, args, kwargs, out), sum(t.nbytes for t in tensors_in(out)))
        return out

    def _add(self, flops: int, made: int) -> None:
        all_of_it = self.totals
        all_of_it.flops, all_of_it.operators = all_of_it.flops + flops, all_of_it.operators + 1
        if not self._inside:
            all_of_it.outside += made
            return
        self._made += made
        all_of_it.kept, all_of_it.products = all_of_it.kept + made, all_of_it.products + made * (flops > 0)
        all_of_it.largest = max(all_of_it.largest, self._made)

    def _enters(self, name: str, block: nn.Module, args: Any) -> None:
        self._inside.append(name)
        self._made = 0
        self.totals.blocks += 1
        self.totals.inputs += next((t.nbytes for t in tensors_in(args)), 0)

    def forward(self, model: nn.Module, call: Callable[[], Any]) -> None:
        """Call `call()`, and record what it does in the blocks of `model`."""
        hooks = []
        for name, block in repeated_blocks(model) or blocks_of(model):
            hooks += [
                block.register_forward_pre_hook(functools.partial(self._enters, name)),
                block.register_forward_hook(lambda *_: self._inside.pop() and None),
            ]
        call()
        for hook in hooks:
            hook.remove()


def stretch_of(model: nn.Module, done: Mapping[str, object] | None = None) -> Stretch | None:
    """Return the longest sequence of equal blocks, or of equal groups of neighboring blocks, in a model."""
    blocks = repeated_blocks(model) or blocks_of(model)
    done = done or {}
    held = Counter(id(p) for _, block in blocks for p in {id(p): p for p in block.parameters()}.values())
    prints = [(_print(block, held, number), done.get(name)) for number, (name, block) in enumerate(blocks)]
    best: tuple[int, int, int] | None = None
    for group in range(1, min(LONGEST_GROUP, len(blocks) // 2) + 1):
        for start, count in _stretches(prints, group):
            if best is None or group * count - group > best[1] * best[2] - best[1]:
                best = start, group, count
    if best is None:
        return None
    kinds = {type(block) for _, block in blocks[best[0] : best[0] + best[1] * best[2]]}
    return Stretch(tuple(name for name, _ in blocks), *best, tuple(kinds))


def _stretches(prints: Sequence[object], group: int) -> Iterator[tuple[int, int]]:
    """Yield (start, number of groups) of each sequence in which a group of `group` blocks is repeated."""
    start = 0
    for place in range(group, len(prints) + 1):
        if place == len(prints) or prints[place] != prints[place - group]:
            if (place - start) // group > 1:
                yield start, (place - start) // group
            start = place - group + 1


def _print(block: nn.Module, held: Counter[int], number: int) -> object:
    """Return a value that is the same for equal blocks."""
    if any(held[id(p)] > 1 for p in block.parameters()):
        return number
    return tuple((name, _print_of_one(module)) for name, module in block.named_modules())


def _print_of_one(module: nn.Module) -> object:
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks") and value]
    return (
        type(module),
        module.training,
        tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
        tuple(id(hook) for each in hooks for hook in each.values()),
        tuple((name, _plain(value)) for name, value in sorted(_settings(module).items())),
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    return {name: value for name, value in own.items() if not (_OWN_NUMBER.search(name) and type(value) is int)}


def _plain(value: Any) -> object:
    if isinstance(value, int | float | str | torch.dtype | None):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, nn.Module):
        return type(value)
    return id(value)  # by identity, so that only a shared configuration counts as equal


def shortened(job: Job, stretch: Stretch, count: int) -> Job:
    """Return a copy of the job with a shorter model, which keeps only `count` groups of the blocks in `stretch`."""
    return replace(job, model=functools.partial(_short_model, job.model, stretch, count))


def _short_model(build: Callable[[], nn.Module], stretch: Stretch, count: int) -> nn.Module:
    first, end = stretch.start + count * stretch.group, stretch.start + stretch.count * stretch.group
    left_out = set(range(first, end))
    with contextlib.ExitStack() as stack:
        places = itertools.count()
        for kind in stretch.kinds:
            stack.enter_context(patch.object(kind, "__init__", _building(kind, places, left_out)))
        model = build()
    found = {name for name, module in model.named_modules() if isinstance(module, _Skipped)}
    if found != {stretch.names[place] for place in left_out}:  # the blocks are copies, or were built in another order
        model = build()
        for place in left_out:
            model.set_submodule(stretch.names[place], _Skipped())
    given = _BlockOutput()
    for place in range(stretch.start, first):
        model.get_submodule(stretch.names[place]).register_forward_hook(given.note, with_kwargs=True)
    for place in left_out:
        skipped = model.get_submodule(stretch.names[place])
        like = model.get_submodule(stretch.names[stretch.start + (place - stretch.start) % stretch.group])
        vars(skipped).update(_settings(like) | {"_given": given, "_after": place - first})
    return model


def _building(kind: type[nn.Module], places: Iterator[int], left_out: set[int]) -> Callable[..., None]:
    real = kind.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is kind and next(places) in left_out:
            nn.Module.__init__(self)
            self.__class__ = _Skipped
        else:
            real(self, *args, **kwargs)

    return init


class _Skipped(nn.Module):
    """A module in place of a block. It returns its input, in the form in which other blocks return their output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        given: _BlockOutput = own["_given"]
        first = next(tensors_in((args, kwargs)))
        given.check(own["_after"], first, sys.getrefcount(first))
        return first if given.rest is None else (first, *given.rest)


class _BlockOutput:
    """What a block returns: a tensor alone (`rest` is None), or a tuple of a tensor and the values in `rest`."""

    def __init__(self) -> None:
        self.rest: tuple[Any, ...] | None = None
        self._before: tuple[object, ...] = ()

    def check(self, after: int, tensor: Tensor, references: int) -> None:
        """Raise NotExtrapolable if the model did anything since the last of `after` earlier skipped blocks."""
        now = id(tensor), references, calls_so_far()
        if after and now != self._before:
            raise NotExtrapolable("between two blocks, the model runs an operator or keeps a tensor")
        self._before = now

    def note(self, block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        first = next(tensors_in((args, kwargs)), None)
        given, rest = (out[0], out[1:]) if isinstance(out, tuple) and out else (out, None)
        if first is None or not isinstance(given, Tensor) or any(True for _ in tensors_in(rest)):
            raise NotExtrapolable(f"{type(block).__name__} must take at least one tensor and return exactly one tensor")
        if (given.shape, given.dtype, given.requires_grad) != (first.shape, first.dtype, given.requires_grad):
            raise NotExtrapolable(f"{type(block).__name__} returns a tensor with another shape or dtype than its input")
        self.rest = rest
