"""Put a class of meshwise in front of that of somebody's Trainer.

Tested in tests/script/test_trainer.py and test_lightning.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.engine.engine import Engine
from meshwise.script.trainers import Add, Share

REFUSED = "mw.distribute(trainer) on {ranks} devices does not support {what}: {instead}."
SAVED = "saved {0}. To resume from this state, call trainer.{1}."


def in_front(front: type, thing: Any, ranks: Any) -> None:
    """Replace the class of an object by a new class that derives from `front` and from the old class, so that methods
    of `front` override those of the old class. ranks: becomes the attribute `meshwise` of the new class."""
    cls = type(thing)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "meshwise": ranks}
    thing.__class__ = type(cls.__name__, (front, cls), names)


@dataclass(eq=False)
class OfTrainer:
    """The state shared by all classes of meshwise that override methods of one Trainer and of its parts."""

    engine: Engine
    trainer: Any
    add: Add
    share: Share

    @property
    def alone(self) -> bool:
        return self.engine.world.size == 1

    @property
    def samples(self) -> int:
        """How many samples this rank's part of the batch has. 1 outside of loops over batches."""
        part = self.engine.part
        return 1 if part is None else part.samples
