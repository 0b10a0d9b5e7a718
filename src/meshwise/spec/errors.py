"""Define every error of meshwise, as one tree.

    MeshwiseError                  exit code 1
    ├── UsageError                 exit code 2: an impossible request; says what to write instead
    │   ├── PlanError              the plan does not fit the machine or the job
    │   ├── DataError              a data set that is missing, damaged or empty
    │   └── CheckpointError        a saved state that is missing, damaged or belongs to another model
    ├── LossError                  the loss is no longer a number
    │   └── SpoiledError           the parameters are no longer finite: restore an earlier state
    ├── SaveError                  the last state of a run could not be saved
    ├── ReplicaError               replicas that must be equal differ
    ├── TransferError              bytes did not arrive as they were sent
    └── WorkerFailed               a worker raised, was killed or left without reporting success

An error says what was requested, why it is impossible, and what to write instead, with numbers. A `UsageError` is shown
to the user as that one sentence, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise.spec.addresses import address_of, more


class MeshwiseError(Exception):
    """The base class of every error that meshwise raises on purpose."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of a traceback: the error and a line that names a section of docs/."""
        return [f"{type(self).__name__}: {self}", *filter(None, [more(address_of(self))])]


class UsageError(MeshwiseError):
    """Raised if a call, a command or a file of the user asks for something that cannot be done."""

    exit_code = 2


class PlanError(UsageError):
    """The plan does not fit the machine or the job."""


class DataError(UsageError):
    """A data set is missing, damaged or empty."""


class CheckpointError(UsageError):
    """A saved state is missing, damaged or belongs to another model."""


class LossError(MeshwiseError):
    """The loss is no longer a finite number."""


class _OfRanks(MeshwiseError):
    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SpoiledError(_OfRanks, LossError):
    """Parameters are no longer finite.

    ranks: the ranks that hold such parameters.
    """


class SaveError(MeshwiseError):
    """The last state of a run could not be saved."""


class ReplicaError(_OfRanks):
    """Replicas that must be equal are not equal.

    ranks: the ranks that differ from the majority. All ranks if there is no majority.
    """


class TransferError(MeshwiseError):
    """Bytes did not arrive as they were sent, since some path between devices corrupts data."""


class WorkerFailed(MeshwiseError):
    """A worker raised, was killed, or left without reporting success."""

    def __init__(
        self, message: str, *, rank: int | None = None, exit_code: int = 1, failure: Any | None = None
    ) -> None:
        """failure: what is known about the worker that failed first (a `workers.failure.Failure`), or None.
        rank: the failed worker's rank, if `failure` is None."""
        super().__init__(message)
        self.rank = failure.rank if failure is not None else rank
        self.exit_code = exit_code
        self.failure = failure


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'mnist-mlp'?` with the known word that is closest to `word`. Empty if no word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def check_known(what: str, word: object, known: Iterable[str], error: type[UsageError] = UsageError) -> None:
    """Raise `error` if `word` is not in `known`. The message suggests the closest known word.

    what: the name of the option or field, for the message.
    """
    words = tuple(known)  # a tuple, because a `word` from a file may be unhashable, which a set refuses
    if word not in words:
        raise error(f"{what}={word!r} is not known.{nearest(str(word), words)} Use one of {', '.join(words)}.")
