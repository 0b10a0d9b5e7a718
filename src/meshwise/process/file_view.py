"""Redirect the files of a checked program to the check's folder.

The files that the program wrote lie there; all other files stay where they are.

scratch_files.py applies this view to Python's file functions. Tested in tests/process/test_scratch_files.py.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text
from meshwise.workers.written_files import CACHES

LINKS = 40  # followed one after the other, as in Linux
IN_MEMORY = ("", ":memory:")  # names that sqlite knows, and that are no files


def free_folders() -> list[str]:
    """Return the folders in which programs may write directly, because they hold no files of the user: system folders,
    caches, and folders of meshwise.

    A folder that contains the current folder is left out.
    """
    found = ["/dev", "/proc", "/sys", *(os.environ[name] for name in CACHES if name in os.environ)]
    found += glob.glob(os.path.expanduser("~/.*/")) + glob.glob(os.path.join(tempfile.gettempdir(), "meshwise-*/"))
    here = os.path.realpath(os.getcwd()) + os.sep
    return [folder for folder in map(os.path.realpath, found) if not here.startswith(folder + os.sep)]


class FileView:
    """A view of the file system in which the user's files are never changed in place. Changed files are kept in
    `folder`, where each hides the real file of the same path.

    A path outside `folder`, with symbolic links followed, is called a logical path.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self.files, self._gone = folder, folder + "/files", folder + "/gone"
        self.temporary = folder + "/tmp"  # for sockets too: what binds them asks no function of ours
        for each in (self.files, self._gone, self.temporary):
            os.makedirs(each, exist_ok=True)
        self._free = (*(each + os.sep for each in free_folders()), folder + os.sep)

    def logical(self, path: Any, follow: bool = True, at: int | None = None) -> str | None:
        """Return the logical path of `path`. Return None if the program is to use `path` unchanged.

        follow: whether to follow a link at the end of the path.
        at: the file descriptor of the folder to which `path` is relative. None for the current folder.
        """
        if not isinstance(path, str | bytes | os.PathLike) or os.fsdecode(path) in IN_MEMORY:
            return None
        text = os.fsdecode(path)
        text = os.path.abspath(text if at is None else os.path.join(os.readlink(f"/proc/self/fd/{at}"), text))
        for _ in range(LINKS):
            if text.startswith(self.files + os.sep):
                text = text[len(self.files) :]
            if (text + os.sep).startswith(self._free):
                return None
            link = next((each for each in _parents(text, follow) if os.path.islink(self.place(each))), None)
            if link is None:
                break
            target = os.path.join(os.path.dirname(link), os.readlink(self.place(link)))
            text = os.path.normpath(target + text[len(link) :])
        return text

    def _mark(self, path: str) -> str:
        return os.path.join(self._gone, hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest())

    def is_real(self, path: str) -> bool:
        """Return whether a real file exists at a logical path, and the view does not hide it."""
        return os.path.lexists(path) and not (
            os.listdir(self._gone) and any(os.path.lexists(self._mark(each)) for each in _parents(path))
        )

    def place(self, path: str) -> str:
        """Return the path at which the file of a logical path is stored: the real path, or a path inside the view's
        folder. If there is no such file, return the path inside the view's folder."""
        mine = self.files + path
        return path if not os.path.lexists(mine) and self.is_real(path) else mine

    def seen(self, path: Any, follow: bool = True, at: int | None = None) -> Any:
        """Return the path from which to read the file that a program names `path`. follow, at: as in `logical`."""
        logical = self.logical(path, follow, at)
        if logical is None or not (os.path.lexists(self.files + logical) or os.path.lexists(logical)):
            return path  # the error names the path that was asked for
        place = self.place(logical)
        return path if at is None and place == os.path.abspath(os.fsdecode(path)) else place

    def written(self, path: Any, follow: bool = True, at: int | None = None, *, keep: bool = False) -> Any:
        """Return the path at which to write the file that a program names `path`.

        keep: whether to copy the file there first, with its contents.
        follow, at: as in `logical`.
        """
        logical = self.logical(path, follow, at)
        if logical is None:
            return path
        mine, folder = self.files + logical, os.path.dirname(logical)
        if not os.path.lexists(mine):
            if os.path.isdir(self.place(folder)):
                os.makedirs(self.files + folder, exist_ok=True)
            elif not os.path.lexists(folder):
                return path
            if self.is_real(logical) and (keep or os.path.isdir(logical)):
                self.copy(logical)
        return mine

    def changed(self, path: Any, follow: bool = True, at: int | None = None) -> Any:
        """Return the path at which to change a part of the file that a program names `path`. The file is copied there
        first."""
        return self.written(path, follow, at, keep=True)

    def copy(self, path: str, *, inside: bool = False) -> None:
        """Copy a real file into the view's folder.

        path: the logical path.
        inside: whether to copy a folder with everything that the view shows in it. If not, only an empty folder is
        made.
        """
        mine = self.files + path
        if os.path.isdir(self.place(path)) and not os.path.islink(self.place(path)):
            os.makedirs(mine, exist_ok=True)
            for name in self.names(path) if inside else ():
                self.copy(os.path.join(path, name), inside=True)
        elif not os.path.lexists(mine):
            self._refuse_large(path)
            shutil.copy2(path, mine, follow_symlinks=False)

    def _refuse_large(self, path: str) -> None:
        size, free = os.lstat(path).st_size, shutil.disk_usage(self._folder).free
        if size > free // 2:
            raise UsageError(
                f"the script opens {path} for writing. meshwise check lets it write to a copy instead, but "
                f"{bytes_text(size)} are more than half of the {bytes_text(free)} that are free in {self._folder}. "
                "Open it for reading, or set TMPDIR to a folder with room."
            )

    def names(self, path: str) -> list[str]:
        """Return the names that the view shows in a folder. path: the folder's logical path."""
        mine = self.files + path
        names = os.listdir(mine) if os.path.isdir(mine) else []
        if self.is_real(path) and os.path.isdir(path):
            shown = set(os.listdir(path)) - set(names)
            names += [name for name in shown if not os.path.lexists(self._mark(os.path.join(path, name)))]
        return names

    def differs(self, path: str) -> bool:
        """Return whether the view may show other names in a folder than the real folder has. path: the folder's logical
        path."""
        return os.path.isdir(self.place(path)) and (os.path.isdir(self.files + path) or bool(os.listdir(self._gone)))

    def hide(self, path: str, is_real: bool) -> None:
        if is_real:
            Path(self._mark(path)).touch()


def _parents(path: str, itself: bool = True) -> Iterator[str]:
    """Yield the parents of an absolute path from the root down: `/a`, `/a/b` and so on. itself: whether to yield the
    path itself, too."""
    parts = path.split(os.sep)
    return (os.sep.join(parts[:end]) for end in range(2, len(parts) + itself))
