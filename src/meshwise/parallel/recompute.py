"""Recompute a block's activations in the backward.

The block keeps only its input, and runs again in the backward.

The block's `forward` is wrapped in torch's checkpoint. The block's class, hooks and state_dict keys stay. The second
run draws the same random numbers as the first run (dropout drops the same elements), and starts from the same state:
what the first run wrote into buffers (the running statistics of a batch norm) or into its arguments (the cache of a
language model) is not written again.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from meshwise.parallel.blocks import blocks_of, blocks_to_recompute, repeated_blocks
from meshwise.parallel.splits.tensor import parts_of, split_again
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError, nearest
from meshwise.spec.words import some
from meshwise.torch_compat.compiling import unwrapped
from meshwise.torch_compat.dispatch import named_arguments
from meshwise.torch_compat.modules import buffers_in, put_forward
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import determinism_of_parts

COMPUTE_INTENSIVE_OPS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "scaled_dot_product")
"""Operators with results that `selective` keeps: matrix products, convolutions, and all kinds of attention."""

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
Written = tuple[nn.Module, str, Tensor | None]
"""A buffer that a forward has written (module, name), and its value before. The value is None for a batch norm, which
does not read the buffer."""


def recompute_blocks(model: nn.Module, recompute: str | Sequence[str]) -> list[str]:
    """Make blocks of `model` run again in the backward, so that their activations need not be kept. Return the blocks'
    names."""
    if recompute == "none":
        return []
    if isinstance(recompute, str):
        blocks = blocks_to_recompute(model) or [("", model)]
    else:
        blocks = [(name, _module(model, name)) for name in recompute]
    for _, block in blocks:
        if getattr(block.forward, "func", None) is not _recomputed:
            put_forward(block, functools.partial(_recomputed, block, block.forward, recompute == "selective"))
    return [name or "the whole model" for name, _ in blocks]


def _module(model: nn.Module, name: str) -> nn.Module:
    known: dict[str, nn.Module] = dict(model.named_modules())
    if not name or name not in known:
        blocks = some([block for block, _ in repeated_blocks(model) or blocks_of(model)])
        raise PlanError(f"recompute: the model has no module '{name}'.{nearest(name, known)} Its blocks are {blocks}.")
    return known[name]


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], selective: bool, /, *arguments: Any, **keywords: Any
) -> Any:
    """Run a block's forward, under a checkpoint if gradients are enabled."""
    # `functional_call` replaces parameters only during the forward, so a recomputation would use the wrong ones.
    lent = any(not isinstance(p, nn.Parameter) for p in block.parameters())
    if lent or not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    buffers = [(part, name, b) for part in block.modules() for name, b in part.named_buffers(recurse=False)]
    before = [(version(b), None if hasattr(part, "running_mean") else b.clone()) for part, _, b in buffers]
    written: list[Written] = []
    contexts = functools.partial(_contexts, type(block).__name__, selective, written)
    given = [*arguments, *keywords.values()]
    tensors = [value for value in given if isinstance(value, Tensor)]
    run = _Runs(forward, given, list(keywords))
    same = determinism_of_parts()
    result = checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts, determinism_check=same)
    # autograd does not count writes to a batch norm's running statistics, so in training they count as written.
    written += [
        (part, name, start)
        for (part, name, b), (v, start) in zip(buffers, before, strict=True)
        if version(b) != v or (start is None and part.training and b.is_floating_point())
    ]
    return result


