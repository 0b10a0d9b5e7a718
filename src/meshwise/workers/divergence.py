"""Detect that ranks call different verbs, and name the first difference.

A verb is a call that all ranks of a program make together, in the same order (verb_log.py). One sentence names the
difference, with the lines of the user's code.

If one rank calls another verb than the others, two different collectives may meet: gloo aborts, NCCL waits forever, and
if the collectives' sizes match, the results are silently wrong.

meshwise's launcher compares the ranks' logs. Under other launchers, such as torchrun and srun, no process watches the
ranks from outside: each rank logs in a file that the machine's other ranks can read (`begin`), and a rank that loses
its connection to another rank reports where they diverged.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from meshwise.spec.words import ranks_text
from meshwise.spec.world import World
from meshwise.workers import verb_log
from meshwise.workers.failure import is_communication_error
from meshwise.workers.scratch import made_folder, own
from meshwise.workers.verb_log import VerbTrail, read_trail

INTERVAL = 0.25  # seconds between checks
GRACE = 1.0  # seconds for a rank to report an error, which may be why the rank diverged
ADVICE = (
    "Every rank must make the same calls in the same order. Look for code that depends on the rank, on the rank's "
    "own batches, loss or metric, or on time."
)
_owned: list[IO[bytes]] = []


def trail_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in which a rank logs its verbs."""
    return folder / f"verbs-{rank}"


class DivergenceWatch:
    """Reads the logs of this machine's ranks, and checks that all of them call the same verbs."""

    def __init__(self, folder: Path, ranks: Collection[int]) -> None:
        self._folder, self._ranks = folder, ranks
        self._looked = self._seen = 0.0

    def trails(self) -> dict[int, VerbTrail | None]:
        """Return each rank's log of verbs."""
        return {rank: read_trail(trail_path(self._folder, rank)) for rank in self._ranks}

    def look(self, ended: Collection[int]) -> str:
        """Describe how the ranks' calls differ, if they still do after GRACE seconds or all ranks have ended.
        Otherwise, return ""."""
        now = time.monotonic()
        if len(ended) == len(self._ranks):
            return divergence(self.trails(), ended)
        if now - self._looked < INTERVAL:
            return ""
        self._looked = now
        text = divergence(self.trails(), ended)
        self._seen = (self._seen or now) if text else 0.0
        return text if text and now - self._seen >= GRACE else ""


def divergence(trails: Mapping[int, VerbTrail | None], ended: Collection[int]) -> str:
    """Describe the first difference between the ranks' calls. Return "" if there is none."""
    number = _first_difference(trails, ended)
    if number is None:
        return ""
    told: dict[str, list[int]] = {}
    for rank, trail in sorted(trails.items()):
        told.setdefault(_where(trail, number, rank in ended), []).append(rank)
    parts = [f"{ranks_text(ranks)} {what}" for what, ranks in told.items()]
    return f"Ranks diverged: {'; '.join(parts)}. {ADVICE}"


def last_verbs(trails: Mapping[int, VerbTrail | None]) -> str:
    """Say which call each rank logged last. Return an empty string if no rank has logged any."""
    told: dict[str, list[int]] = {}
    for rank, trail in sorted(trails.items()):
        told.setdefault(trail.verb(trail.count) if trail else "none", []).append(rank)
    if set(told) <= {"none"}:
        return ""
    return f"The last call: {'; '.join(f'{ranks_text(ranks)}: {what}' for what, ranks in told.items())}."


def _first_difference(trails: Mapping[int, VerbTrail | None], ended: Collection[int]) -> int | None:
    """Return the number of the first call that is not the same on all ranks, or None."""
    counts = {rank: trail.count if trail else 0 for rank, trail in trails.items()}
    common, known = min(counts.values()), [trail for trail in trails.values() if trail]
    first = max((trail.oldest for trail in known), default=1)
    if first <= common and _differ(known, common):
        return next(number for number in range(first, common + 1) if _differ(known, number))
    fewest = min((counts[rank] for rank in ended), default=None)
    return fewest + 1 if fewest is not None and max(counts.values()) > fewest >= first - 1 else None


def _differ(trails: Collection[VerbTrail], number: int) -> bool:
    return len({trail.checksum(number) for trail in trails}) > 1


def _where(trail: VerbTrail | None, number: int, ended: bool) -> str:
    if trail is None:
        return "ended" if ended else "has called nothing yet"
    if trail.count < number:
        return trail.left + ("ended" if ended else f"is still at {trail.verb(trail.count)}")
    return f"{trail.left_before(number)}reached {trail.verb(number)}"


def begin(world: World, store: Any) -> None:
    """Start to log the verbs of this rank where the machine's other ranks can read them."""
    first = world.rank - world.local_rank
    if world.local_rank == 0:
        made, owned = made_folder("verbs")
        store.set(f"meshwise/verbs/{first}", str(made))
    folder = Path(store.get(f"meshwise/verbs/{first}").decode())
    if not folder.is_dir():  # the ranks of this machine do not share a file system
        return
    _owned.append(owned if world.local_rank == 0 else own(folder))
    ranks = range(first, first + world.local_size)
    verb_log.begin(trail_path(folder, world.rank))
    atexit.register(_ends, folder, world.rank, ranks)
    sys.excepthook = partial(tell_of_loss, sys.excepthook, folder, ranks)


def tell_of_loss(before: Callable[..., Any], folder: Path, ranks: Sequence[int], *error: Any) -> None:
    """Show an uncaught exception, and if another rank was lost, where the ranks diverged."""
    before(*error)
    if is_communication_error(error[1]):
        trails = {rank: read_trail(trail_path(folder, rank)) for rank in ranks}
        text = divergence(trails, [rank for rank in ranks if _mark(folder, rank).exists()]) or last_verbs(trails)
        print(text, end="\n" * bool(text), file=sys.stderr, flush=True)


def _ends(folder: Path, rank: int, ranks: Sequence[int]) -> None:
    """Record that this rank's program has ended. The last rank to end removes `folder`."""
    if folder.is_dir():
        _mark(folder, rank).touch()
        if all(_mark(folder, each).exists() for each in ranks):
            shutil.rmtree(folder, ignore_errors=True)


def _mark(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"
