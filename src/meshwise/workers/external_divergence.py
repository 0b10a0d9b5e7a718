"""Detect diverging ranks under foreign launchers such as torchrun and srun.

Each rank logs its verbs, the calls that all ranks must make, in a file that the machine's other ranks can read. A rank
that loses the connection to another rank reports where they diverged.

No process watches the ranks from outside, as our own launcher does: if two different collectives of the same size meet,
nobody notices, and NCCL, which waits, reports nothing before its timeout. Tested in tests/workers/test_divergence.py.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from meshwise.compat.reducer import default_store
from meshwise.spec.world import World
from meshwise.workers import verb_log
from meshwise.workers.divergence import divergence, last_verbs, trail_path
from meshwise.workers.failure import is_communication_error
from meshwise.workers.scratch import made_folder, own
from meshwise.workers.verb_log import read_trail

_owned: list[IO[bytes]] = []


def begin(world: World) -> None:
    """Start to log the calls of this rank that must come in the same order on every rank, such as collectives (see
    `Verb`).

    All ranks of a machine must call this function. It does nothing if the ranks of this machine share no temporary
    folder.
    """
    store, first = default_store(), world.rank - world.local_rank
    if world.local_rank == 0:
        made, owned = made_folder("verbs")
        store.set(f"meshwise/verbs/{first}", str(made))
    folder = Path(store.get(f"meshwise/verbs/{first}").decode())
    if not folder.is_dir():  # the processes of one machine share no files
        return
    _owned.append(owned if world.local_rank == 0 else own(folder))
    ranks = range(first, first + world.local_size)
    verb_log.begin(trail_path(folder, world.rank))
    atexit.register(_ends, folder, world.rank, ranks)
    sys.excepthook = partial(tell, sys.excepthook, folder, ranks)


def tell(before: Callable[..., Any], folder: Path, ranks: Sequence[int], *error: Any) -> None:
    """Show an uncaught exception as usual. If a collective raised it because another rank was lost, also print how the
    calls of this machine's ranks differ, or the last call of each rank.

    before: the exception hook that was set before, which shows the exception.
    folder: the folder in which the ranks log their calls.
    ranks: the ranks of this machine.
    error: the arguments of the exception hook.
    """
    before(*error)
    if is_communication_error(error[1]):
        trails = {rank: read_trail(trail_path(folder, rank)) for rank in ranks}
        text = divergence(trails, [rank for rank in ranks if _mark(folder, rank).exists()]) or last_verbs(trails)
        print(text, end="\n" * bool(text), file=sys.stderr, flush=True)


def _ends(folder: Path, rank: int, ranks: Sequence[int]) -> None:
    """Record that the program of this rank has ended."""
    if folder.is_dir():
        _mark(folder, rank).touch()
        if all(_mark(folder, each).exists() for each in ranks):
            shutil.rmtree(folder, ignore_errors=True)


def _mark(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"
