"""Hold each rank's memory in the launcher, so that it survives.

What a rank writes there outlives the rank's process, and is gone when the launcher ends.

On Linux this memory has no name in any file system; elsewhere it is a file in a folder that is removed at the end.
Tested in tests/workers/test_rescue.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType

from meshwise.workers.scratch import scratch_folder


class KeptMemory:
    """Memory for each rank of one machine. It outlives the rank's process, and each attempt of the run uses it again.
    It is empty until a rank writes to it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._files: list[int] = []
        self._folder: Path | None = None
        self._ends = contextlib.ExitStack()
        if sys.platform == "linux":
            self._files = [os.memfd_create(f"meshwise-rank{rank}") for rank in range(ranks)]
        else:
            self._folder = self._ends.enter_context(scratch_folder("kept"))
            for rank in range(ranks):
                self.path(rank).touch()

    def path(self, rank: int) -> Path:
        """Return the path at which any process of this machine can open the memory of a rank."""
        if self._folder is None:
            return Path(f"/proc/{os.getpid()}/fd/{self._files[rank]}")
        return self._folder / f"rank{rank}"

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for file in self._files:
            os.close(file)
        self._ends.close()
