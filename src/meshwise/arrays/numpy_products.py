"""Add NumPy's products that the standard lacks: `einsum`, `inner`, `kron`, `vdot`.

`linalg.norm`, `lstsq` and `polyfit` are here too.

An `einsum` of more than two arrays multiplies the first two, then the result and the next array, and so on. Each
product is divided over the devices so that it moves the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from string import ascii_letters
from typing import Any

import torch

from meshwise.arrays.array import Array, like
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.layout import moveaxis, permute_dims
from meshwise.arrays.norms import cross, diagonal_of, matrix_norm, vector_norm
from meshwise.arrays.products import Terms, matmul, product, tensordot, vecdot
from meshwise.arrays.reductions import as_array, as_arrays, total
from meshwise.arrays.rules import by_name
from meshwise.arrays.solving import inv
from meshwise.arrays.spectra import svd, svdvals
from meshwise.arrays.views import axis_of
from meshwise.spec.errors import UsageError


def einsum(subscripts: str, /, *operands: Any, optimize: Any = False) -> Any:
    """Sum products over labeled dims, as in `xp.einsum("ik,kj->ij", a, b)`."""
    if not isinstance(subscripts, str) or not operands:
        raise UsageError("einsum: pass a string of labels, and then arrays: xp.einsum('ik,kj->ij', a, b).")
    first = as_array("einsum", next((x for x in operands if isinstance(x, Array)), operands[0]))
    xp = first.__array_namespace__()
    arrays = [xp.asarray(each) for each in operands]
    inputs, output = _read(subscripts, arrays)
    x, labels = _alone(arrays[0], inputs[0])
    for at, (other, theirs) in enumerate(zip(arrays[1:], inputs[1:], strict=True), 2):
        needed = set(output).union(*inputs[at:])
        other, theirs = _alone(other, theirs)
        x, labels = _summed(x, labels, needed | set(theirs))
        other, theirs = _summed(other, theirs, needed | set(labels))
        kept = "".join(dict.fromkeys(label for label in labels + theirs if label in needed))
        x, labels = _pair(x, labels, other, theirs, kept), kept
    x, labels = _summed(x, labels, set(output))
    return x if labels == output else permute_dims(x, tuple(map(labels.index, output)))


def _read(subscripts: str, arrays: Sequence[Array]) -> tuple[list[str], str]:
    """Return the labels of each array and the labels of the result, one letter per dim."""
    given, arrow, result = subscripts.replace(" ", "").partition("->")
    inputs = given.split(",")
    free = "".join(letter for letter in ascii_letters if letter not in subscripts)  # labels for the dims of `...`
    asked = f"einsum({subscripts!r}) of shapes {', '.join(str(x.shape) for x in arrays)}"
    if len(inputs) != len(arrays):
        raise ValueError(f"{asked}: the labels are for {len(inputs)} arrays, but {len(arrays)} were given.")
    longest = ""
    for at, (each, x) in enumerate(zip(inputs, arrays, strict=True)):
        if "..." in each:
            count = x.ndim - len(each) + 3
            stands = free[: max(count, 0)][::-1]
            longest = max(longest, stands, key=len)
            inputs[at] = each = each.replace("...", stands)
        if len(each) != x.ndim or not (each.isalpha() or not each):
            raise ValueError(
                f"{asked}: {each!r} does not match shape {x.shape}. Write a letter for each dim, or ... for several."
            )
    named = [label for each in inputs for label in each if label not in longest]
    if not arrow:
        result = "..." * bool(longest) + "".join(sorted({label for label in named if named.count(label) == 1}))
    result = result.replace("...", longest)
    if len(set(result)) < len(result) or not set(result) <= set("".join(inputs)):
        raise ValueError(f"{asked}: labels of the result, {result!r}, must be labels of the arrays, each once.")
    _lengths(asked, inputs, arrays)
    return inputs, result


def _lengths(asked: str, inputs: Sequence[str], arrays: Sequence[Array]) -> None:
    known: dict[str, int] = {}
    for each, x in zip(inputs, arrays, strict=True):
        pairs = set(zip(each, x.shape, strict=True))
        if len(pairs) > len(set(each)):
            raise ValueError(f"{asked}: dims with the same label in {each!r} must have equal lengths.")
        for label, length in pairs:
            if length != 1 and known.setdefault(label, length) != length:
                raise ValueError(f"{asked}: label {label!r} has the unequal lengths {known[label]} and {length}.")


def _alone(x: Array, labels: str) -> tuple[Array, str]:
    """Return (an array whose dims all have different labels, these labels)."""
    while twice := next((label for label in labels if labels.count(label) > 1), None):
        one, other = labels.index(twice), labels.rindex(twice)
        x = diagonal_of(moveaxis(x, (one, other), (-2, -1)), 0, read_only=False)
        labels = "".join(label for dim, label in enumerate(labels) if dim not in (one, other)) + twice
    return x, labels


def _summed(x: Array, labels: str, needed: set[str]) -> tuple[Array, str]:
    """Sum `x` over all dims whose labels are not in `needed`. Returns the sums, and the labels of their dims."""
    over = tuple(dim for dim, label in enumerate(labels) if label not in needed)
    kept = "".join(label for label in labels if label in needed)
    return (total(x, axis=over, dtype=x.dtype) if over else x), kept


def _pair(x: Array, ours: str, y: Array, theirs: str, out: str) -> Array:
    lengths: dict[str, int] = {}
    for labels, shape in ((ours, x.shape), (theirs, y.shape)):
        for label, length in zip(labels, shape, strict=True):
            lengths[label] = length if lengths.get(label, 1) == 1 else lengths[label]
    number = {label: out.index(label) for label in out}
    number |= {label: len(number) + at for at, label in enumerate(label for label in lengths if label not in out)}

    def numbers(labels: str, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return tuple(
            number[label] if length == lengths[label] else None for label, length in zip(labels, shape, strict=True)
        )

    shape = tuple(lengths[label] for label in out)
    terms = Terms(numbers(ours, x.shape), numbers(theirs, y.shape), tuple(range(len(out))), shape)
    return product(x, y, terms, partial(torch.einsum, f"{ours},{theirs}->{out}"), "einsum")


def inner(x1: Any, x2: Any, /) -> Any:
    """Sum the products of `x1` and `x2` over the last dim of each array."""
    x1, x2 = as_arrays("inner", x1, x2)
    found = x1 * x2 if not x1.shape or not x2.shape else tensordot(x1, x2, axes=((-1,), (-1,)))
    return found if found.shape else like(found, found.parts)  # a result without dims becomes a scalar, as in NumPy


def vdot(x1: Any, x2: Any, /) -> Any:
    """Sum `conj(x1) * x2` over all elements."""
    x1, x2 = as_arrays("vdot", x1, x2)
    return vecdot(x1.reshape(-1), x2.reshape(-1))


def kron(x1: Any, x2: Any, /) -> Any:
    """Return the Kronecker product of two arrays."""
    x1, x2 = as_arrays("kron", x1, x2)
    dims = max(x1.ndim, x2.ndim)
    a, b = ((1,) * (dims - x.ndim) + x.shape for x in (x1, x2))
    blocks = x1.reshape([each for length in a for each in (length, 1)]) * x2.reshape(
        [each for length in b for each in (1, length)]
    )
    return blocks.reshape([one * other for one, other in zip_longest(a, b)])


def norm(x: Any, /, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the vector norm along one axis, the matrix norm along two axes, or by default the norm of all elements."""
    x = as_array("norm", x)
    if axis is None and ord is None:
        return vector_norm(x, keepdims=keepdims)
    dims = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(axis_of(each, x.ndim, "norm") for each in dims)
    if len(axes) == 1:
        return vector_norm(x, axis=axes, ord=2 if ord is None else ord, keepdims=keepdims)
    if len(axes) != 2:
        raise ValueError(f"norm over {len(axes)} axes: name one axis (vector norm) or two (matrix norm).")
    found = matrix_norm(moveaxis(x, axes, (-2, -1)), ord="fro" if ord is None else ord)
    return found.reshape(tuple(1 if dim in axes else n for dim, n in enumerate(x.shape))) if keepdims else found


