"""Encode state as plain values and named tensors, and decode it.

The encoded state contains no code, so reading it runs no code.

JSON has no tuples, no keys other than text, and no non-finite numbers. Such a value is written as an object with one
entry, such as `{"$tuple": [...]}`. A tensor is written as `{"$tensor": "model/0.weight"}`. A tensor that occurs twice
(tied parameters) is named after its first occurrence.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.spec.errors import UsageError

_LISTS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size", deque: "$deque"}
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter", defaultdict: "$dict"}
_MAKE: dict[str, Callable[[Any], Any]] = {
    **{word: kind for kind, word in _LISTS.items()},
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$float": float,
    "$complex": lambda parts: complex(*parts),
    "$bytes": base64.b64decode,
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
    "$numpy": lambda facts: np.array(facts[1], np.dtype(facts[0]))[()],
}


def encoded(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return `tree` as JSON values, and its tensors by name. Raises UsageError for a value that cannot be encoded."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def take(tensor: Tensor, path: tuple[str, ...]) -> Any:
        if id(tensor) not in names:
            name = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in path)
            while name in tensors:  # one dict may have the keys 1 and "1"
                name += "'"
            names[id(tensor)], tensors[name] = name, tensor
        return {"$tensor": names[id(tensor)]}

    return _encoded(tree, (), take), tensors


def _encoded(value: Any, path: tuple[str, ...], take: Callable[[Tensor, tuple[str, ...]], Any]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return take(value, path)
    if kind is list or kind in _LISTS:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        parts = [_encoded(item, (*path, str(n)), take) for n, item in enumerate(items)]
        return parts if kind is list else {_LISTS[kind]: parts}
    if kind in _DICTS:
        pairs = [(key, _encoded(item, (*path, str(key)), take)) for key, item in value.items()]
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {_DICTS[kind]: [[_encoded(key, (*path, "key"), take), item] for key, item in pairs]}
    return _encoded_atom(value, kind, path, take)


def _encoded_atom(value: Any, kind: type, path: tuple[str, ...], take: Callable[[Tensor, tuple[str, ...]], Any]) -> Any:
    if kind is float:
        return {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [_encoded(part, path, take) for part in (value.real, value.imag)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        return {"$numpy": [value.dtype.str, value.tolist()]}
    raise UsageError(
        f"the state cannot be saved: {'.'.join(path) or 'it'} is a {kind.__module__}.{kind.__qualname__}. A checkpoint "
        "can store tensors, numbers, text, and lists and dicts of these. Give that object a method state_dict()."
    )


def decoded(values: Any, give: Callable[[str], Any]) -> Any:
    """Restore a tree from the JSON values that `encoded` returned. give: returns the tensor of a name."""
    if isinstance(values, list):
        return [decoded(item, give) for item in values]
    if not isinstance(values, dict):
        return values
    word: str = next(iter(values), "")
    if not word.startswith("$"):
        return {key: decoded(item, give) for key, item in values.items()}
    inside = values[word]
    return give(inside) if word == "$tensor" else _MAKE[word](decoded(inside, give))


def merged(values: list[Any]) -> Any:
    """Merge several ranks' copies of one tree. Each entry of a dict is taken from the first rank that has it."""
    values = [value for value in values if value != {}] or values
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    if isinstance(first, dict) and "$dict" in first:
        pairs = [dict(zip(map(str, (k for k, _ in v["$dict"])), v["$dict"], strict=True)) for v in _dicts(values)]
        keys = {name: pair[0] for each in reversed(pairs) for name, pair in each.items()}
        every = {name: merged([each[name][1] for each in pairs if name in each]) for name in keys}
        numbered = all(isinstance(key, int) for key in keys.values())
        order = sorted(keys, key=lambda name: keys[name]) if numbered else keys
        return {"$dict": [[keys[name], every[name]] for name in order]}
    if isinstance(first, dict):
        dicts = _dicts(values)
        return {k: merged([each[k] for each in dicts if k in each]) for k in dict.fromkeys(k for d in dicts for k in d)}
    if isinstance(first, list):
        lists = [value for value in values if isinstance(value, list) and len(value) == len(first)]
        return [merged(list(items)) for items in zip(*lists, strict=True)]
    return first


def _dicts(values: list[Any]) -> list[dict[str, Any]]:
    word = "$dict" in values[0]
    return [value for value in values if isinstance(value, dict) and ("$dict" in value) == word]
