"""Name functions of arrays, and list them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def named(rule: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """Give a function that is made for several names its own name and docstring, and return it."""
    rule.__name__ = rule.__qualname__ = name
    rule.__doc__ = doc
    return rule


def by_name(*rules: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return a table of functions by their names."""
    return {rule.__name__: rule for rule in rules}