def lstsq(a: Any, b: Any, /, rcond: float | None = None) -> tuple[Any, Any, int, Any]:
    """Solve `a @ x = b` by least squares.
    Returns (x, residuals, rank of `a`, singular values of `a`)."""
    a, b = as_arrays("lstsq", a, b)
    xp = a.__array_namespace__()
    if a.ndim != 2 or b.ndim not in (1, 2) or a.shape[0] != b.shape[0]:
        raise ValueError(f"lstsq: a must be a matrix, and b must have as many rows, not {a.shape} and {b.shape}.")
    u, s, vh = svd(a, full_matrices=False)
    share = xp.finfo(s.dtype).eps * max(a.shape) if rcond is None else rcond
    kept = ELEMENTWISE["greater"](s, share * s.max() if s.shape[0] else 0)
    rank = int(kept.sum())
    inverse = xp.where(kept, 1 / xp.where(kept, s, 1), 0)
    turned = matmul(xp.conj(u.T), b)
    x = matmul(xp.conj(vh.T), turned * (inverse if b.ndim == 1 else inverse[:, None]))
    apart = xp.abs(matmul(a, x) - b) ** 2
    full = rank == a.shape[1] < a.shape[0]
    residuals = total(apart, axis=0).reshape(-1) if full else xp.zeros((0,), dtype=s.dtype)
    return x, residuals, rank, s


def cond(x: Any, /, p: Any = None) -> Any:
    """Return the condition number of a matrix: its norm times the norm of its inverse."""
    x = as_array("cond", x)
    if p in (None, 2, -2):
        s = svdvals(x)
        return s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    return matrix_norm(x, ord=p) * matrix_norm(inv(x), ord=p)


def vander(x: Any, /, N: int | None = None, increasing: bool = False) -> Any:
    """Return the Vandermonde matrix of a vector, with its powers as columns."""
    x = as_array("vander", x)
    powers = range(x.shape[0] if N is None else N)
    return x.__array_namespace__().stack([x**power for power in (powers if increasing else reversed(powers))], axis=1)


def polyfit(x: Any, y: Any, deg: int, /, rcond: float | None = None) -> Any:
    """Fit a polynomial of degree `deg` to the points (x, y) by least squares."""
    x, y = as_arrays("polyfit", x, y)
    x, xp = x + 0.0, x.__array_namespace__()
    powers = vander(x, deg + 1)
    scale = xp.sqrt(total(powers * powers, axis=0))
    found = lstsq(powers / scale, y, x.shape[0] * xp.finfo(x.dtype).eps if rcond is None else rcond)[0]
    return (found.T / scale).T


FUNCTIONS = by_name(einsum, inner, vdot, kron, cross, polyfit, vander)
LINALG = by_name(norm, lstsq, cond)
