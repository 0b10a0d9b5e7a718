"""Compare what ranks give `mw.log`: the launcher names differences from rank 0.

A loss over one rank's part of the batch looks right, but differs from the loss on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Values = Mapping[str, float]


class LoggedValues:
    """Compares the values that different ranks pass to the same call of `mw.log`, such as the second call at line 7 of
    train.py. The values of each rank are compared with the values of the rank that came first."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], tuple[int, Values]] = {}
        self._said: set[str] = set()

    def add(self, rank: int, where: str, call: int, values: Values) -> str:
        """Compare the values that a rank logs with the values of the first rank that logged them.

        where: the source line.
        call: how often this line was called.

        Returns a warning if the values differ, but only once per source line. Otherwise, returns an empty string.
        """
        other, first = self._first.setdefault((where, call), (rank, values))
        names = [name for name, value in values.items() if name in first and not _same(value, first[name])]
        if not names or where in self._said:
            return ""
        self._said.add(where)
        shown = " and ".join(f"{of[names[0]]:.6g} on rank {at}" for at, of in sorted([(other, first), (rank, values)]))
        more = f" ({', '.join(names[1:])} too)" if names[1:] else ""
        return (
            f"{where}: mw.log gets {names[0]} {shown}{more}, but writes only rank 0's. It depends on the rank's own "
            "samples. Log what mw.backward returns, or mw.sum(total) / mw.sum(count)."
        )


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
