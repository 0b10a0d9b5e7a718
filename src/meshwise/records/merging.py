"""Merge plain values that several ranks hold of one state.

This module does not import torch.

The values have the form that recovery/values.py writes. Tested in tests/recovery/test_values.py.
"""

from __future__ import annotations

from typing import Any


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
