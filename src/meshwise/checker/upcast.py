"""Turn a model's casts to low precision into casts to float64.

Casts to float32 and below become casts to float64. Casts to complex64 become casts to complex128.

A float64 model that calls `.float()` in its attention still rounds to 1e-7, which hides smaller differences. With such
casts changed, two sides that compute the same agree to 1e-13, so that a difference of 1e-9 is a fault.

Casts are changed in the dispatch of operators. So a forward pass, its recomputation, and selective recomputation, which
counts operators, all see the same casts. Tensors made earlier, or by no operator (a teacher made at import, a file, a
NumPy array), are in float32: operators read them as float64, and modules become float64 when they are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwise.torch_compat.dispatch import gives_view, intercept_operators, operator_name, written_arguments
from meshwise.torch_compat.modules import WIDE
from meshwise.torch_compat.tree import map_tensors, tensors_in

FACTORIES = {"rand", "randn", "rand_like", "randn_like"}
# These are not widened, because copy.deepcopy then gives their result a storage of the old dtype.
SHAPED_LIKE = {"new_empty", "new_empty_strided"}
_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
OF_A_SCALER = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}


@contextlib.contextmanager
def upcast(active: bool = True) -> Iterator[None]:
    """Compute in float64 inside the with block, also in its backward pass."""
    if not active:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with intercept_operators(_in_float64):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Disable the fast path of `nn.TransformerEncoder` inside the with block, so that evaluation computes what training
    computes. The fast path packs padded batches into nested tensors, and the check cannot read their sizes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def called_in_float64(active: bool = True) -> Iterator[None]:
    """Convert each module to float64 when it is called inside the with block."""
    before: dict[Tensor, torch.dtype] = {}

    def widen(module: nn.Module, inputs: Any) -> None:
        if torch.get_default_dtype() != torch.float64:  # outside of `upcast`, as when a job's model is built
            return
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype in WIDE and not isinstance(tensor, DTensor):
                before[tensor] = tensor.dtype
                tensor.data = tensor.data.to(WIDE[tensor.dtype])

    hook = register_module_forward_pre_hook(widen) if active else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for tensor, dtype in before.items():
            tensor.data = tensor.data.to(dtype)


def _in_float64(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return _random(operator, args, kwargs)
    name = operator_name(operator)
    if name in OF_A_SCALER:
        return _narrow(operator, args)
    # Do not widen torch.empty(0), because torch.load gives it a storage of the old dtype.
    if kwargs.get("dtype") in WIDE and not (name == "empty" and list(args[0]) == [0]):
        kwargs = {**kwargs, "dtype": WIDE[kwargs["dtype"]]}
    args, kwargs = _read_as_float64(operator, args, kwargs)
    if name == "_grouped_mm":
        return grouped_product(*args, **kwargs)
    result = operator(*args, **kwargs)
    if name == "lift_fresh" and result.dtype in WIDE:  # as in torch.tensor(..., dtype=torch.float32)
        return result.to(WIDE[result.dtype])
    return result


def _read_as_float64(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return an operator's arguments, converted so that it computes in float64."""
    given = [*args, *kwargs.values()]
    tensors = [t for each in given for t in (each if isinstance(each, list) else [each]) if isinstance(t, Tensor)]
    if operator.namespace != "aten" or all(tensor.dtype not in WIDE for tensor in tensors):
        return args, kwargs
    if gives_view(operator) or operator_name(operator) in SHAPED_LIKE:
        return args, kwargs
    written = {id(tensor): tensor.dtype for tensor in tensors_in(written_arguments(operator, args, kwargs))}
    narrow = next((dtype for dtype in WIDE if dtype in written.values()), None)

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) in written or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if narrow is None:
            return tensor.to(WIDE.get(tensor.dtype, tensor.dtype))
        if tensor.is_complex():
            return tensor.to(torch.complex64)
        return tensor.to(torch.float32 if narrow.is_complex else narrow)

    return map_tensors(read, args), map_tensors(read, kwargs)


def _narrow(operator: Any, args: tuple[Any, ...]) -> Any:
    """Run the operators of a GradScaler in float32, the only dtype in which they accept the loss scale."""
    narrow = [a.float() if isinstance(a, Tensor) and a.dtype == torch.float64 else a for a in args]
    result = operator(*narrow)
    for wide, its in zip(args, narrow, strict=True):
        if its is not wide:
            wide.copy_(its)
    return result


def _random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers in float32, and convert them to float64. In float64, torch draws other numbers, so initial
    values and random data would differ from the user's program."""
    name, first = operator_name(operator), args[0] if args else None
    if name.endswith("_") and isinstance(first, torch.Tensor) and first.dtype in (torch.float64, torch.complex128):
        return first.copy_(operator(first.to(_NARROW[first.dtype]), *args[1:], **kwargs))
    given = kwargs.get("dtype")
    if name in FACTORIES and (given is None or given in WIDE):
        kind = first.dtype if given is None and isinstance(first, Tensor) else given or torch.float64
        wide = torch.complex128 if kind.is_complex else torch.float64
        return operator(*args, **{**kwargs, "dtype": _NARROW[wide]}).to(wide)
    return operator(*args, **kwargs)


def grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Multiply matrices in groups as `aten._grouped_mm` does, in any dtype. torch's own operator does not support
    float64."""
    if offs is None:
        product = left @ right
    else:
        ends = list(pairwise([0, *offs.tolist()]))
        if left.dim() == right.dim():
            product = torch.stack([left[:, a:b] @ right[a:b] for a, b in ends])
        elif left.dim() == 2:
            product = left.new_zeros(len(left), right.shape[-1])
            for group, (a, b) in enumerate(ends):
                product[a:b] = left[a:b] @ right[group]
        else:
            product = right.new_zeros(left.shape[1], right.shape[1])
            for group, (a, b) in enumerate(ends):
                product[:, a:b] = left[group] @ right[:, a:b]
    return product if bias is None else product + bias
