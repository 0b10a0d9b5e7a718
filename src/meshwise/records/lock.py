"""Who works in a run folder: one launcher at a time holds it, and the system lets go of it when that process is gone.

So a run that was killed with all its processes is seen to be over by whoever reads its folder, and nobody resumes a run
that is still going on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from meshwise.spec.errors import UsageError

if sys.platform != "win32":  # there nobody holds anything
    import fcntl

LOCK, TRIES = "run.lock", 5


class FolderLock:
    """Holds a run folder until it is closed. Raises UsageError where somebody else does.

    claimed: another machine may hold it that was cut off: who has claimed the newest attempt takes it from there.
    """

    def __init__(self, folder: Path, *, claimed: bool = False) -> None:
        self._file: IO[str] | None = None
        if sys.platform == "win32":
            return
        if claimed:
            (folder / LOCK).unlink(missing_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            _take(file)
        except BlockingIOError:
            file.seek(0)
            by = _told(file.read())
            file.close()
            raise UsageError(
                f"{folder}: this run is still going on, {by}. Stop it first, or wait for its end."
            ) from None
        except OSError:  # a file system without locks
            file.close()
            return
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}, file)
        file.flush()
        self._file = file

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()


def _take(file: IO[str]) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):  # for a moment, of somebody who only looks whether it is held
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_abandoned(folder: Path) -> bool:
    """Whether a launcher has held the folder and none does now. False where that cannot be known."""
    if sys.platform == "win32":
        return False
    with contextlib.suppress(OSError), (folder / LOCK).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    return False


def holder_of(folder: Path) -> tuple[str, int] | None:
    """The host and the process of the launcher that holds the folder; None where none is known."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return str(facts["host"]), int(facts["process"])
    return None


def _told(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        facts = json.loads(text)
        since = datetime.fromtimestamp(float(facts["since"])).astimezone()
        return f"in process {int(facts['process'])} on {facts['host']!s:.80} since {since:%Y-%m-%d %H:%M:%S}"
    return "in another process"
