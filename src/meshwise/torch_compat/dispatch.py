"""Pass every operator through one handler; list the memory that operators touch.

`StorageMap` keeps facts for as long as a storage lives.

`TorchDispatchMode` and the weak reference to a storage are torch's own tools for such modes, but not its public API.
Collectives of `c10d` do not say in their schema what they write; the names of their arguments do. Based on torch 2.11,
2.13 and 2.15: `utils/_python_dispatch.py`, `multiprocessing/reductions.py`, `native_functions.yaml`,
`csrc/distributed/c10d/Ops.cpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import tensors_in

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(operator, positional arguments, keyword arguments) -> the operator's result."""


class _Through(TorchDispatchMode):
    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handler = handler


def _handled(self: _Through, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with on_parts():  # this runs below autograd, where operators must get local tensors
        return self.handler(func, args, kwargs or {})


# Set after the class body, because torch would wrap a method defined there for torch.compile, whose import takes 4 s.
_Through.__torch_dispatch__ = _handled  # type: ignore[assignment]


def intercept_operators(handler: Handler) -> AbstractContextManager[Any]:
    """Return a context manager that passes each operator called in this thread to `handler`. Operators that the handler
    itself calls run as usual."""
    return _Through(handler)


def without_interception() -> AbstractContextManager[Any]:
    """Return a context manager in which operators bypass all dispatch modes. Code that observes a program through a
    dispatch mode uses this context, so that its own operators are not observed."""
    return _disable_current_modes()


def is_fake(value: object) -> bool:
    """Return whether `value` is a fake tensor that gets real values later, such as a parameter before `materialise`.
    Return False for the tensors of a rehearsal, which never get values (see `stands_for_real`)."""
    return isinstance(value, FakeTensor) and not is_rehearsed(value)


def is_rehearsed(tensor: object) -> bool:
    """Return whether `tensor` is a fake tensor of a rehearsal, in which the whole program runs on fake tensors."""
    return isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "stands_for_real", False)


def _rehearsal() -> Any:
    """Return the mode of the rehearsal in which the program runs on fake tensors from its start to its end, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if getattr(mode, "stands_for_real", False) else None


def rehearsing() -> bool:
    """Return whether this is a rehearsal: the program runs on fake tensors from its start to its end."""
    return _rehearsal() is not None


def real_values() -> AbstractContextManager[Any]:
    """Return a context manager in which operators run on real tensors, even if the program runs on fake tensors (see
    `rehearsing`)."""
    return without_interception() if rehearsing() else nullcontext()


def as_rehearsed(pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Return an iterator over the same pairs (batch, description). In a rehearsal (see `rehearsing`), each batch is
    replaced by a copy with fake tensors. The batch is still read from the data set as real tensors."""
    mode = _rehearsal()
    return pairs if mode is None else mode.batches(pairs)


@functools.cache
def over(subclass: type[Tensor], kind: type[Tensor]) -> type[Tensor]:
    """Return the class to assign to a tensor of class `kind`, so that the tensor becomes an instance of `subclass`.

    This is `kind` itself if `kind` derives from `subclass`. For a class of fake tensors, it is a new class that derives
    from `subclass` and `kind`. Otherwise it is `subclass`."""
    if issubclass(kind, subclass):
        return kind
    return type(subclass.__name__, (subclass, kind), {}) if issubclass(kind, FakeTensor) else subclass


def operator_name(operator: Any) -> str:
    """Return the operator's name without namespace and overload: `add_` for `aten.add_.Tensor`."""
    return str(operator._schema.name).split("::")[-1]


KEEP_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Batch norm operators. They write to their running statistics, although torch's schemas do not say so."""


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments to which the operator writes, such as `self` of `add_`, an `out` argument, or the running
    statistics of a batch norm."""
    schema = operator._schema
    untold = ("running_mean", "running_var") if schema.name in KEEP_STATISTICS else ()
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.name in untold or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def gives_view(operator: Any) -> bool:
    """Return whether the operator returns a view of one of its arguments, such as `transpose`. Operators that write to
    the argument and return it, such as `add_`, do not count."""
    returned = (each.alias_info for each in operator._schema.returns)
    return any(alias is not None and not alias.is_write for alias in returned)


def named_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of the operator's arguments by name. Arguments that were not passed have their defaults."""
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs


