"""Give a checked program a file system that it may change.

The user's files are not changed.

    written, made, renamed     in a folder of the check; a file that is changed in place is copied there first
    removed                    hidden, by a mark in that folder, for all ranks
    read, listed               from that folder, else from the real files

Python's file functions are replaced, so this works for code in Python (numpy, TensorBoard, pickle, shutil) and for the
libraries in OTHERS. Code in C++ or another program that opens files itself bypasses it; locked_files.py stops its
writes. Caches do not count as files of the user, and are written as usual.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import io
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from meshwise.process.file_view import FileView

Function = Callable[..., Any]
READ = (os.stat, os.lstat, os.access, os.statvfs, os.readlink)
CHANGED = (os.chmod, os.utime, os.truncate, os.mkdir, os.mkfifo)
LINUX = ("getxattr", "listxattr"), ("chown", "setxattr", "removexattr")
NOT_FOLLOWED = ("lstat", "readlink", "mkdir", "mkfifo")
PROFILE = next(kind for kind in torch.profiler.profile.__mro__ if "export_chrome_trace" in vars(kind))
TOKENIZERS = import_module("tokenizers") if find_spec("tokenizers") else None
SCRIPTED: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
OTHERS: tuple[tuple[Any, str, int, str], ...] = (
    (torch, "save", 1, "written"),
    (torch, "load", 0, "seen"),
    (torch.jit, "save", 1, "written"),
    (torch.jit, "load", 0, "seen"),
    (PROFILE, "export_chrome_trace", 1, "written"),
    (safetensors.torch, "save_file", 1, "written"),
    (safetensors.torch, "load_file", 0, "seen"),
    (safetensors.numpy, "save_file", 1, "written"),
    (safetensors.numpy, "load_file", 0, "seen"),
    (safetensors, "safe_open", 0, "seen"),
    (SCRIPTED, "save", 1, "written"),
    (sqlite3, "connect", 0, "changed"),
    *(
        ((TOKENIZERS.Tokenizer, "save", 1, "written"), (TOKENIZERS.Tokenizer, "from_file", 0, "seen"))
        if TOKENIZERS
        else ()
    ),
)
"""Each has (owner, function, index of its path argument, FileView method)."""
LATE: tuple[tuple[str, str, int, str], ...] = (
    ("pyarrow", "memory_map", 0, "seen"),
    ("pyarrow", "OSFile", 0, "opened"),
    ("pyarrow.csv", "read_csv", 0, "seen"),
    ("pyarrow.parquet.core", "read_table", 0, "seen"),
    ("pyarrow.parquet.core", "ParquetFile.__init__", 1, "seen"),
    ("pyarrow.parquet.core", "ParquetWriter.__init__", 1, "written"),
    ("h5py", "File.__init__", 1, "opened"),
)
"""The same, by the name of their module: looked up where the program has loaded it."""
LISTS = vars(glob).values()  # from Python 3.13 on, pathlib's scandir lies in a class there
CLASSES = {owner for owner in (*LISTS, subprocess.Popen) if isinstance(owner, type)}
"""Classes whose functions are replaced, besides those of OTHERS."""
PATHS = ("f", "filename", "path", "database", "source", "where")  # names of that argument


@contextlib.contextmanager
def scratch_files(folder: Path) -> Iterator[None]:
    """Let this process write files without changing the user's files, until the `with` block ends. Written files are
    stored in `folder`. If the process opens a path that it wrote to, it gets the stored file. Caches and system folders
    are written directly. All ranks of a check use the same `folder`."""
    view = FileView(os.path.realpath(folder))
    with replaced(FileFunctions(view), view.temporary):
        yield


@contextlib.contextmanager
def replaced(functions: FileFunctions, temporary: str | None) -> Iterator[None]:
    """Replace Python's file functions by `functions`, until the `with` block ends. temporary: the folder for temporary
    files."""
    pairs = [(original, functions.guarded(original, call)) for original, call in functions.all()]
    _replace({id(original): (original, guarded) for original, guarded in pairs})
    before, tempfile.tempdir = tempfile.tempdir, temporary
    try:
        yield
    finally:
        _replace({id(guarded): (guarded, original) for original, guarded in pairs})
        tempfile.tempdir, functions.ended = before, True


def others() -> Iterator[tuple[Any, str, int, str]]:
    """Yield the items of OTHERS, and of LATE for modules that the program has loaded."""
    yield from OTHERS
    for module in {module.partition(".")[0] for module, *_ in LATE} & {*sys.modules}:
        for name, path, position, use in LATE:
            if name.partition(".")[0] == module and find_spec(name):
                *above, last = path.split(".")
                yield functools.reduce(getattr, above, import_module(name)), last, position, use


def _replace(functions: dict[int, tuple[Function, Function]]) -> None:
    """Replace functions wherever a loaded module or class holds them.

    functions: maps the id of each old function to the old and the new function.
    """
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__name__", "") not in _LEFT]
    classes = {owner for owner, *_ in others() if isinstance(owner, type)}
    for holder in (*modules, *CLASSES | classes):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(holder, name, functions[id(value)][1])
            elif type(value) is staticmethod and id(value.__func__) in functions:
                setattr(holder, name, staticmethod(functions[id(value.__func__)][1]))
    for known in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        known |= {functions[id(each)][1] for each in known if id(each) in functions}


_LEFT = ("posix", "_io", __name__, FileView.__module__)  # imports of modules go through the first two


class FileFunctions:
    """Replacements for Python's file functions. They act on the files of a `FileView`."""

    def __init__(self, view: FileView) -> None:
        self._view, self._inside = view, threading.local()
        self.ended = False
        """Whether `scratch_files` has ended. A replacement that is still called then runs the original function."""

    def all(self) -> Iterator[tuple[Function, Function]]:
        """Yield (function, replacement) for each function to replace, such as os.open. A call os.open(path, flags)
        becomes the call replacement(os.open, path, flags)."""
        yield io.open, self._open
        yield os.open, self._os_open
        read, changed = ([vars(os)[name] for name in names if hasattr(os, name)] for names in LINUX)
        for original in (*READ, *read):
            yield original, functools.partial(self._of_path, self._view.seen)
        for original in (*CHANGED, *changed):
            yield original, functools.partial(self._of_path, self._view.changed)
        yield from ((os.listdir, self._listdir), (os.scandir, self._scandir), (os.getcwd, self._getcwd))
        yield from ((os.chdir, self._chdir), (shutil.rmtree, self._rmtree))
        for original in (os.unlink, os.remove, os.rmdir):
            yield original, self._removed
        yield from ((os.rename, self._rename), (os.replace, self._rename))
        yield from ((os.link, self._link), (os.symlink, self._symlink))
        for owner, name, position, use in others():
            yield vars(owner)[name], functools.partial(self._other, position, use)

    def guarded(self, original: Function, instead: Function) -> Function:
        """Return a replacement for the file function `original`. It calls `instead(original, ...)` with the arguments
        of the call.

        The replacement calls `original` directly in two cases: after `scratch_files` has ended, and if another
        replacement calls it in the same thread. In the second case, the path was redirected already.
        """

        @functools.wraps(original, updated=())
        def call(*arguments: Any, **named: Any) -> Any:
            if self.ended or getattr(self._inside, "on", False):
                return original(*arguments, **named)
            self._inside.on = True
            try:
                return instead(original, *arguments, **named)
            finally:
                self._inside.on = False

        return call

    def _of_path(self, mapped: Function, original: Function, path: Any, *rest: Any, **named: Any) -> Any:
        follow = named.get("follow_symlinks", True) and original.__name__ not in NOT_FOLLOWED
        place = mapped(path, follow, named.get("dir_fd"))
        return original(place, *rest, **(named if place is path else named | _without_fd(named)))

    def _open(self, original: Function, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        changes = set(mode) & set("wax+")
        place = self._view.written(file, keep="w" not in mode) if changes else self._view.seen(file)
        return original(place, mode, *rest, **named)

    def _os_open(
        self, original: Function, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> Any:
        changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        keep = not flags & os.O_TRUNC or bool(flags & os.O_EXCL)
        place = self._view.written(path, at=dir_fd, keep=keep) if changes else self._view.seen(path, at=dir_fd)
        return original(place, flags, mode, dir_fd=dir_fd if place is path else None)

    def _listdir(self, original: Function, path: Any = None) -> Any:
        logical = self._view.logical("." if path is None else path)
        if logical is None or not self._view.differs(logical):
            return original(path if logical is None else self._view.seen(path or "."))
        names = self._view.names(logical)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, original: Function, path: Any = None) -> Any:
        path = "." if path is None else path
        logical = self._view.logical(path)
        place = path if logical is None else self._view.seen(path)
        if logical is None or (place is path and not self._view.differs(logical)) or not os.path.isdir(place):
            return original(place)
        names = self._view.names(logical)
        shown, found = set(names), list[os.DirEntry[str]]()
        for folder in (self._view.files + logical, *self._view.layers(logical)):
            with original(folder) if os.path.isdir(folder) else contextlib.nullcontext(()) as entries:
                found += [entry for entry in entries if entry.name in shown]
                shown -= {entry.name for entry in found}
        return _Entries([_Entry(entry, os.fspath(path)) for entry in sorted(found, key=_in_order(names))])

    def _getcwd(self, original: Function) -> str:
        return str(original()).removeprefix(self._view.files)

    def _chdir(self, original: Function, path: Any) -> None:
        logical = self._view.logical(path)
        is_real = logical is not None and self._view.is_real(logical) and os.path.isdir(logical)
        original(logical if is_real else self._view.seen(path))  # what is read by others than Python lies there

    def _removed(self, original: Function, path: Any, *, dir_fd: int | None = None) -> Any:
        logical = self._view.logical(path, False, dir_fd)
        if logical is None or not os.path.lexists(self._view.place(logical)):
            return original(path if logical is None else self._view.place(logical), dir_fd=dir_fd)
        mine, place, is_real = self._view.files + logical, self._view.place(logical), self._view.is_real(logical)
        is_folder = os.path.isdir(place) and not os.path.islink(place)
        if is_folder != (original.__name__ == "rmdir"):
            raise _error(errno.EISDIR if is_folder else errno.ENOTDIR, path)
        if is_folder and self._view.names(logical):
            raise _error(errno.ENOTEMPTY, path)
        if os.path.lexists(mine):
            original(mine)
        self._view.hide(logical, is_real)

    def _rmtree(self, original: Function, path: Any, *rest: Any, **named: Any) -> Any:
        logical = self._view.logical(path, False)
        if logical is None or not os.path.isdir(self._view.place(logical)):
            return original(self._view.seen(path, False), *rest, **named)
        is_real = self._view.is_real(logical)
        if os.path.lexists(self._view.files + logical):
            original(self._view.files + logical, *rest, **named)
        self._view.hide(logical, is_real)

    def _rename(self, original: Function, src: Any, dst: Any, **named: Any) -> Any:
        source, target = self._view.logical(src, False), self._view.logical(dst, False)
        if (source or target) is None or (source and not os.path.lexists(self._view.place(source))):
            return original(self._view.seen(src, False), dst, **named)
        is_real = [path is not None and self._view.is_real(path) for path in (source, target)]
        if source is not None:
            os.makedirs(os.path.dirname(self._view.files + source), exist_ok=True)
            self._view.copy(source, inside=True)
        to = self._view.written(dst, False)
        if target is not None and os.path.isdir(to) and self._view.names(target):
            raise _error(errno.ENOTEMPTY, dst)
        original(self._view.files + source if source else src, to)
        for path, hidden in zip((source, target), is_real, strict=True):
            self._view.hide(str(path), hidden)

    def _link(self, original: Function, src: Any, dst: Any, **named: Any) -> Any:
        if self._view.logical(dst, False) is None:
            return original(self._view.seen(src), dst, **named)
        target = self._view.changed(dst, False)
        if os.path.lexists(target):
            raise _error(errno.EEXIST, dst)
        shutil.copy2(self._view.seen(src, False), target, follow_symlinks=False)

    def _symlink(self, original: Function, src: Any, dst: Any, *rest: Any, **named: Any) -> None:
        src = self._view.seen(src) if os.path.isabs(src) else src
        place = self._view.changed(dst, False, named.get("dir_fd"))
        original(
            self._view.seen(src) if os.path.isabs(src) else src,
            place,
            *rest,
            **(named if place is dst else named | _without_fd(named)),
        )

    def _other(self, position: int, use: str, original: Function, *given: Any, **named: Any) -> Any:
        if use == "opened":
            mode = named.get("mode", given[position + 1] if len(given) > position + 1 else "r")
            use = "changed" if set(mode) & set("wax+") else "seen"
        mapped = getattr(self._view, use)
        arguments = [mapped(value) if number == position else value for number, value in enumerate(given)]
        return original(*arguments, **{name: mapped(v) if name in PATHS else v for name, v in named.items()})


class _Entry:
    """An entry of a folder's listing, as `os.scandir` returns it. Its `path` lies in the folder that the program
    listed, even if the file is stored elsewhere (see `FileView`)."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        self._entry = entry
        self.name = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path = os.path.join(folder, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries:
    """The result of `os.scandir`: an iterator that can be closed and used with `with`."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing. This method exists because the result of os.scandir has it."""


def _in_order(names: list[str]) -> Callable[[os.DirEntry[str]], int]:
    place = {name: number for number, name in enumerate(names)}
    return lambda entry: place[entry.name]


def _without_fd(named: dict[str, Any]) -> dict[str, Any]:
    return {"dir_fd": None} if "dir_fd" in named else {}


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))
