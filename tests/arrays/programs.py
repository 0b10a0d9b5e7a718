"""Random programs over arrays, each run on NumPy and on a namespace with the same lines, and compared step by step.

A program has 3 to 12 operations over arrays of 0 to 3 dims with 0 to 7 entries each, in placements drawn with them:
divided along any dim in uneven and empty parts, replicated, on one place. `run(seed, places)` is a pure function of its
arguments; test_programs.py runs some.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

import meshwise as mw

DTYPES = ("float64", "float32", "int64", "int32", "uint8", "bool", "complex128", "complex64")
MOST = 2000
"""Elements of an array at most: what would be larger is left out."""


@dataclass
class Pair:
    """The same array twice."""

    np: Any
    xp: Any


@dataclass
class State:
    """What a step works with. said: the program so far, for whoever reads a failure. single: it had values in single
    precision."""

    draw: Random
    xp: Any
    places: int
    said: list[str]
    single: bool = False

    def sharding(self, shape: tuple[int, ...]) -> Any:
        """A placement of an array of this shape."""
        kind = self.draw.random()
        if not shape or kind < 0.1:
            return self.xp.single(self.draw.randrange(self.places))
        if kind < 0.2:
            return self.xp.replicated()
        dim = self.draw.randrange(len(shape))
        cuts = sorted(self.draw.randint(0, shape[dim]) for _ in range(self.places - 1))
        return self.xp.shard(dim, [b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]], strict=True)])


def run(seed: int, places: int, over_ranks: bool = False) -> set[str]:
    """Run one program; the operations that it had. AssertionError with the whole program where results differ.

    over_ranks: on the ranks of this run, which all call it with the same seed.
    """
    draw = Random(seed)
    state = State(draw, mw.array_namespace(None if over_ranks else f"{places}xcpu"), places, [])
    pool = [made(state) for _ in range(2)]
    used: set[str] = set()
    for _ in range(draw.randint(3, 12)):
        name, step = draw.choice(STEPS)
        state.said.append(name)
        try:
            with np.errstate(all="ignore"):
                found = step(state, draw.choice(pool))
        except Unfit:
            state.said.pop()
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, {places} places: {'; '.join(state.said)}: {error!r}") from error
        used.add(name)
        _compare(found, f"seed {seed}, {places} places: {'; '.join(state.said)}", state.single)
        if _goes_on(np.asarray(found.np)):
            pool.append(found)
        pool[:] = pool[-4:]
    return used


def _goes_on(array: Any) -> bool:
    """Whether the program goes on with it: not where rounding would decide from here, nor with unsigned integers of 16
    bits and more, for which torch has few operators."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return False
    size = abs(array.astype(complex)).max(initial=0)
    return bool(size <= (1e30 if array.dtype.kind in "fc" else 2**62))


class Unfit(Exception):
    """The step cannot be done with this array."""


def _compare(found: Pair, where: str, single: bool = False) -> None:
    """single: it comes of values in single precision."""
    wanted, x = np.asarray(found.np), found.xp
    parts = [x.sharding.part_shape(x.shape, part) for part, _ in x.space.local(x.sharding)]
    assert [tuple(part.shape) for part in x.parts] == parts, f"{where}: parts are not as {x.sharding} says"
    assert all(part.dtype is x.dtype for part in x.parts), f"{where}: parts have another dtype than {x.dtype}"
    got = x.numpy()
    assert found.xp.shape == wanted.shape == got.shape, f"{where}: shape {got.shape}, NumPy has {wanted.shape}"
    assert got.dtype == wanted.dtype, f"{where}: {got.dtype}, NumPy has {wanted.dtype}"
    if wanted.dtype.kind in "biu":
        assert np.array_equal(got, wanted), f"{where}:\n{got}\nNumPy has\n{wanted}"
        return
    single = single or wanted.dtype in (np.float32, np.complex64)
    finite = wanted[np.isfinite(wanted)]
    size = float(abs(finite).max(initial=0))
    tolerance = (2e-4 if single else 1e-9) * max(size, 1e-3)
    assert np.allclose(got, wanted, rtol=1e-3 if single else 1e-7, atol=tolerance, equal_nan=True), (
        f"{where}:\n{got}\nNumPy has\n{wanted}"
    )