class StorageMap:
    """A dict from the storages of tensors to values. An entry disappears when its storage is freed. Views of a tensor
    share its storage, and so the value."""

    def __init__(self) -> None:
        # The weak reference keeps the storage's header, so that its address is not used again while it is a key.
        self._facts: dict[int, tuple[StorageWeakRef, Any]] = {}
        self._most = 1024

    def get(self, tensor: Tensor) -> Any:
        """Return the value for the tensor's storage; None if no value was set."""
        storage = _storage(tensor)
        found = None if storage is None else self._facts.get(storage._cdata)
        return None if found is None else found[1]

    def set(self, tensor: Tensor, value: Any) -> None:
        """Store `value` for the storage of `tensor`. Do nothing if `tensor` has no storage, such as a sparse tensor."""
        storage = _storage(tensor)
        if storage is None:
            return
        if len(self._facts) >= self._most:
            self._forget()
        self._facts[storage._cdata] = (StorageWeakRef(storage), value)

    def values(self) -> list[Any]:
        """Return the values of all storages that are still alive."""
        self._forget()
        return [value for _, value in self._facts.values()]

    def __len__(self) -> int:
        self._forget()
        return len(self._facts)

    def _forget(self) -> None:
        self._facts = {key: fact for key, fact in self._facts.items() if not fact[0].expired()}
        self._most = max(1024, 2 * len(self._facts))


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "record_stream", "is_pinned"}
NOTHING |= {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
SENDS = {"send", "reduce_"}


def has_parts(args: Any, kwargs: Any) -> bool:
    """Return whether an argument is a wrapper subclass, such as a DTensor. torch then calls the operator again on the
    tensors inside the wrapper."""
    return any(is_traceable_wrapper_subclass(tensor) for tensor in tensors_in((args, list(kwargs.values()))))


def is_collective(operator: Any) -> bool:
    """Return whether the operator exchanges data between processes."""
    return str(operator._schema.name).startswith(("c10d::", "_c10d_functional::"))


def touched(operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield (tensor, written) for each tensor in an operator call. `written` is True if the operator writes the
    tensor's memory, and False if it only reads the memory. Tensors without storage are skipped."""
    name, schema = operator_name(operator), operator._schema
    if name in NOTHING or torch.Tag.inplace_view in operator.tags:
        return
    collective = schema.name.startswith("c10d::")
    made = [] if collective else list(_made(schema, result))
    own = {_memory(tensor) for tensor in tensors_in((args, list(kwargs.values())))} if made else set()
    of_torch = schema.name.startswith("aten::")
    new = [tensor for tensor in made if _memory(tensor) not in own or not of_torch]
    yield from ((tensor, True) for tensor in new if _memory(tensor))
    asks_the_shape = name.endswith("_like") or name.startswith("new_")
    asks_the_shape |= of_torch and any(_memory(tensor) in own for tensor in made)  # a view not declared in the schema
    named = named_arguments(operator, args, kwargs)
    for argument in schema.arguments:
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        if collective:
            writes = not argument.name.startswith("input") and name not in SENDS
        if writes or collective or (alias is None and not asks_the_shape):
            yield from ((tensor, writes) for tensor in tensors_in(named.get(argument.name)) if _memory(tensor))


def _made(schema: Any, result: Any) -> Iterator[Tensor]:
    """Yield the results of an operator that are new tensors according to its schema, not arguments or views of them."""
    for returned, value in zip(schema.returns, result if len(schema.returns) > 1 else (result,), strict=False):
        if returned.alias_info is None:
            yield from tensors_in(value)


def _memory(tensor: Tensor) -> int:
    """Return an id of the tensor's storage; 0 for a tensor that has no storage or wraps other tensors."""
    holds_others: bool = is_traceable_wrapper_subclass(tensor)
    storage = None if holds_others else _storage(tensor)
    return 0 if storage is None else int(storage._cdata)
