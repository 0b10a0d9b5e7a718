"""Name functions of arrays, and list them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = dict[str, Callable[..., Any]]
"""Functions by their names."""


def named(rule: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """Set the name and the docstring of a function that was made by a factory, and return the function."""
    rule.__name__ = rule.__qualname__ = name
    rule.__doc__ = doc
    return rule


def by_name(*rules: Callable[..., Any]) -> Table:
    """Return a table of the given functions by their `__name__`."""
    return {rule.__name__: rule for rule in rules}
