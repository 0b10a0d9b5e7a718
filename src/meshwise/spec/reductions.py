"""Name how a loss combines its samples: `reduction=` of jobs and `mw.backward`.

Tested in tests/engine/test_sum_losses.py.
"""

from __future__ import annotations

REDUCTIONS = ("mean", "sum")
