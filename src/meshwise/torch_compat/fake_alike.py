"""Memoise operator calls on fake tensors.

Equal calls get tensors of the same sizes.

Calls are equal if their operator, the tensors' shapes, strides, offsets, dtypes, devices and sizes of memory, and all
other arguments are equal. torch's own cache of fake tensors does the same, but takes ten times as long. Neither covers
results that depend on values, changed sizes, or tensors that are not fake. Based on torch 2.11, 2.13 and 2.15:
`_subclasses/fake_tensor.py`, `_cached_dispatch_impl`, `FakeTensor.__new__`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwise.torch_compat.dispatch import written_arguments

MOST = 1 << 17
"""The largest number of calls to remember. When it is reached, all remembered calls are forgotten."""
_NAMESPACES = {"aten", "fsdp", "prims"}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_OTHER_RESULTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_CHANGES_SIZES = {"resize_", "resize_as_", "set_", "lift_fresh", "lift", "resize_storage_bytes_"}
_known: dict[tuple[Any, ...], Alike] = {}
_META = torch.device("meta")


_Spec = tuple[int, bool, Any, Any, int, torch.dtype, torch.device]
"""One result of an operator call: the index of the argument tensor whose memory it uses, or -1 if it has new memory;
whether it is a view of that argument, and not the argument itself; shape, stride, offset, dtype and device."""


class Alike:
    """The results of an operator call, kept to answer equal calls without running the operator."""

    __slots__ = ("kind", "noted", "specs", "written")

    def __init__(self, kind: type | None, specs: list[Any], written: list[int]) -> None:
        self.kind, self.specs, self.written = kind, specs, written
        self.noted: dict[Any, Any] = {}

    def outputs(self, mode: Any, tensors: list[Any]) -> Any:
        """Return new fake results for a call that is equal to the remembered one, without running the operator.
        tensors: the argument tensors of the new call. mode: the fake tensor mode in which to make the results."""
        found = [spec and _made(spec, mode, tensors) for spec in self.specs]
        return found[0] if self.kind is None else self.kind(found)


def key_of(func: Any, args: Iterable[Any], kwargs: dict[str, Any], tensors: list[Any]) -> tuple[Any, ...] | None:
    """Return a key that is equal for calls with equal results, or None if no key is possible.
    Adds the call's tensors to `tensors`."""
    if _leaves_out(func) or torch.is_inference_mode_enabled():
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _add(key, args, tensors):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add(key, (value,), tensors):
            return None
    if not tensors:
        key.append(torch._C._get_default_device())
    return tuple(key)


@functools.cache
def _leaves_out(func: Any) -> bool:
    own = getattr(func, "namespace", "") in _NAMESPACES and hasattr(func, "_schema")
    return not own or func._schema.name.split("::")[-1] in _CHANGES_SIZES or bool(_OTHER_RESULTS & set(func.tags))


def _add(key: list[Any], args: Iterable[Any], tensors: list[Any]) -> bool:
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor or isinstance(arg, FakeTensor):
            if arg.layout is not torch.strided or arg.is_neg() or arg.is_conj() or arg.constant is not None:
                return False
            tensors.append(arg)
            size = arg.untyped_storage().nbytes()
            key += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device, size)
        elif kind in _PLAIN:
            key += (kind, arg)  # include the type, since 1 == 1.0 but the results differ in dtype
        elif kind is list or kind is tuple:
            key += (kind, len(arg))
            if not _add(key, arg, tensors):
                return False
        else:
            return False
    return True


def found(key: tuple[Any, ...]) -> Alike | None:
    """Return the remembered results of calls with this key; None if there are none."""
    return _known.get(key)


def remember(key: tuple[Any, ...], func: Any, args: Any, kwargs: Any, tensors: list[Any], out: Any) -> Alike | None:
    """Keep the results `out` of a call under `key`, to answer equal calls. Return None if this is impossible."""
    kind = type(out) if isinstance(out, list | tuple) else None
    if kind not in (None, list, tuple):
        return None
    outs = out if kind else [out]
    specs = [_spec(one, tensors) for one in outs]
    if any(spec is NotImplemented for spec in specs):
        return None
    new = [one.untyped_storage()._cdata for one, spec in zip(outs, specs, strict=True) if spec and spec[0] < 0]
    if len(set(new)) < len(new):
        return None
    written = {id(one) for one in _tensors(written_arguments(func, args, kwargs))}
    alike = Alike(kind, specs, [place for place, one in enumerate(tensors) if id(one) in written])
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = alike
    return alike


def _tensors(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]


def _spec(out: Any, tensors: list[Any]) -> Any:
    """Describe one result of an operator call for `_made`. Return NotImplemented if `_made` cannot recreate it."""
    if out is None:
        return None
    if type(out) is not FakeTensor and not any(out is one for one in tensors):
        return NotImplemented
    facts = out.shape, out.stride(), out.storage_offset(), out.dtype, out.device
    for place, one in enumerate(tensors):
        if out is one:
            return place, False, *facts
    if (
        out.layout is not torch.strided
        or out.is_neg()
        or out.is_conj()
        or out.requires_grad
        or out.constant is not None
    ):
        return NotImplemented
    storage = out.untyped_storage()
    for place, one in enumerate(tensors):
        if one.untyped_storage()._cdata == storage._cdata:
            return place, True, *facts
    same = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=_META)
    alone = out.storage_offset() == 0 and storage.nbytes() == same.untyped_storage().nbytes()
    return (-1, False, *facts) if alone else NotImplemented


def _made(spec: _Spec, mode: Any, tensors: list[Any]) -> Any:
    of, view, shape, stride, offset, dtype, device = spec
    if of >= 0 and not view:
        return tensors[of]
    if view:
        plain = torch.empty(0, dtype=dtype, device=_META).set_(tensors[of].untyped_storage(), offset, shape, stride)
    else:
        plain = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    fake = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:  # only warn, because deepcopy of a module reads data pointers
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(mode.plain)
    vars(fake)[mode.device_field] = device
    return fake
