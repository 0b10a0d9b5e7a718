"""Lock a run folder for one launcher, until its process ends.

The operating system releases the lock when the process ends. Therefore a reader of the folder can tell whether a run
was killed with all its processes, and a run that is still going on cannot be resumed. A folder of states
(`mw.checkpoint`) is locked in the same way, by rank 0 of one program.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from meshwise.records.files import read_json
from meshwise.spec.errors import UsageError

LOCK, STATE_LOCK, PREDICTIONS_LOCK, TRIES = "run.lock", "state.lock", "predict.lock", 5
REFUSALS = {
    LOCK: "this run is still going on, {by}. Stop it first, or wait for its end.",
    STATE_LOCK: "another program saves its state in this folder, {by}. Give mw.checkpoint another folder, or wait "
    "until that program has ended.",
    PREDICTIONS_LOCK: "another process is writing these predictions, {by}. Wait for its end, or name another --out.",
}


@dataclass(frozen=True)
class Work:
    """The work of a process that holds or wants a `FolderLock`.

    job: a name that is the same for every attempt at this work, such as a run folder or a scheduler's job. "" if
        unknown.
    attempt: the number of the start, counted from 1.
    """

    job: str = ""
    attempt: int = 0


class FolderLock:
    """A lock on a folder, held until `close` or the end of the process. On a file system without locks, nothing is
    locked.

    The constructor raises UsageError if another process holds the lock, and names that process. There are two
    exceptions, in which the lock is taken from the other process.

    work: the work for which the folder is locked. The lock is taken from an earlier attempt of the same job, because
        that attempt may hang or be cut off from the network.
    claimed: whether this machine has claimed the newest attempt of the run (records/claims.py). If True, the lock is
        taken from any other process.
    """

    def __init__(self, folder: Path, name: str = LOCK, *, work: Work | None = None, claimed: bool = False) -> None:
        self._file: IO[str] | None = None
        work = work or Work()
        if claimed:
            (folder / name).unlink(missing_ok=True)
        file = _opened(folder, name, work)
        if file is None:
            return
        file.truncate(0)
        facts = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time(), **asdict(work)}
        json.dump(facts, file)
        file.flush()
        self._file = file
        _held.add(self)

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Release all locks in a forked child, such as a loader worker, because the child may outlive this process."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def _opened(folder: Path, name: str, work: Work) -> IO[str] | None:
    """Open and lock a folder's lock file. None if the file system has no locks.
    Raises UsageError if it is held."""
    file = (folder / name).open("a+", encoding="utf-8")
    try:
        _take(file)
    except BlockingIOError:
        file.seek(0)
        text = file.read()
        file.close()
        if not _is_earlier(text, work):
            raise UsageError(f"{folder}: {REFUSALS[name].format(by=_holder(text))}") from None
        (folder / name).unlink(missing_ok=True)  # the other process keeps its lock on this file: lock a new one instead
        return _opened(folder, name, work)
    except OSError:
        file.close()
        return None
    return file


def _take(file: IO[str]) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):  # a process that checks the lock holds it for a moment
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_abandoned(folder: Path) -> bool:
    """Return whether a launcher held the folder before and no launcher holds it now. False if this cannot be known."""
    return _holders_text(folder) == ""


def refuse_held(folder: Path) -> None:
    """Raise UsageError if a run's launcher holds the folder. The folder is not locked by this call."""
    if text := _holders_text(folder):
        raise UsageError(f"{folder}: {REFUSALS[LOCK].format(by=_holder(text))}")


def _holders_text(folder: Path) -> str | None:
    """Return what the launcher that holds the folder has written, "" if none holds it, None if this cannot be known."""
    with contextlib.suppress(OSError, UnicodeEncodeError), (folder / LOCK).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock
        except BlockingIOError:
            return file.read() or "?"
        return ""
    return None


def holder_of(folder: Path) -> tuple[str, int] | None:
    """Return the host and the process id of the launcher that holds the folder, or held it last.

    Returns None if this is unknown.
    """
    facts = read_json(folder / LOCK)
    host, process = facts.get("host"), facts.get("process")
    return (str(host), process) if host and isinstance(process, int) else None


def _holder(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        facts = json.loads(text)
        since = datetime.fromtimestamp(float(facts["since"])).astimezone()
        of = f" (run {facts['job']!s:.200})" if facts.get("job") else ""
        return f"in process {int(facts['process'])} on {facts['host']!s:.80} since {since:%Y-%m-%d %H:%M:%S}{of}"
    return "in another process"


def _is_earlier(text: str, work: Work) -> bool:
    """Return whether the text in a lock file names an earlier attempt of the same job."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        facts: Mapping[str, Any] = json.loads(text)
        return bool(work.job) and facts["job"] == work.job and int(facts["attempt"]) < work.attempt
    return False