def _values(state: State, shape: tuple[int, ...], dtype: str) -> Any:
    draw = np.random.default_rng(state.draw.getrandbits(32))
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if dtype.startswith("complex"):
        return (draw.normal(size=shape) + 1j * draw.normal(size=shape)).astype(dtype)
    if dtype.startswith("float"):
        return draw.normal(size=shape).astype(dtype)
    return draw.integers(0 if dtype[0] == "u" else -5, 9, shape).astype(dtype)


def made(state: State, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> Pair:
    shape = tuple(state.draw.randint(0, 7) for _ in range(state.draw.randint(0, 3))) if shape is None else shape
    values = _values(state, shape, dtype or state.draw.choice(DTYPES))
    state.single = state.single or values.dtype in (np.float32, np.complex64)
    placed = state.sharding(shape)
    state.said.append(f"{values.dtype}{shape} {placed}")
    return Pair(np.array(values), state.xp.asarray(values, sharding=placed))


def _kind(pair: Pair, kinds: str) -> None:
    if pair.np.dtype.kind not in kinds:
        raise Unfit


def _dims(pair: Pair, least: int) -> None:
    if pair.np.ndim < least or pair.np.size > MOST:
        raise Unfit


def _each(function: Callable[[Any, Any], Any], pair: Pair, state: State) -> Pair:
    """function(namespace, array) for both."""
    return Pair(np.asarray(function(np, pair.np)), function(state.xp, pair.xp))


def _unary(state: State, x: Pair) -> Pair:
    names = {"b": ["logical_not"], "i": ["abs", "negative", "square", "sign"], "u": ["square", "abs"]}
    names |= {"f": ["abs", "negative", "square", "exp", "sin", "floor", "isfinite", "tanh", "sign"]}
    names |= {"c": ["abs", "negative", "conj", "real", "imag", "square"]}
    name = state.draw.choice(names[x.np.dtype.kind])
    state.said[-1] = name
    return _each(lambda n, a: getattr(n, name)(a), x, state)


def _binary(state: State, x: Pair) -> Pair:
    kind = x.np.dtype.kind
    names = ["equal", "not_equal"]
    names += ["logical_and", "logical_xor"] if kind == "b" else ["add", "subtract", "multiply"]
    names += ["maximum", "minimum", "less", "greater_equal"] if kind in "iuf" else []
    names += ["divide", "hypot"] if kind == "f" else []
    name = state.draw.choice(names)
    shape = tuple(1 if state.draw.random() < 0.3 else n for n in x.np.shape)[state.draw.randint(0, x.np.ndim) :]
    alike = {"f": ("float32", "float64"), "c": ("complex64", "complex128"), "i": ("int32", "int64")}
    y = made(state, shape, state.draw.choice(alike.get(kind, (x.np.dtype.name,))))
    state.said.append(name)
    return Pair(np.asarray(getattr(np, name)(x.np, y.np)), getattr(state.xp, name)(x.xp, y.xp))


def _scalar(state: State, x: Pair) -> Pair:
    _kind(x, "iufc")
    value = state.draw.choice([2, 3, 1])
    act = state.draw.choice([operator.add, operator.mul, operator.sub, operator.le, operator.eq])
    if act is operator.le:
        _kind(x, "iuf")
    state.said[-1] = f"{act.__name__} {value}"
    return _each(lambda n, a: act(a, value), x, state)


def _where(state: State, x: Pair) -> Pair:
    c, y = made(state, x.np.shape, "bool"), made(state, x.np.shape, x.np.dtype.name)
    return Pair(np.where(c.np, x.np, y.np), state.xp.where(c.xp, x.xp, y.xp))


def _reduction(state: State, x: Pair) -> Pair:
    kind = x.np.dtype.kind
    axis = state.draw.choice([None, *range(-x.np.ndim, x.np.ndim)])
    length = x.np.size if axis is None else x.np.shape[axis]
    names = ["any", "all"] if kind == "b" else ["sum", "prod", "any", "all"]
    names += ["max", "min"] if kind in "iuf" and length else []
    names += ["mean", "std"] if kind == "f" and length else []
    name, keep = state.draw.choice(names), state.draw.random() < 0.3
    state.said[-1] = f"{name} axis={axis} keepdims={keep}"
    return _each(lambda n, a: getattr(n, name)(a, axis=axis, keepdims=keep), x, state)


def _arg(state: State, x: Pair) -> Pair:
    _kind(x, "iuf")
    axis = state.draw.choice([None, *range(x.np.ndim)])
    if not (x.np.size if axis is None else x.np.shape[axis]):
        raise Unfit
    name = state.draw.choice(["argmax", "argmin"])
    state.said[-1] = f"{name} axis={axis}"
    return _each(lambda n, a: getattr(n, name)(a, axis=axis), x, state)


def _cumulative(state: State, x: Pair) -> Pair:
    _dims(x, 1)
    _kind(x, "iufc")
    axis = state.draw.randrange(x.np.ndim)
    state.said[-1] = f"cumulative_sum axis={axis}"
    return _each(lambda n, a: n.cumulative_sum(a, axis=axis), x, state)


def _reshape(state: State, x: Pair) -> Pair:
    sizes, left = [], x.np.size
    for _ in range(state.draw.randint(0, 2)):
        factors = [n for n in range(1, 13) if left % n == 0] if left else [state.draw.randint(1, 4)]
        sizes.append(state.draw.choice(factors))
        left = left // sizes[-1] if left else 0
    shape = (*sizes, left)
    state.said[-1] = f"reshape {shape}"
    return _each(lambda n, a: n.reshape(a, shape), x, state)


def _permute(state: State, x: Pair) -> Pair:
    axes = list(range(x.np.ndim))
    state.draw.shuffle(axes)
    state.said[-1] = f"permute_dims {axes}"
    return _each(lambda n, a: n.permute_dims(a, tuple(axes)), x, state)


def _moved(state: State, x: Pair) -> Pair:
    _dims(x, 1)
    axis, by = state.draw.randrange(x.np.ndim), state.draw.randint(-9, 9)
    name = state.draw.choice(["flip", "roll", "expand_dims", "tile", "repeat", "concat", "stack"])
    state.said[-1] = f"{name} axis={axis} by={by}"
    acts: dict[str, Callable[[Any, Any], Any]] = {
        "flip": lambda n, a: n.flip(a, axis=axis),
        "roll": lambda n, a: n.roll(a, by, axis=axis),
        "expand_dims": lambda n, a: n.expand_dims(a, axis=axis),
        "tile": lambda n, a: n.tile(a, (2,) * a.ndim),
        "repeat": lambda n, a: n.repeat(a, 2, axis=axis),
        "concat": lambda n, a: n.concat([a, n.flip(a, axis=axis)], axis=axis),
        "stack": lambda n, a: n.stack([a, a], axis=axis),
    }
    return _each(acts[name], x, state)


def key_of(state: State, shape: tuple[int, ...]) -> tuple[Any, ...]:
    key: list[Any] = []
    for length in shape[: state.draw.randint(0, len(shape))]:
        kind = state.draw.random()
        if kind < 0.2 and length:
            key.append(state.draw.randrange(-length, length))
            continue
        ends = [state.draw.choice([None, state.draw.randint(-length - 1, length + 1)]) for _ in range(2)]
        key.append(slice(*ends, state.draw.choice([None, 1, 2, 3, -1, -2])))
    if state.draw.random() < 0.3:
        key.insert(state.draw.randint(0, len(key)), None)
    if len([each for each in key if each is not None]) < len(shape) and state.draw.random() < 0.3:
        key.append(...)
    return tuple(key)


def _index(state: State, x: Pair) -> Pair:
    key = key_of(state, x.np.shape)
    state.said[-1] = f"[{key}]"
    return _each(lambda n, a: a[key], x, state)


def _mask(state: State, x: Pair) -> Pair:
    _dims(x, 1)
    mask = made(state, x.np.shape[: state.draw.randint(1, x.np.ndim)], "bool")
    state.said.append("[mask]")
    return Pair(x.np[mask.np], x.xp[mask.xp])


def _take(state: State, x: Pair) -> Pair:
    _dims(x, 1)
    axis = state.draw.randrange(x.np.ndim)
    if not x.np.shape[axis]:
        raise Unfit
    places = np.array([state.draw.randrange(x.np.shape[axis]) for _ in range(state.draw.randint(0, 5))], np.int64)
    state.said[-1] = f"take {places.tolist()} axis={axis}"
    own = state.xp.asarray(places, sharding=state.sharding(places.shape))
    return Pair(np.take(x.np, places, axis=axis), state.xp.take(x.xp, own, axis=axis))


def _assign(state: State, x: Pair) -> Pair:
    one, other = np.array(x.np), state.xp.asarray(x.xp, copy=True)
    key = key_of(state, x.np.shape)
    part = one[key]
    way = state.draw.choice(["scalar", "array", "own", "add", "mask"])
    state.said[-1] = f"[{key}] = {way}"
    if way == "mask":
        mask = made(state, x.np.shape, "bool")
        one[mask.np], other[mask.xp] = 1, 1
    elif way == "scalar":
        one[key], other[key] = 1, 1
    elif way == "array":
        shape = tuple(1 if state.draw.random() < 0.2 else n for n in np.shape(part))
        y = made(state, shape, x.np.dtype.name)
        one[key], other[key] = y.np, y.xp
    elif way == "add":
        _kind(x, "iufc")
        one[key] += 2
        other[key] += 2
    elif one.ndim and len(one) > 1:  # a shifted slice of itself
        one[1:], other[1:] = one[:-1].copy(), other[:-1]
    return Pair(one, other)


def _matmul(state: State, x: Pair) -> Pair:
    _kind(x, "fci")
    _dims(x, 2)
    if x.np.ndim != 2:
        raise Unfit
    y = made(state, (x.np.shape[1], state.draw.randint(0, 5)), x.np.dtype.name)
    state.said.append("matmul")
    return Pair(x.np @ y.np, x.xp @ y.xp)


def _sort(state: State, x: Pair) -> Pair:
    _kind(x, "iuf")
    _dims(x, 1)
    axis = state.draw.randrange(x.np.ndim)
    name = state.draw.choice(["sort", "argsort"])
    state.said[-1] = f"{name} axis={axis}"
    return _each(lambda n, a: getattr(n, name)(a, axis=axis, stable=True), x, state)


def _unique(state: State, x: Pair) -> Pair:
    _kind(x, "iub")
    return (
        Pair(np.unique(x.np), state.xp.sort(state.xp.unique_values(x.xp)))
        if x.np.dtype.kind != "b"
        else Pair(np.unique(x.np), state.xp.unique_values(x.xp))
    )


def _search(state: State, x: Pair) -> Pair:
    _kind(x, "if")
    _dims(x, 1)
    y = made(state, (state.draw.randint(0, 7),), x.np.dtype.name)
    state.said.append("searchsorted")
    return Pair(np.searchsorted(np.sort(y.np), x.np), state.xp.searchsorted(state.xp.sort(y.xp), x.xp))


def _fft(state: State, x: Pair) -> Pair:
    _kind(x, "c")
    _dims(x, 1)
    axis = state.draw.randrange(x.np.ndim)
    if not x.np.shape[axis]:
        raise Unfit
    state.said[-1] = f"fft axis={axis}"
    return _each(
        lambda n, a: n.fft.fft(a, axis=axis).astype(x.np.dtype.name) if n is np else n.fft.fft(a, axis=axis), x, state
    )


def _reshard(state: State, x: Pair) -> Pair:
    placed = state.sharding(x.np.shape)
    state.said[-1] = f"reshard {placed}"
    return Pair(x.np, x.xp.reshard(placed))


def _cast(state: State, x: Pair) -> Pair:
    dtype = state.draw.choice(["float64", "float32", "complex128", "int64"])
    if (x.np.dtype.kind in "fc" and dtype == "int64") or (x.np.dtype.kind == "c" and dtype[0] == "f"):
        raise Unfit
    state.said[-1] = f"astype {dtype}"
    state.single = state.single or dtype == "float32"
    return _each(lambda n, a: n.astype(a, getattr(n, dtype)), x, state)


STEPS: list[tuple[str, Callable[[State, Pair], Pair]]] = [
    ("unary", _unary), ("binary", _binary), ("binary", _binary), ("scalar", _scalar), ("where", _where),
    ("reduction", _reduction), ("argmax", _arg), ("cumulative_sum", _cumulative), ("reshape", _reshape),
    ("permute_dims", _permute), ("moved", _moved), ("moved", _moved), ("index", _index), ("index", _index),
    ("mask", _mask), ("take", _take), ("assign", _assign), ("assign", _assign), ("matmul", _matmul),
    ("sort", _sort), ("unique", _unique), ("searchsorted", _search), ("fft", _fft), ("reshard", _reshard),
    ("astype", _cast),
]  # fmt: skip
