"""Record a run whose ranks srun, torchrun or mpirun started.

No process watches these ranks from outside. So rank 0 opens the run folder and writes its run.json. What each rank
prints also goes to the log of that rank in the folder. Each rank reports how it ended in a store that all ranks reach
before a process group exists. A rank that lost its connection to the others reads there whether one of them failed or
disappeared.

Without meshwise's own launcher, no run is restarted, a rank that hangs is not named, and output that libraries print
outside Python is not logged. Tested in tests/workers/test_launchers.py and, on a real Slurm, in
tests/workers/test_slurm.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from meshwise.records import folder as names
from meshwise.records.attempts import open_log
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import stop_text
from meshwise.spec.words import ranks_text
from meshwise.workers import failure
from meshwise.workers.environment import ATTEMPT, RUN_FOLDER
from meshwise.workers.failure import Failure
from meshwise.workers.join import rank_context, store_of_ranks

OPENED, ENDED = "opened", "ended"
WAIT, ROUND = 5.0, 0.1  # seconds to wait for other ranks to end, and between two polls


class JoinedRun:
    """One rank's part in the record of a run that was started by srun, torchrun or mpirun."""

    def __init__(self, folder: Path, attempt: int, store: Any) -> None:
        self.folder, self.attempt, self._store, self._over = folder, attempt, store, False
        self._rank, self._size = rank_context().world.rank, rank_context().world.size
        if store is not None:
            os.environ.update({RUN_FOLDER: str(folder), ATTEMPT: str(attempt)})
            log = open_log(folder, self._rank, attempt)
            sys.stdout, sys.stderr = _Both(sys.stdout, log), _Both(sys.stderr, log)

    def ends(self, error: BaseException | None) -> Failure | None:
        """Report how this rank ended. Return the failure that ended the run, if any."""
        if self._over:
            return None
        self._over, gate = True, rank_context().gate
        by_stop = gate.halted and (not isinstance(error, Exception) or failure.is_communication_error(error))
        mine = None if error is None or by_stop else _failure(self._rank, error)
        self._tell(mine)
        chosen = self._chosen(mine)
        if self._rank == 0:
            status, facts = "finished", {}
            if chosen is not None:
                status, facts = "failed", failure.recorded(chosen)
            elif by_stop or gate.stopped_after is not None:
                status, facts = "stopped", {"reason": _stop_reason(gate.signal, gate.stopped_after)}
            said = failure.sentence(chosen, self._size) if chosen is not None else None
            names.end_session(self.folder, status, said, **facts)
        return chosen

    def _tell(self, mine: Failure | None) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, may be gone
                self._store.set(f"{ENDED}/{self._rank}", json.dumps(None if mine is None else asdict(mine)))

    def _chosen(self, mine: Failure | None) -> Failure | None:
        """Return the failure that ended the run, chosen from the reports of all ranks."""
        if self._store is None or (mine is None and self._rank > 0):
            return mine
        told: dict[int, Failure | None] = {self._rank: mine}
        until = time.monotonic() + WAIT
        while len(told) < self._size and time.monotonic() < until:
            try:
                told |= self._known(told)
            except RuntimeError:
                return self._by_record(mine)
            if any(one is not None and one.kind != "victim" for one in told.values()):
                break
            time.sleep(ROUND)
        failures = [one for one in told.values() if one is not None]
        if not failures:
            return None
        first = failure.culprit(failures, self._size)
        missing = sorted(set(range(self._size)) - told.keys())
        return _gone(missing, self._size) if first.kind == "victim" and missing else first

    def _known(self, known: dict[int, Failure | None]) -> Iterator[tuple[int, Failure | None]]:
        for rank in set(range(self._size)) - known.keys():
            if self._store.check([key := f"{ENDED}/{rank}"]):
                facts = json.loads(self._store.get(key))
                yield rank, None if facts is None else Failure(**facts)

    def _by_record(self, mine: Failure | None) -> Failure | None:
        """Return the failure that ended the run, according to run.json: rank 0 has ended, so no rank can read the
        reports of the others."""
        with contextlib.suppress(UsageError):  # this machine may not share the run folder
            last = names.read_run(self.folder)["sessions"][-1]
            if last.get("kind") or last.get("status") in ("finished", "stopped"):
                return mine
        return _gone([0], self._size) if mine is not None and mine.kind == "victim" else mine


def begin(open_run: Callable[[], tuple[Path, int]]) -> JoinedRun:
    """Open the run on rank 0 by calling `open_run`, and send the folder and attempt number to the other ranks.
    Collective.

    open_run: returns the run folder and the number of the attempt.
    """
    world = rank_context().world
    store = store_of_ranks() if world.size > 1 else None
    if store is None:
        return JoinedRun(*open_run(), None)
    if world.rank > 0:
        try:
            told = json.loads(store.get(OPENED))
        except RuntimeError:
            raise WorkerFailed("rank 0 ended before it opened the run folder.", rank=0) from None
        return JoinedRun(Path(told["folder"]), told["attempt"], store)
    folder, attempt = open_run()
    store.set(OPENED, json.dumps({"folder": str(folder.absolute()), "attempt": attempt}))
    return JoinedRun(folder.absolute(), attempt, store)


class _Both:
    """A text stream that also writes everything to the log of a rank."""

    def __init__(self, stream: TextIO, log: BinaryIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not stop training
            self._log.write(text.encode("utf-8", "replace"))
            self._log.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _failure(rank: int, error: BaseException) -> Failure | None:
    if isinstance(error, SystemExit):
        return None if error.code in (0, None) else failure.by_exit(rank, error)
    return failure.by_error(rank, error)


def _gone(ranks: list[int], size: int) -> Failure:
    left = f"{ranks_text(ranks)} of {size} disappeared"
    text = f"{left}: killed, or lost with the machine. See the scheduler's log."
    return Failure(ranks[0], "lost", text, plain=True, time=time.time())


def _stop_reason(number: int, after: tuple[int, int | None] | None) -> str:
    if after is None:
        return stop_text(number)
    step, epoch = after
    return f"{stop_text(number)} after step {step}" + ("" if epoch is None else f" (epoch {epoch})")
