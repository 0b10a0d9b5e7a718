"""Report draws that `--exact-random` could not make as one device does.

Tested in tests/data/test_exact_random.py.
"""

from __future__ import annotations

from torch import Tensor

from meshwise.engine.engine import Engine


class DrawsNote:
    """Checks after each backward whether all random draws of the forward were equal to those of one device
    (`--exact-random`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def backward_ends(self, mean: Tensor | None, own: Tensor | None) -> None:
        """Print a notice if some random draws of the forward differ from the draws on one device.

        mean: None if the backward raised an error. Nothing is printed then.
        """
        if mean is not None and self._engine.draws is not None:
            self._engine.notify(self._engine.draws.note())


def watch(engine: Engine) -> None:
    """Add the guard `DrawsNote` to an engine that runs a script with `--exact-random`. Do nothing for other engines."""
    if engine.script and engine.draws is not None:
        engine.events.listen(DrawsNote(engine))
