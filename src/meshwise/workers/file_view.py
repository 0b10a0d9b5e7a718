"""Redirect what a checked program writes to the check's folder.

The program reads these files there; all other files stay in place.

scratch_files.py applies this view to Python's file functions. Code that bypasses them (C++, Rust, other programs) fails
if it would change a file of the user, provided that Linux supports Landlock, which restricts writes (`lock_files`).
Interface: docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CACHES = (
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
LINKS = 40  # maximum number of symbolic links to follow in a row, as in Linux
TEMPORARY = tempfile.gettempdir()
"""Where the launcher has its folder. Inside a check, programs have another folder for temporary files."""
IN_MEMORY = ("", ":memory:")  # names of sqlite databases that are not files
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system call numbers of Landlock, equal on all processors
_VERSION = 1  # the flag LANDLOCK_CREATE_RULESET_VERSION
_BENEATH = 1  # the rule type LANDLOCK_RULE_PATH_BENEATH
_NO_NEW_PRIVS = 38  # PR_SET_NO_NEW_PRIVS in linux/prctl.h
_RIGHTS = sum(1 << bit for bit in (1, 4, 5, 7, 8, 10, 12, 13, 14))
"""Landlock's bits of the restricted rights: write or truncate files; make, remove or move files, folders and links."""
_OLDEST = 3  # the first Landlock version with all of these rights (Linux 6.2)


def free_folders() -> list[str]:
    """Return the folders in which programs may write directly, because they hold no files of the user: system folders,
    caches, and folders of meshwise.

    A folder that contains the current folder is left out.
    """
    found = ["/dev", "/proc", "/sys", *(os.environ[name] for name in CACHES if name in os.environ)]
    found += glob.glob(os.path.expanduser("~/.*/"))
    found += [each for folder in {TEMPORARY, tempfile.gettempdir()} for each in glob.glob(f"{folder}/meshwise-*/")]
    here = os.path.realpath(os.getcwd()) + os.sep
    return [folder for folder in map(os.path.realpath, found) if not here.startswith(folder + os.sep)]


