"""Load the faults of `--fault` in a run that has some.

Without faults, this costs nothing. Tested in tests/injection/test_faults.py and tests/faults/test_restarts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwise import injection
from meshwise.spec.faults import Fault

_armed: Any = None


def arm(faults: Sequence[Fault], rank: int, folder: Path | None) -> None:
    """Choose the faults that will be injected in this process: the faults of rank `rank`.

    folder: the run folder, in which each injected fault is recorded.
    """
    global _armed
    mine = [fault for fault in faults if fault.rank == rank]
    _armed = injection.armed.ArmedFaults(mine, folder) if mine else None


def hold(parameters: Callable[[], Iterable[Tensor]]) -> None:
    """Set the function that returns this rank's parameters. The faults `nan` and `bitflip` use it to find a parameter
    whose values they change. Do nothing if the run has no faults."""
    if _armed is not None:
        _armed.parameters = parameters


def watch(recorder: Any) -> None:
    """Make `recorder` inject the faults that `arm` has chosen for this process. Without faults, it stays unchanged."""
    if _armed is not None:
        _armed.watch(recorder)
