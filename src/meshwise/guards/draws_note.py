"""Report draws that `--exact-random` could not make as one device does.

Tested in tests/data/test_exact_random.py.
"""

from __future__ import annotations

from torch import Tensor

from meshwise.engine.engine import Engine


class DrawsNote:
    """Checks after each backward, with `--exact-random`, for draws that could not be made as on one device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def backward_ends(self, mean: Tensor | None, own: Tensor | None) -> None:
        """Report draws of the forward that were not exact."""
        if mean is not None and self._engine.draws is not None:
            self._engine.notify(self._engine.draws.note())


def watch(engine: Engine) -> None:
    """Attach this guard, if the engine runs a script with exact draws."""
    if engine.script and engine.draws is not None:
        engine.events.listen(DrawsNote(engine))