class _Runs:
    """Calls a block's forward with tensors as its only arguments, because torch's checkpoint keeps only tensors for the
    backward. All other arguments are kept in this object."""

    def __init__(self, forward: Callable[..., Any], given: list[Any], names: list[str]) -> None:
        self._forward, self._names = forward, names
        self._is_tensor = [isinstance(value, Tensor) for value in given]
        self._parts = [parts_of(value) for value in given if isinstance(value, Tensor)]
        rest = [value for value in given if not isinstance(value, Tensor)]
        self._first: list[Any] | None = rest
        self._changes = _changeable(rest)
        self._before = _copied(rest, {}) if self._changes else rest

    def __call__(self, *tensors: Tensor) -> Any:
        again = _copied(self._before, {}) if self._changes and self._first is None else self._before
        rest, self._first = iter(again if self._first is None else self._first), None
        # autograd saves and returns plain tensors, so split them again.
        given = iter(split_again(tensor, parts) for tensor, parts in zip(tensors, self._parts, strict=True))
        values = [next(given) if is_tensor else next(rest) for is_tensor in self._is_tensor]
        first = len(values) - len(self._names)
        return self._forward(*values[:first], **dict(zip(self._names, values[first:], strict=True)))


def _changeable(value: Any) -> bool:
    """Return whether a forward could change `value` itself. A write to a tensor in `value` does not count."""
    if isinstance(value, tuple | list | dict):
        return any(map(_changeable, value.values() if isinstance(value, dict) else value))
    return _is_plain_object(value)


def _copied(value: Any, done: dict[int, Any]) -> Any:
    """Copy containers and plain objects in `value`, at any depth. Tensors, modules and all other objects are shared."""
    if id(value) in done:
        return done[id(value)]
    kind = type(value)
    copied: Any = value
    if kind in (list, set):
        copied = done[id(value)] = kind()
        parts = [_copied(part, done) for part in value]
        (copied.extend if kind is list else copied.update)(parts)
    elif isinstance(value, dict):
        copied = done[id(value)] = copy.copy(value)
        for key, part in value.items():
            copied[key] = _copied(part, done)
    elif kind is tuple:
        copied = tuple(_copied(part, done) for part in value)
    elif _is_plain_object(value):
        copied = done[id(value)] = copy.copy(value)
        for name, part in vars(value).items():
            vars(copied)[name] = _copied(part, done)
    return copied


def _is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type | enum.Enum)
        and not callable(value)
    )


def _contexts(kind: str, selective: bool, written: Sequence[Written]) -> Contexts:
    """Return the context manager for the normal forward of a block, and the context manager for its recomputation in
    the backward."""
    again: contextlib.AbstractContextManager[Any]
    first, again = selective_contexts(_policy) if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    return first, _Anew(functools.partial(_again, kind, again, written))


class _Anew:
    """A context manager that can be entered several times. Each time, it makes and enters a new inner context manager.
    A double backward needs this, because it recomputes a block twice."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make, self._open = make, list[contextlib.AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@contextlib.contextmanager
def _again(kind: str, inner: contextlib.AbstractContextManager[Any], written: Sequence[Written]) -> Iterator[None]:
    """Enter `inner`, and let a recomputation in the backward write to copies of the buffers in `written`."""
    kept: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for part, name, start in written:
        buffers = buffers_in(part)
        buffer = buffers[name]
        assert buffer is not None
        kept.append((buffers, name, buffer))
        buffers[name] = (buffer if start is None else start).clone()
    try:
        with inner:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise PlanError(
            f"recompute='selective': {kind} writes in place into a result that must be kept. Use recompute='full'."
        ) from None
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer


def _policy(context: SelectiveCheckpointContext, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    name = str(operator).partition(".")[2].partition(".")[0].strip("_")
    expensive = name in COMPUTE_INTENSIVE_OPS or name.startswith(COMPUTE_INTENSIVE_OPS[-1])
    kept = expensive and not _draws(operator, arguments, keywords)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return bool(named_arguments(operator, arguments, keywords).get("dropout_p", 1.0) > 0)


def _apply(setup: Setup) -> None:
    recompute = setup.plan.recompute
    blocks = recompute_blocks(unwrapped(setup.model), recompute)
    if blocks:
        again = " (except matrix products and attention)" if recompute == "selective" else ""
        setup.notes.append(f"recompute: the backward runs {len(blocks)} blocks again{again}: {some(blocks)}.")


RECOMPUTE = Technique(apply=_apply)
