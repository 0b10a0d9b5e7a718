"""Convert values to JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any, not_finite: type[str] | None = None) -> Any:
    """Convert dataclasses, mappings and sequences to dicts and lists, at any depth.

    JSON has no infinity and no NaN. Such numbers become None, or a text such as `inf` if `not_finite` is str.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): json_value(item, not_finite) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item, not_finite) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if not_finite is None else not_finite(value)
    return value
