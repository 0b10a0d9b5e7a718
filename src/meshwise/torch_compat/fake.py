"""Pass operators on fake tensors through one handler.

Fake tensors have shapes, strides and devices, but no memory.

`FakeTensorMode` is torch's own tool for this (export and compile use it), but not its public API.
Based on torch 2.11, 2.13 and 2.15: `_subclasses/fake_tensor.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._meta_registrations import _META_FUNCTIONS
from torch.optim import optimizer
from torch.utils import _foreach_utils

from meshwise.spec.devices import has_streams
from meshwise.torch_compat import fake_alike
from meshwise.torch_compat.dispatch import is_rehearsed, operator_name, real_values
from meshwise.torch_compat.fake_values import concerns_values, fake_batch, give_value, lose, with_values
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import tensors_in

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors by which torch says that an operator's result depends on values, which its fake tensors do not have."""
COLLECTIVES: dict[Any, Callable[..., Any]] = {
    getattr(torch.ops.c10d, name).default: kernel for name, kernel in _META_FUNCTIONS.items()
}
"""What torch.distributed's operators do with tensors without memory, as torch registers it. Calling these functions
directly is 0.4 ms faster than going through torch's fake tensor mode."""
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], "Call"], Any]
"""A function that gets the operator, its arguments, its keyword arguments and its `Call`, and returns its result."""


class FakeTensors(FakeTensorMode):
    """A fake tensor mode of torch that calls `handler` for each operator on its fake tensors. This works even after the
    `with` block of the mode has ended, because every fake tensor refers to its mode."""

    def __init__(self, handler: Handler, owner: object = None, *, stands_for_real: bool = False) -> None:
        """handler: runs each operator, see `Handler`.
        owner: any object, which `owner_of` returns for the tensors of this mode.
        stands_for_real: True if the whole program runs on fake tensors, as in a rehearsal. These tensors never get
            values."""
        super().__init__(allow_non_fake_inputs=True)
        self.handler, self.owner, self.stands_for_real = handler, owner, stands_for_real
        self.inside, self.calls = False, 0
        self.plain = dict(vars(self.from_tensor(torch.empty(0))))
        self.device_field = "_fake_device" if "_fake_device" in self.plain else "fake_device"
        self.usual = {*self.plain, "_is_param"}

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensors:
        return self  # a deep copy of a fake tensor has the same mode

    def batches(self, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs with a fake copy of each batch, which is read from the data set as real tensors."""
        while True:
            with real_values():
                pair = next(pairs, None)
            if pair is None:
                return
            yield fake_batch(pair[0]), pair[1]


class Call:
    """One call of an operator on fake tensors. Calling the instance runs the operator. alike: the remembered results of
    earlier calls with equal arguments; None if nothing is remembered."""

    __slots__ = ("alike", "args", "func", "kwargs", "mode", "types")

    def __init__(self, mode: FakeTensors, func: Any, types: Any, args: Any, kwargs: Any) -> None:
        self.mode, self.func, self.types, self.args, self.kwargs = mode, func, types, args, kwargs
        self.alike: fake_alike.Alike | None = None

    def __call__(self) -> Any:
        if not self.mode.stands_for_real:
            return self._run()
        tensors: list[Any] = []
        key = fake_alike.key_of(self.func, self.args, self.kwargs, tensors)
        if key is None or concerns_values(self.func, self.args, self.kwargs, tensors):
            return self._valued()
        self.alike = fake_alike.found(key)
        if self.alike is not None:
            if self.alike.written:
                lose([tensors[place] for place in self.alike.written])
            return self.alike.outputs(self.mode, tensors)
        out = self._valued()
        if out is not NotImplemented:
            self.alike = fake_alike.remember(key, self.func, self.args, self.kwargs, tensors, out)
        return out

    def _valued(self) -> Any:
        return with_values(self.func, self.args, self.kwargs, self._run, self.mode, NEEDS_VALUES)

    def _run(self) -> Any:
        if self.func in COLLECTIVES and self.mode.stands_for_real and not self.kwargs:
            return COLLECTIVES[self.func](*self.args)
        cached = self.mode.cache_enabled  # the key of a cached `set_` would keep its storage alive
        self.mode.cache_enabled = cached and getattr(self.func, "overloadpacket", None) is not torch.ops.aten.set_
        try:
            out = self.mode.dispatch(self.func, self.types, self.args, self.kwargs)
            if self.mode.stands_for_real:
                _without_constants(out)
                out = _with_wide_statistics(self.func, self.args, out)
            return out
        finally:
            self.mode.cache_enabled = cached
            # Weak references in the memo would keep `Module._apply` from swapping tensors, as `model.half()` does.
            self.mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def _handled(self: FakeTensors, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is _DEVICE and isinstance(args[0], FakeTensor):  # a shortcut: C++ calls this operator to read a device
        return args[0].device
    if self.stands_for_real and func.namespace == "profiler":  # these operators take span names, not tensors
        return func(*args, **(kwargs or {}))
    call = Call(self, func, types, args, kwargs or {})
    if self.inside:  # called inside another operator, such as `nonzero` in `x[mask]`
        return call._valued() if operator_name(func) == "nonzero" else call._run()
    self.inside = True
    self.calls += 1
    try:
        with on_parts():  # this runs below autograd, where operators must get local tensors
            return self.handler(func, args, kwargs or {}, call)
    finally:
        self.inside = False


def _without_constants(out: Any) -> None:
    """Clear the attribute `constant` of fake tensors, and record its values by `give_value` instead."""
    for tensor in tensors_in(out):
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            give_value(tensor, tensor.constant)
            tensor.constant = None


NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "native_group_norm",
    "native_layer_norm",
)


def _with_wide_statistics(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return the results `out` of a normalization operator, with float32 statistics for bf16 or fp16 inputs."""
    if operator_name(func) == "native_group_norm_backward":
        return (out[0] if out[0] is None else out[0].to(args[1].dtype), *out[1:])
    if operator_name(func) not in NORMS or out[1].dtype not in (torch.bfloat16, torch.float16):
        return out
    weight = args[2 if operator_name(func) == "native_layer_norm" else 1]
    if args[0].device.type == "cpu" and (weight is None or weight.dtype != torch.float32):
        return out
    return (out[0], *(torch.empty_like(each, dtype=torch.float32) for each in out[1:3]), *out[3:])


# Set after the class body, because torch would wrap a method defined there for torch.compile, whose import takes 4 s.
FakeTensors.__torch_dispatch__ = _handled  # type: ignore[assignment,method-assign]


_DEVICE = torch.ops.prim.device.default


@functools.cache
def plain_mode() -> FakeTensorMode:
    """Return torch's own fake tensor mode, without a handler. DTensor uses it to infer the shape of an operator's
    result on whole tensors, without computing the result. The mode is created once, because that takes a second or
    two."""
    return FakeTensorMode()


def is_plain(tensor: Tensor) -> bool:
    """Return whether the class of `tensor` is `torch.Tensor` itself. A fake tensor of a rehearsal (see `rehearsing`)
    counts as plain too."""
    return type(tensor) is Tensor or (type(tensor) is FakeTensor and is_rehearsed(tensor))


def calls_so_far() -> int:
    """Return how many operators have run on fake tensors in the active `FakeTensors` mode. Return 0 outside of such a
    mode."""
    return getattr(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE), "calls", 0)


