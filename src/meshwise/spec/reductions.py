"""List how a loss combines its samples: `reduction=` of jobs and `mw.backward`."""

from __future__ import annotations

REDUCTIONS = ("mean", "sum")
