"""Several names in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str]) -> str:
    """The first three of `names`, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