def sums_in_place(args: tuple[Any, ...]) -> bool:
    """Return whether a real run would add these two gradients in place. Return False for any other operation.

    autograd adds in place if nothing else uses the memory of the first gradient. It never does so for tensor
    subclasses, so a rehearsal makes a new tensor instead. The rule follows `accumulate` in
    `csrc/autograd/input_buffer.cpp` of torch 2.13.

    Call this function only directly in a handler, because it looks at a fixed depth of the call stack."""
    caller = sys._getframe(3).f_code  # frames 1 and 2 are the handler and `_handled`; C++ has no frames
    if caller.co_name != "_engine_run_backward" or torch.is_grad_enabled() or len(args) != 2:
        return False
    first = args[0]
    # Two uses do not count: by `first`, and by the storage object that this line makes.
    alone = torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= 2
    return bool(alone and first.untyped_storage().nbytes() == first.nbytes)


@contextlib.contextmanager
def plain_for_optimizers() -> Iterator[None]:
    """In the block, make optimizers use their foreach kernels for fake parameters, as they do for plain parameters.
    Changes `optim/optimizer.py` and `utils/_foreach_utils.py` of torch (checked in torch 2.11, 2.13 and 2.15)."""
    lists = {
        id(kinds): kinds for kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    }
    for kinds in lists.values():
        kinds.append(FakeTensor)
    try:
        yield
    finally:
        for kinds in lists.values():
            kinds.remove(FakeTensor)


def failing_quietly() -> AbstractContextManager[Any]:
    """Keep torch from logging a traceback for each operator that fails on fake tensors in the block."""
    return patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True)


def owner_of(tensor: Tensor) -> object:
    """Return the `owner` of the `FakeTensors` mode that made this fake tensor. Return None if torch's own fake tensor
    mode made the tensor."""
    return getattr(tensor.fake_mode, "owner", None)  # type: ignore[attr-defined]


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that a program has set on a fake tensor."""
    usual = tensor.fake_mode.usual  # type: ignore[attr-defined]
    return {name: value for name, value in vars(tensor).items() if name not in usual}


def is_random(operator: Any) -> bool:
    """Return whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def own_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of `device`, which random operators use if they are given none."""
    if has_streams(device):
        known = torch.get_device_module(device)
        index = known.current_device() if device.index is None else device.index
        return cast(torch.Generator, known.default_generators[index])
    return torch.default_generator
