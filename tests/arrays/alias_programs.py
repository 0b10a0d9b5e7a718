"""Random programs that keep views alive and write through them, each line done by NumPy and by a namespace.

After each line all arrays that are alive are compared: a write shows in the views of what is written, and in nothing
else. `run(draw, places)` is a pure function of what it draws; test_views.py runs some.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import meshwise as mw
from tests.arrays.programs import Pair, State, Unfit, key_of, made

DTYPES = ("float64", "int64", "float32", "uint8", "bool", "complex128", "uint16")
MOST_ALIVE = 8


def run(draw: Random, places: int, over_ranks: bool = False) -> set[str]:
    """Run one program; the lines that it had. AssertionError with the program where an array differs.

    over_ranks: on the ranks of this run, which all draw the same.
    """
    state = State(draw, mw.array_namespace(None if over_ranks else f"{places}xcpu"), places, [])
    alive = [_base(state)]
    used: set[str] = set()
    with mw.guard("allow"):
        for _ in range(draw.randint(4, 16)):
            name, line = draw.choice(LINES)
            state.said.append(name)
            said = len(state.said)
            try:
                line(state, alive)
            except Unfit:
                del state.said[said - 1 :]
                continue
            except Exception as error:
                raise AssertionError(f"{places} places: {'; '.join(state.said)}: {error!r}") from error
            used.add(name)
            for at, pair in enumerate(alive):
                _compare(pair, f"{places} places: {'; '.join(state.said)}: array {at} of {len(alive)}")
    return used


def _compare(pair: Pair, where: str) -> None:
    wanted, got = np.asarray(pair.np), pair.xp.numpy()
    assert pair.xp.shape == wanted.shape, f"{where}: shape {pair.xp.shape}, NumPy has {wanted.shape}"
    assert got.dtype == wanted.dtype, f"{where}: {got.dtype}, NumPy has {wanted.dtype}"
    assert np.array_equal(got, wanted), f"{where}:\n{got}\nNumPy has\n{wanted}"


def _base(state: State) -> Pair:
    shape = tuple(state.draw.choice([0, 1, 2, 3, 4, 4, 6]) for _ in range(state.draw.randint(0, 3)))
    return _whole(made(state, shape, state.draw.choice(DTYPES)))


def _whole(pair: Pair) -> Pair:
    """Small whole numbers, which are exact whatever is done with them."""
    if pair.np.dtype.kind in "fc":
        pair.np[...] = np.round(pair.np * 3)
        pair.xp[...] = pair.np
    return pair


def _chosen(state: State, alive: list[Pair]) -> Pair:
    at = state.draw.randrange(len(alive))
    state.said[-1] = f"{at}: {state.said[-1]}"
    return alive[at]


def _is_number(pair: Pair) -> bool:
    return not isinstance(pair.np, np.ndarray)


def _keep(state: State, alive: list[Pair], new: Pair) -> None:
    alive.append(new)
    if len(alive) > MOST_ALIVE:
        del alive[state.draw.randrange(MOST_ALIVE)]


def _view(function: Callable[[State, Any], Callable[[Any, Any], Any]]) -> Callable[[State, list[Pair]], None]:
    """A line that makes an array of one that is alive. function: draws, and gives (namespace, array) -> array."""

    def line(state: State, alive: list[Pair]) -> None:
        x = _chosen(state, alive)
        if _is_number(x):
            raise Unfit
        act = function(state, x.np)
        _keep(state, alive, Pair(act(np, x.np), act(state.xp, x.xp)))

    return line


def _index(state: State, a: Any) -> Callable[[Any, Any], Any]:
    key = key_of(state, a.shape)
    state.said[-1] += f" {key}"
    return lambda n, x: x[key]


def _reshape(state: State, a: Any) -> Callable[[Any, Any], Any]:
    sizes, left = [], a.size
    for _ in range(state.draw.randint(0, 2)):
        sizes.append(state.draw.choice([n for n in range(1, 13) if left % n == 0] if left else [1, 2]))
        left = left // sizes[-1] if left else 0
    shape = (*sizes, left)
    state.said[-1] += f" {shape}"
    return lambda n, x: n.reshape(x, shape)


def _permute(state: State, a: Any) -> Callable[[Any, Any], Any]:
    axes = list(range(a.ndim))
    state.draw.shuffle(axes)
    state.said[-1] += f" {axes}"
    return lambda n, x: n.permute_dims(x, tuple(axes))


def _along(state: State, a: Any) -> Callable[[Any, Any], Any]:
    if not a.ndim:
        raise Unfit
    axis = state.draw.randrange(a.ndim)
    acts: dict[str, Callable[[Any, Any], Any]] = {
        "flip": lambda n, x: n.flip(x, axis=axis),
        "expand_dims": lambda n, x: n.expand_dims(x, axis=axis),
        "moveaxis": lambda n, x: n.moveaxis(x, axis, 0),
        "swapaxes": lambda n, x: x.swapaxes(axis, -1),
        "last split": lambda n, x: n.array_split(x, 2, axis=axis)[-1],
        "rollaxis": lambda n, x: n.rollaxis(x, axis),
    }
    name = state.draw.choice(list(acts))
    state.said[-1] = state.said[-1].replace("along", f"{name} axis={axis}")
    return acts[name]


def _plain(state: State, a: Any) -> Callable[[Any, Any], Any]:
    acts: dict[str, Callable[[Any, Any], Any]] = {
        "T": lambda n, x: x.T,
        "ravel": lambda n, x: x.ravel(),
        "reshape(-1)": lambda n, x: x.reshape(-1),
        "squeeze": lambda n, x: n.squeeze(x),
        "[...]": lambda n, x: x[...],
        "asarray": lambda n, x: n.asarray(x),
        "atleast_2d": lambda n, x: n.atleast_2d(x),
        "broadcast_to": lambda n, x: n.broadcast_to(x, (2, *x.shape)),
        "real": lambda n, x: x.real,
        "imag": lambda n, x: x.imag,
        "conj()": lambda n, x: x.conj(),
        "copy()": lambda n, x: x.copy(),
        "flatten()": lambda n, x: x.flatten(),
        "ascontiguousarray": lambda n, x: n.ascontiguousarray(x),
        "positive": lambda n, x: n.positive(x) if x.dtype != n.bool else n.logical_not(x),
        "x * 1 + x": lambda n, x: x * x if x.dtype == n.bool else x * 1 + x * 0,
        "zeros_like": lambda n, x: n.zeros_like(x),
        "astype": lambda n, x: x.astype(n.complex128),
        "where": lambda n, x: n.where(x == x, x, x),
        "clip": lambda n, x: n.copy(x),
    }
    if a.ndim:
        acts |= {
            "last row": lambda n, x: [*x][-1] if len(x) else x,
            "unstack": lambda n, x: n.unstack(x)[0] if len(x) else x,
            "take": lambda n, x: n.take(x, n.asarray([0]), axis=0) if len(x) else x,
            "concat": lambda n, x: n.concat([x]),
            "roll": lambda n, x: n.roll(x, 0, axis=0),
            "[list]": lambda n, x: x[[0, -1]] if len(x) else x,
            "[mask]": lambda n, x: x[x == x],
        }
    if a.ndim == 2:
        acts |= {
            "diagonal": lambda n, x: n.linalg.diagonal(x),
            "rot90": lambda n, x: n.rot90(x),
            "rot90 twice": lambda n, x: n.rot90(x, 2),
            "matrix_transpose": lambda n, x: n.matrix_transpose(x),
            "einsum ij->ji": lambda n, x: n.einsum("ij->ji", x),
        }
        if a.shape[0] == a.shape[1]:
            acts["einsum ii->i"] = lambda n, x: n.einsum("ii->i", x)
    name = state.draw.choice(list(acts))
    state.said[-1] = state.said[-1].replace("plain", name)
    return acts[name]


def _new(state: State, alive: list[Pair]) -> None:
    _keep(state, alive, _base(state))


def _drop(state: State, alive: list[Pair]) -> None:
    if len(alive) < 2:
        raise Unfit
    at = state.draw.randrange(len(alive))
    state.said[-1] = f"del {at}"
    del alive[at]


def _value(state: State, alive: list[Pair], shape: tuple[int, ...], dtype: Any) -> Pair:
    """What is written: a number, an array of a shape that broadcasts, or one that is alive, of this type."""
    fits = [
        (at, each)
        for at, each in enumerate(alive)
        if each.np.dtype == dtype and len(each.np.shape) <= len(shape) and _broadcasts(each.np.shape, shape)
    ]
    if fits and state.draw.random() < 0.6:
        at, found = state.draw.choice(fits)
        state.said[-1] += f" by {at}"
        return found
    if state.draw.random() < 0.4:
        number = state.draw.randrange(2)
        state.said[-1] += f" by {number}"
        return Pair(number, number)
    own = tuple(1 if state.draw.random() < 0.2 else n for n in shape)[state.draw.randint(0, len(shape)) :]
    state.said[-1] += " by"
    return _whole(made(state, own, str(dtype)))


def _broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False))


def _writes(function: Callable[[State, list[Pair], Pair], Callable[[Any, int], None]]) -> Any:
    """A line that writes. function: draws, and gives what is done to each of the two arrays; 0: NumPy's, 1: ours.
    Where NumPy refuses to write, ours must, too."""

    def line(state: State, alive: list[Pair]) -> None:
        x = _chosen(state, alive)
        if _is_number(x):
            raise Unfit
        act = function(state, alive, x)
        try:
            act(x.np, 0)
        except ValueError as error:
            assert "read-only" in str(error), error
            try:
                act(x.xp, 1)
            except ValueError as ours:
                assert "read-only" in str(ours), ours
                return
            raise AssertionError("NumPy refuses to write here") from error
        act(x.xp, 1)

    return line


@_writes
def _assign(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    key = key_of(state, x.np.shape)
    state.said[-1] += f" {key}"
    value = _value(state, alive, np.shape(x.np[key]), x.np.dtype)

    def act(a: Any, which: int) -> None:
        a[key] = (value.np, value.xp)[which]

    return act


@_writes
def _in_place(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    sign = state.draw.choice("+-*" if x.np.dtype.kind not in "b" else "|&^")
    state.said[-1] += f" {sign}="
    value = _value(state, alive, x.np.shape, x.np.dtype)
    if x.np.dtype.kind == "b" and not hasattr(value.np, "dtype"):
        value = Pair(bool(value.np), bool(value.np))

    def act(a: Any, which: int) -> None:
        other = (value.np, value.xp)[which]
        if sign == "+":
            a += other
        elif sign == "-":
            a -= other
        elif sign == "*":
            a *= other
        elif sign == "|":
            a |= other
        elif sign == "&":
            a &= other
        else:
            a ^= other

    return act


@_writes
def _part_in_place(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    if x.np.dtype.kind == "b":
        raise Unfit
    key = key_of(state, x.np.shape)
    state.said[-1] += f" {key} +="
    value = _value(state, alive, np.shape(x.np[key]), x.np.dtype)

    def act(a: Any, which: int) -> None:
        a[key] += (value.np, value.xp)[which]

    return act


@_writes
def _masked(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    fits = [each for each in alive if each.np.dtype.kind == "b" and each.np.shape == x.np.shape]
    mask = state.draw.choice(fits) if fits and state.draw.random() < 0.7 else made(state, x.np.shape, "bool")
    if not x.np.ndim:
        raise Unfit

    def act(a: Any, which: int) -> None:
        a[(mask.np, mask.xp)[which]] = 1

    return act


@_writes
def _by_indices(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    if not x.np.ndim or not x.np.shape[0]:
        raise Unfit
    count = len(x.np)
    fits = [
        each
        for each in alive
        if each.np.dtype == np.int64 and each.np.ndim == 1 and ((each.np >= -count) & (each.np < count)).all()
    ]
    if fits and state.draw.random() < 0.6:
        index = state.draw.choice(fits)
    else:
        drawn = np.array([state.draw.randrange(-count, count) for _ in range(state.draw.randint(1, 4))])
        index = Pair(drawn, state.xp.asarray(drawn))
    state.said[-1] += f" {index.np.tolist()}"
    value = _value(state, alive, (len(index.np), *x.np.shape[1:]), x.np.dtype)

    def act(a: Any, which: int) -> None:
        a[(index.np, index.xp)[which]] = (value.np, value.xp)[which]

    return act


@_writes
def _method(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    name = state.draw.choice(["fill", "sort", "real", "shape"])
    if (name == "sort" and (not x.np.ndim or x.np.dtype.kind == "c")) or (name == "shape" and len(alive) > 0):
        raise Unfit
    state.said[-1] += f" {name}"

    def act(a: Any, which: int) -> None:
        if name == "fill":
            a.fill(1)
        elif name == "sort":
            a.sort(axis=0)
        else:
            a.real = 0

    return act


@_writes
def _out(state: State, alive: list[Pair], x: Pair) -> Callable[[Any, int], None]:
    if x.np.dtype.kind == "b":
        raise Unfit
    one, other = (_value(state, alive, x.np.shape, x.np.dtype) for _ in range(2))
    if not hasattr(one.np, "dtype"):
        raise Unfit
    if np.broadcast_shapes(np.shape(one.np), np.shape(other.np)) != x.np.shape:
        raise Unfit  # NumPy's ufuncs broadcast to the shape of out

    def act(a: Any, which: int) -> None:
        (np, state.xp)[which].add((one.np, one.xp)[which], (other.np, other.xp)[which], out=a)

    return act


LINES: list[tuple[str, Callable[[State, list[Pair]], None]]] = [
    *[("index", _view(_index))] * 4, *[("reshape", _view(_reshape))] * 2, ("permute_dims", _view(_permute)),
    *[("along", _view(_along))] * 2, *[("plain", _view(_plain))] * 4, ("new", _new), ("drop", _drop),
    *[("assign", _assign)] * 3, *[("in place", _in_place)] * 3, ("part", _part_in_place), ("mask", _masked),
    ("indices", _by_indices), ("method", _method), ("out", _out),
]  # fmt: skip
