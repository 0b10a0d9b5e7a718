"""Run elementwise operators on parts that are split the same way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.rule import (
    NoRule,
    Rule,
    first_split,
    given,
    largest,
    moved,
    ones_of_whole,
    refuse,
    with_parts_of,
)
from meshwise.parallel.splits.tensor import at_level, is_split, level_of, parts_of, split, split_again, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, argument, called, named, on_parts

UNARY = """abs absolute acos acosh asin asinh atan atanh ceil clamp clamp_max clamp_min clip cos cosh celu deg2rad
digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan
leaky_relu lgamma log log10 log1p log2 logical_not logit log_sigmoid logsigmoid mish nan_to_num neg negative positive
reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square
tan tanh tanhshrink trunc bitwise_not threshold hardshrink _threshold signbit isposinf isneginf float_power"""
BINARY = """add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copysign div divide eq floor_divide fmax fmin
fmod ge greater greater_equal gt heaviside hypot le lerp less less_equal logaddexp logical_and logical_or logical_xor
lt masked_fill maximum minimum mul multiply ne not_equal polar pow remainder rsub sub subtract true_divide where xlogy
isclose nextafter"""
DUNDER = """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__
__rpow__ __mod__ __rmod__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
__neg__ __abs__ __invert__ __floordiv__ __rfloordiv__ __lshift__ __rshift__"""
IN_PLACE = "__iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__ __ifloordiv__ __imod__"
CASTS = "bfloat16 bool byte clone contiguous cpu cuda detach double float half int long short to type type_as"
LIKE = "zeros_like ones_like full_like empty_like"
PLAIN = """dim element_size get_device is_complex is_contiguous is_cuda is_floating_point is_inference is_signed
ndimension new_tensor requires_grad_ retain_grad data_ptr storage_offset detach_
untyped_storage __get__ __set__ __hash__ record_stream is_pinned"""


def _same_place(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an elementwise operator on one or several operands, with broadcasting."""
    if "out" in kwargs or (len(args) + len(kwargs) == 1 and called(func) == "where"):
        raise NoRule
    operands = [*args, *kwargs.values()]
    dims = max(each.dim() for each in operands if isinstance(each, Tensor))
    first = largest(operands)
    like = moved(first.part, first.part.dim - first.dim() + dims)
    new = [with_parts_of(each, like, dims) for each in operands]
    return given(func(*new[: len(args)], **dict(zip(kwargs, new[len(args) :], strict=True))), like)


def _broadcast(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Broadcast tensors, each divided like the largest one."""
    shape = list(torch.broadcast_shapes(*map(whole_shape, args)))
    first = largest(args)
    part = moved(first.part, first.part.dim - first.dim() + len(shape))
    shape[part.dim] = part.own if shape[part.dim] == part.length else refuse()
    return tuple(given(with_parts_of(each, part, len(shape)).expand(shape), part) for each in args)


def _compared(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compare two tensors along a dim that is not split, as `cosine_similarity` does."""
    x, y = _broadcast(func, [*args[:2], *(value for value in kwargs.values() if isinstance(value, Tensor))], {})
    options = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
    made, pairs = func(x, y, *args[2:], **options), called(func) == "pairwise_distance"
    dim = (-1 if pairs else [*args[2:3], options.get("dim", 1)][0]) % x.dim()
    part = moved(x.part, x.part.dim - (made.dim() < x.dim() and dim < x.part.dim))
    return given(made, part) if dim != x.part.dim else refuse()


def _in_place(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an in-place operator, such as `add_`, on this rank's part of the first operand, and return that operand."""
    first = first_split(args)
    new = [first, *(with_parts_of(each, first.part, first.dim()) for each in args[1:])]
    func(*new, **{name: with_parts_of(each, first.part, first.dim()) for name, each in kwargs.items()})
    return first


def _cast(func: Func, args: Args, kwargs: Kwargs) -> Any:
    made = func(*args, **kwargs)
    return given(made, args[0].part) if is_split(args[0]) else made  # `plain.to(split)` stays plain


def _new(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Make a constant tensor. It is split like the given tensor if it has as many rows."""
    x, options = args[0], dict(kwargs)
    size, rest = (options.pop("size"), args[1:]) if "size" in options else (args[1], args[2:])
    if not isinstance(size, (tuple, list)):
        size, rest = args[1:], ()
    if not is_split(x) or len(size) <= x.part.dim or size[x.part.dim] != x.part.length:
        return func(x, size, *rest, **options)
    return given(func(x, [x.part.own if d == x.part.dim else n for d, n in enumerate(size)], *rest, **options), x.part)


def _size(func: Func, args: Args, kwargs: Kwargs) -> Any:
    shape = whole_shape(args[0])
    dim = argument(args, kwargs, 1, "dim")
    return shape if dim is None else shape[dim]


def _dropout(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Draw the dropout mask of the whole tensor, so that random numbers are those of one device, and apply this rank's
    part."""
    values = named(("input", "p", "training", "inplace"), args, kwargs)
    x, p, training = values["input"], values.get("p", 0.5), values.get("training", True)
    if not is_split(x):
        raise NoRule
    if not training or p == 0:
        return x
    mask = functional.dropout(ones_of_whole(x), p, True)
    part = x.part
    if values.get("inplace"):
        x.mul_(part.slice_of(mask))
        return x
    return split(x * part.slice_of(mask), part)


def _hook(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Register a hook for the gradient of a split tensor."""
    tensor, hook = args[0], args[1]
    parts = sorted(parts_of(tensor), key=level_of)
    scale = math.prod(part.axis.gradient_scale for part in parts)

    def hooked(gradient: Tensor) -> Any:
        found = hook(split_again(gradient.view_as(gradient) if scale == 1 else gradient / scale, parts))
        if not isinstance(found, Tensor):
            return found
        for part in parts:
            with at_level(level_of(part)):
                found = with_parts_of(found, part, found.dim())
        with on_parts():
            return found.view(gradient.shape) * scale if scale > 1 else found.view(gradient.shape)

    with on_parts():
        return func(tensor, hooked)


RULES: dict[str, Rule] = {
    **dict.fromkeys([*UNARY.split(), *BINARY.split(), *DUNDER.split()], _same_place),
    **dict.fromkeys([f"{name}_" for name in [*UNARY.split(), *BINARY.split(), "copy", "zero", "fill"]], _in_place),
    **dict.fromkeys(IN_PLACE.split(), _in_place),
    **dict.fromkeys([*CASTS.split(), *LIKE.split()], _cast),
    **dict.fromkeys(PLAIN.split(), lambda func, args, kwargs: func(*args, **kwargs)),
    **dict.fromkeys(["new_empty", "new_full", "new_ones", "new_zeros"], _new),
    "size": _size,
    **dict.fromkeys(["numel", "nelement"], lambda func, args, kwargs: whole_shape(args[0]).numel()),
    "__len__": lambda func, args, kwargs: whole_shape(args[0])[0],
    "dropout": _dropout,
    "register_hook": _hook,
    "broadcast_tensors": _broadcast,
    **dict.fromkeys(["cosine_similarity", "pairwise_distance"], _compared),
}
