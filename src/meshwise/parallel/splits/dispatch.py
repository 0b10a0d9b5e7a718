"""Run operators on batches by the rules of sums.py, then rules.py."""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import Tensor

from meshwise.parallel.splits import rules, sums
from meshwise.parallel.splits.constructors import as_numbers
from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import (
    VIEWS,
    SplitTensor,
    check_copies,
    dispatch_with,
    gives_view,
    level,
    note_copies,
)
from meshwise.parallel.splits.term import Term, heard, resolved
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import OURS, user_place
from meshwise.torch_compat.beside_dispatch import beside_transforms, change_arguments, transforming
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, called, changed, check_parts_by_default
from meshwise.torch_compat.tree import map_kind

LOST = "{here}: the gradient of a batch is a copy, so what x.grad.{name}(…) writes would be lost. Write x.grad = None."
KEEP = """flatten view reshape squeeze unsqueeze transpose permute contiguous float double log_softmax softmax sigmoid
logsigmoid clone"""
"""Operators whose result counts as an output of the same model call as their input."""
_KEEP = {*KEEP.split()}
COUNT = [0]
"""How many operators ran on split tensors."""


def _dispatch(func: Func, args: Args, kwargs: Kwargs) -> Any:
    name = called(func)
    if transforming:
        return func(*wholes(tuple(args)), **wholes(dict(kwargs)))
    if level() < 0:
        if heard:
            heard[0](name, args, kwargs)
        COUNT[0] += 1
        if kwargs.get("out") is not None:  # torch's own code passes out=None, which means no `out`
            return _written_out(func, args, dict(kwargs))
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, SplitTensor) and 0 in first.parts:
            check_copies(first)
            if "of_gradient" in first.__dict__ and rules.writes_in_place(name):
                raise UsageError(LOST.format(here=user_place(), name=name))
            if name in ("__getitem__", "__setitem__") and type(args[1]) is not list:
                args = (first, as_numbers(args[1]), *args[2:])
            elif name in VIEWS:
                args, kwargs = (first, *as_numbers(tuple(args[1:]))), as_numbers(kwargs)
            if gives_view(name, args) or ("of_gradient" in first.__dict__ and name in (".data", "detach")):
                made = rules.dispatch(func, args, kwargs)
                note_copies(first, made)
                return made
            made = RULES[name](func, args, kwargs) if name in RULES else NotImplemented
            if made is not NotImplemented:
                return made
            if name in _KEEP and "of_call" in first.__dict__:
                made = rules.dispatch(func, args, kwargs)
                made.of_call = True
                return made
    if any(isinstance(each, (Term, list, tuple)) for each in (*args, *kwargs.values())):
        args, kwargs = map_kind(Term, resolved, (tuple(args), dict(kwargs)))
    return rules.dispatch(func, args, kwargs)


def wholes(tree: Any) -> Any:
    """Return `tree` with whole tensors in place of split ones, for code that ignores a tensor's class. Collective."""

    def whole(leaf: Tensor) -> Tensor:
        with beside_transforms():
            return resolved(leaf) if isinstance(leaf, Term) else gather(leaf) if isinstance(leaf, SplitTensor) else leaf

    return map_kind(Tensor, whole, tree)


def _written_out(func: Func, args: Args, kwargs: dict[str, Any]) -> Any:
    """Run an operator with `out=`, and write the result there, whether it is divided or not."""
    out = kwargs.pop("out")
    made = func(*args, **kwargs)
    for target, value in [(out, made)] if isinstance(out, Tensor) else zip(out or (), made, strict=True):
        if target.shape != value.shape:
            shapes = f"{tuple(target.shape)}, the result {tuple(value.shape)}"
            raise UsageError(f"{user_place()}: {called(func)}(out=…): the tensor given has the shape {shapes}.")
        target.copy_(value)
    return made if out is None else out


def _refuse_memory(func: Func, args: Args, kwargs: Kwargs) -> Any:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(OURS) and frame.f_back is not None:
        frame = frame.f_back
    if f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:  # such as torch.compile, which looks for shared memory
        return NotImplemented
    raise UsageError(
        f"{user_place()}: x.{called(func)}() would give the memory of this rank's rows alone. Code that reads memory "
        "needs the whole batch: whole = torch.tensor(x)."
    )


RULES = {**sums.RULES, "data_ptr": _refuse_memory, "untyped_storage": _refuse_memory}


def begin() -> None:
    """From now on, let operators on the rows of batches return terms (see term.py)."""
    rules.prepare()
    dispatch_with(_dispatch)
    change_arguments(wholes)
    check_parts_by_default()
    changed.add("BackwardHookFunction")  # so that the program's hooks get gradients of the whole batch
