"""Find the integration of a Trainer, and override its classes.

Nothing of a Trainer's library is imported. Tested in tests/training/script/test_trainer.py and test_lightning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from torch import nn

from meshwise.training.engine.engine import Engine

TRAINERS = {
    "transformers.trainer": "meshwise.integrations.trainer",
    "lightning.pytorch.trainer.trainer": "meshwise.integrations.lightning",
    "pytorch_lightning.trainer.trainer": "meshwise.integrations.lightning",
}
"""Maps the modules of Trainers that can be distributed to the modules of their `INTEGRATION`."""
Add = Callable[[list[nn.Module]], None]
"""Calls `mw.distribute` for models."""
Share = Callable[[Any], Any]
"""Calls `mw.distribute` for any other object."""


@dataclass(frozen=True)
class Integration:
    """Distributes the Trainers of one library.

    program: the kind of program for which advice is given (see `advice.WORDS`).
    distribute: makes a Trainer work on all ranks, in place. Raises UsageError for features with results that would
        differ on several devices.
    models: returns the models that a Trainer has already.
    join: called before the process joins its run.
    view: what the Trainer's loop sees of a batch (see `mw.distribute`)."""

    program: str
    distribute: Callable[[Any, Engine, Add, Share], Any]
    models: Callable[[Any], list[nn.Module]] = lambda trainer: []
    join: Callable[[], None] = lambda: None
    view: Literal["whole", "rank"] = "rank"


def integrations_of(things: Iterable[Any]) -> dict[int, Integration]:
    """Return the integrations for the Trainers among some objects, by the Trainers' ids."""
    found: dict[int, Integration] = {}
    for thing in things:
        for cls in type(thing).__mro__:
            if cls.__name__ == "Trainer" and cls.__module__ in TRAINERS:
                found.setdefault(id(thing), import_module(TRAINERS[cls.__module__]).INTEGRATION)
    return found


REFUSED = "mw.distribute(trainer) on {ranks} devices does not support {what}: {instead}."
SAVED = "saved {0}. To resume from this state, call trainer.{1}."


def in_front(front: type, thing: Any, ranks: Any) -> None:
    """Replace the class of an object with a new class that derives from `front` and from the old class, so that methods
    of `front` override those of the old class. ranks: becomes the attribute `meshwise` of the new class."""
    cls = type(thing)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "meshwise": ranks}
    thing.__class__ = type(cls.__name__, (front, cls), names)


@dataclass(eq=False)
class OfTrainer:
    """The state shared by all meshwise classes that override methods of one Trainer and of its parts."""

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
