"""Refuse names and arguments that only NumPy has.

Each refusal says what to write instead.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from meshwise.spec.errors import nearest

INSTEAD = {
    "order": "Arrays are in row-major order. Leave order out. For column-major order, transpose first: x.T.",
    "where": "Pass xp.where(condition, x, other) instead of x, with an `other` that does not change the result.",
    "initial": "Combine the number with the result afterwards, for example by + or xp.maximum.",
    "out": "Write y[...] = {name}(...).",
    "casting": "Cast the result: .astype(dtype).",
    "like": "Leave like out: the namespace decides what kind of array is made.",
    "subok": "Leave subok out: arrays have no subclasses.",
}
"""Argument that only NumPy's functions have -> what to write instead."""
INSTEAD_OF_NAMES = {
    **{name: f"Write xp.{name[3:]}(x[~xp.isnan(x)])." for name in ("nanmedian", "nanquantile", "nanpercentile")},
    **dict.fromkeys(("vectorize", "frompyfunc", "apply_along_axis"), "Write a function that takes whole arrays."),
    "argpartition": "Write xp.argsort(x), or xp.topk(x, k).",
    "partition": "Write xp.sort(x), or xp.topk(x, k).",
    "block": "Join the blocks of each row with xp.concat, and then the rows with xp.concat.",
    "copyto": "Write x[...] = y.",
    "ediff1d": "Write xp.diff(x.reshape(-1)).",
    "place": "Write x[mask] = values.",
    "put": "Write x[indices] = values.",
    "putmask": "Write x[mask] = values.",
}
"""Function that only NumPy has -> what to write instead."""
_ASKED = re.compile(r"\(\) (got an unexpected keyword argument '(\w+)'|takes .* positional|missing |got multiple)")


def missing(where: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an attribute that a namespace or an array does not have."""
    begin, last = f"{where} has no {name!r}", where.rpartition(".")[2]
    if name.startswith("_"):
        return f"{begin}."
    if name in INSTEAD_OF_NAMES:
        return f"{begin}. {INSTEAD_OF_NAMES[name]}"
    if where == "an array" and hasattr(np.ndarray, name):
        return f"{begin}, but a NumPy array does. Write x.numpy().{name}."
    if last == "random" and hasattr(np.random.Generator, name):
        return f"{begin}, which NumPy has. Write xp.asarray(np.random.default_rng(seed).{name}(...))."
    theirs, path = (getattr(np, last), f"np.{last}") if last in ("linalg", "fft") else (np, "np")
    if hasattr(theirs, name):
        return (
            f"{begin}, which NumPy has. Write xp.asarray({path}.{name}(x.numpy(), ...)), or apply your own function "
            "to each shard: mw.map_shards(function, x)."
        )
    return f"{begin}.{nearest(name, known)}"


def told(error: TypeError, name: str, function: Callable[..., Any], first: int = 0) -> TypeError:
    """Return a clearer TypeError for a call that does not fit the signature of `function`."""
    said = str(error)
    match = _ASKED.search(said)
    if match is None or not said.startswith(f"{inspect.unwrap(function).__qualname__}()"):
        return error
    shown = list(inspect.signature(function).parameters.values())[first:]
    by_name = [each.name for each in shown if each.kind is each.KEYWORD_ONLY]
    known = ", ".join([each.name for each in shown if each.name not in by_name] + ["*"] * bool(by_name) + by_name)
    word = match[2]
    if word is None:
        return TypeError(f"{name}: the call must match the arguments ({known}). Arguments after * are keyword-only.")
    instead = INSTEAD.get(word, f"The arguments of this function are ({known}).").format(name=name)
    return TypeError(f"{name}({word}=...): there is no argument {word!r}. {instead}")


def checked(name: str, function: Callable[..., Any], space: Any = None) -> Callable[..., Any]:
    """Wrap a function so that a call with wrong arguments raises a TypeError that says what to write instead."""
    bound = function if space is None else functools.partial(function, space)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return bound(*args, **kwargs)
        except TypeError as error:
            found = told(error, name, function, first=1)
            if found is error:
                raise
            raise found from None

    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    return call