class FileView:
    """A view of the file system for a program that must not change the user's files. A file that the program changes is
    stored in `folder`, but the program still finds the file at its usual path.

    This usual path is called the logical path. It is an absolute path outside of `folder`, with symbolic links
    followed.
    """

    def __init__(self, folder: str, free: Iterable[str] = ()) -> None:
        """free: files and folders, besides `free_folders`, that the program uses as they are."""
        self.files, self._gone, self.temporary = (f"{folder}/{name}" for name in ("files", "gone", "tmp"))
        for each in (
            self.files,
            self._gone,
            self.temporary,
        ):  # programs use `temporary` directly, so it must exist
            os.makedirs(each, exist_ok=True)
        self._free = tuple(each + os.sep for each in (*free_folders(), *map(os.path.realpath, free), folder))

    def logical(self, path: Any, follow: bool = True) -> str | None:
        """Return the logical path of the file that a program means by `path` (see `FileView`). Symbolic links are
        followed, also links that the program has made.

        Returns None if the program may use `path` as it is. This holds for system folders and caches, for names that
        are no files (such as sqlite's ":memory:"), and for file descriptors.

        follow: whether to follow a link if the last component of `path` is one.
        """
        if not isinstance(path, str | bytes | os.PathLike) or os.fsdecode(path) in IN_MEMORY:
            return None
        text = os.path.abspath(os.fsdecode(path))
        for _ in range(LINKS):
            if text.startswith(self.files + os.sep):
                text = text[len(self.files) :]
            if (text + os.sep).startswith(self._free):
                return None
            link = next((each for each in parents(text, follow) if os.path.islink(self.place(each))), None)
            if link is None:
                break
            target = os.path.join(os.path.dirname(link), os.readlink(self.place(link)))
            text = os.path.normpath(target + text[len(link) :])
        return text

    def add_free(self, path: str) -> None:
        """Let the program use a file, or the files in a folder, as they are from now on."""
        self._free += (os.path.realpath(path) + os.sep,)

    def mark(self, path: str) -> str:
        """Return the path of the mark that hides the user's file at this logical path."""
        return os.path.join(self._gone, hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest())

    def original(self, path: str) -> str | None:
        """Return where the user's file at this logical path is stored, or None if there was none."""
        return path if os.path.lexists(path) else None

    def real(self, path: str) -> str | None:
        """Return where the user's file at this logical path is stored. None if there is none, or if the program has
        removed it: then it still exists outside of this view."""
        found = self.original(path)
        hidden = found and os.listdir(self._gone) and any(os.path.lexists(self.mark(each)) for each in parents(path))
        return None if hidden else found

    def touch(self, path: str, keep: bool) -> None:
        """Called before the program changes a file at a logical path. keep: whether some of its contents stay."""

    def layers(self, path: str) -> list[str]:
        """Return the folders that may hold the user's files in the folder at this logical path, newest first."""
        return [path]

    def place(self, path: str) -> str:
        """Return where the file at the logical path `path` is stored now. If the program has written the file, or if
        there is none, this is a path in this view's folder. Otherwise it is the user's file."""
        mine = self.files + path
        return mine if os.path.lexists(mine) else self.real(path) or mine

    def seen(self, path: Any, follow: bool = True) -> Any:
        """Return the path that a program has to open to read `path`: its changed copy, if any, or the user's file.

        follow: whether to follow a link if the last component of `path` is one.
        """
        logical = self.logical(path, follow)
        place = "" if logical is None else self.place(logical)
        if logical is None or not (os.path.lexists(place) or os.path.lexists(logical)):
            return path  # a missing file: the error must name the requested path
        return path if place == os.path.abspath(os.fsdecode(path)) else place

    def written(self, path: Any, follow: bool = True, keep: bool = False) -> Any:
        """Return the path that a program has to open to write `path`. It lies in this view's folder, so that the user's
        file is not changed. Paths that need no redirection (see `logical`) are returned unchanged.

        follow: whether to follow `path` itself if it is a link.
        keep: whether the program keeps some of the old contents, as in appending. If so, the user's file is copied
            first.
        """
        logical = self.logical(path, follow)
        if logical is None:
            return path
        mine, folder = self.files + logical, os.path.dirname(logical)
        self.touch(logical, keep)
        if not os.path.lexists(mine):
            if os.path.isdir(self.place(folder)):
                os.makedirs(self.files + folder, exist_ok=True)
            elif not os.path.lexists(folder):
                return path
            if (real := self.real(logical)) and (keep or os.path.isdir(real)):
                self.copy(logical)
        return mine

    def changed(self, path: Any, follow: bool = True) -> Any:
        """Copy the user's file at `path`, if it is not copied yet, and return the path of the copy, which the program
        may change in place."""
        return self.written(path, follow, keep=True)

    def copy(self, path: str, *, inside: bool = False) -> None:
        """Copy a file or folder of the user into the folder with the program's files, unless it is there already.

        path: the logical path (see `FileView`).
        inside: whether to copy all contents of a folder, with the program's changes. Otherwise only an empty folder is
            made.
        """
        self.touch(path, keep=True)
        mine, place = self.files + path, self.place(path)
        if os.path.isdir(place) and not os.path.islink(place):
            os.makedirs(mine, exist_ok=True)
            for name in self.names(path) if inside else ():
                self.copy(os.path.join(path, name), inside=True)
        elif not os.path.lexists(mine):
            shutil.copy2(place, mine, follow_symlinks=False)
            # The file was changed during the copy, and its earlier version is stored elsewhere now: copy that.
            if self.original(path) != place:
                os.unlink(mine)
                self.copy(path)

    def names(self, path: str) -> list[str]:
        """Return the names that the program sees in a folder. These are the names of files that the program has written
        there, and of the user's files. Files that the program has removed are left out.

        path: the logical path of the folder.
        """
        names = dict.fromkeys(os.listdir(path) if os.path.isdir(path) else ())  # keeps the order of `os.listdir`
        for folder in (*self.layers(path), self.files + path):
            names |= dict.fromkeys(sorted(os.listdir(folder)) if os.path.isdir(folder) else ())
        return [name for name in names if os.path.lexists(self.place(os.path.join(path, name)))]

    def differs(self, path: str) -> bool:
        """Return whether a folder may have other contents for the program than on the disk, because the program has
        written or removed files. The answer may be True although the contents are the same.

        path: the logical path of the folder (see `FileView`).
        """
        return os.path.isdir(self.files + path) or bool(os.listdir(self._gone))

    def hide(self, path: str) -> None:
        """Hide the user's file or folder at a logical path from the program."""
        self.touch(path, keep=False)
        if self.original(path) is not None:
            Path(self.mark(path)).touch()


def parents(path: str, itself: bool = True) -> Iterator[str]:
    """Yield the parents of an absolute path from the root down: `/a`, `/a/b` and so on. itself: whether to yield the
    path itself, too."""
    parts = path.split(os.sep)
    return (os.sep.join(parts[:end]) for end in range(2, len(parts) + itself))


def can_lock() -> bool:
    """Check whether this system supports Landlock."""
    return _system(_CREATE, None, 0, _VERSION) >= _OLDEST


def lock_files(folders: Iterable[str]) -> None:
    """Let this thread, and processes that it starts, write only below `folders` from now on. This cannot be undone."""
    rules = _system(_CREATE, struct.pack("Q", _RIGHTS), 8, 0)
    for folder in folders:
        with contextlib.suppress(OSError):
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            _system(_ADD, rules, _BENEATH, struct.pack("=Qi", _RIGHTS, opened), 0)
            os.close(opened)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _system(_RESTRICT, rules, 0)
    os.close(rules)


def _system(number: int, *arguments: bytes | int | None) -> int:
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *values))
