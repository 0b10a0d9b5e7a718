"""Warn when several ranks write one file, with the user's line.

A script on one device opens its log, picture or checkpoint once. On several ranks, each rank opens it, and the last one
wins, rows come twice, or the file is torn. Each worker tells the launcher which files the user's code creates or
appends to (seen by a Python audit hook and a wrapper of torch.save, which opens files in C++); the launcher compares.
Not noticed: files that other C++ or Rust libraries open by themselves, and files that loader workers open.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meshwise.spec.user_code import place, user_frame
from meshwise.workers.file_view import free_folders

MOST = 1000
"""The largest number of paths that a worker reports, since a program may write a new file in every step."""
CREATES = os.O_CREAT | os.O_APPEND | os.O_TRUNC
_NOBODYS = re.compile(r"(/\.[^/]|/__pycache__/|\.lock$|\.pyc$)")  # caches, settings, bytecode and locks
_EVENTS = "events.out.tfevents."

Tell = Callable[[str, str], None]


class FileWatch:
    """Reports each file that the user's code writes in a worker from now on, with the source line that writes it."""

    def __init__(self, tell: Tell, *, ignored: Iterable[str] = ()) -> None:
        """tell: called once for each file that the user's code writes, with its path and the source line that writes
        it. ignored: folders whose files are never reported."""
        self._ignored = tuple(each + os.sep for each in (*map(os.path.realpath, ignored), *free_folders()))
        self._temporary = os.path.realpath(tempfile.gettempdir()) + os.sep  # before the watch: `gettempdir` opens files
        self._tell, self._told, self._process = tell, set[str](), os.getpid()
        sys.addaudithook(lambda event, arguments: self._opened(*arguments) if event == "open" else None)

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls torch.save and also reports the path that it writes."""

        @functools.wraps(save)
        def looked_at(obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
            if isinstance(f, str | os.PathLike):
                self._written(f)
            save(obj, f, *arguments, **keywords)

        return looked_at

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        if flags & CREATES and flags & (os.O_WRONLY | os.O_RDWR) and isinstance(path, str | bytes | os.PathLike):
            self._written(path)

    def _written(self, path: str | bytes | os.PathLike[Any]) -> None:
        if os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):  # the watch must never make the program fail
            real = os.path.realpath(os.fsdecode(path))
            if real in self._told or len(self._told) >= MOST or self._is_ignored(real):
                return
            where = self._place(real)
            if where:
                self._told.add(real)
                self._tell(real, where)

    def _place(self, path: str) -> str:
        frame = user_frame()
        if frame is None and _EVENTS in path:  # opened by TensorBoard's thread, while the program waits
            frame = user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
        return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)

    def _is_ignored(self, path: str) -> bool:
        temporary = path.startswith(self._temporary) and not Path(path).is_relative_to(Path.cwd())
        if temporary or path.startswith(self._ignored) or _NOBODYS.search(path):
            return True
        with contextlib.suppress(OSError):
            return not stat.S_ISREG(Path(path).stat().st_mode)
        return False


class WrittenFiles:
    """The launcher's record of which ranks write which files."""

    def __init__(self) -> None:
        self._writers: dict[Path, set[int]] = {}
        self._said = False

    def add(self, rank: int, path: str, where: str) -> str:
        """Record that a rank writes a file.
        Return a warning for the first file that several ranks write, else ""."""
        file = Path(path).parent if _EVENTS in path else Path(path)
        writers = self._writers.setdefault(file, set())
        writers.add(rank)
        if self._said or len(writers) < 2:
            return ""
        self._said = True
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        ranks = " and ".join(map(str, sorted(writers)))
        return (
            f"{where}: ranks {ranks} each write {shown}, but one device writes once. "
            "Write under `if mw.is_main():`, or with mw.save."
        )
