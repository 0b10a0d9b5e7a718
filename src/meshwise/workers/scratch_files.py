"""Give a checked program a file system that it may change.

The user's files are not changed.

    written, made, renamed     in a folder of the check; a file that is changed in place is copied there first
    removed                    hidden, by a mark in that folder, for all ranks
    read, listed               from that folder, else from the real files

Python's file functions are replaced, so this works for code in Python (numpy, TensorBoard, pickle, shutil) and for the
libraries in FUNCTIONS. Code in C++ or another program that opens files itself bypasses it; file_view.py stops its
writes. Caches do not count as files of the user, and are written as usual.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwise.workers.file_view import FileView

Function = Callable[..., Any]
FUNCTIONS: dict[tuple[str, int], tuple[str, ...]] = {
    ("opened", 0): ("io.open", "os.open", "pyarrow.OSFile"),
    ("opened", 1): ("h5py.File.__init__",),
    ("seen", 0): (
        *("os.stat", "os.lstat", "os.access", "os.statvfs", "os.readlink", "os.getxattr", "os.listxattr"),
        *("torch.load", "torch.jit.load", "tokenizers.Tokenizer.from_file"),
        *("safetensors.safe_open", "safetensors.torch.load_file", "safetensors.numpy.load_file"),
        *("pyarrow.memory_map", "pyarrow.csv.read_csv", "pyarrow.parquet.core.read_table"),
    ),
    ("seen", 1): ("pyarrow.parquet.core.ParquetFile.__init__",),
    ("changed", 0): (
        *("os.chmod", "os.chown", "os.utime", "os.truncate", "os.mkdir", "os.setxattr", "os.removexattr"),
        "sqlite3.connect",
    ),
    ("changed", 1): ("os.symlink",),
    ("written", 1): (
        *("torch.save", "torch.jit.save", "torch.jit.RecursiveScriptModule.save"),
        *("torch.profiler.profile.export_chrome_trace", "tokenizers.Tokenizer.save"),
        *(
            "safetensors.torch.save_file",
            "safetensors.numpy.save_file",
            "pyarrow.parquet.core.ParquetWriter.__init__",
        ),
    ),
    ("_listed", 0): ("os.listdir", "os.scandir"),
    ("_removed", 0): ("os.unlink", "os.remove", "os.rmdir", "shutil.rmtree"),
    ("_rename", 0): ("os.rename", "os.replace"),
    ("_link", 0): ("os.link",),
    ("_chdir", 0): ("os.chdir",),
    ("_getcwd", 0): ("os.getcwd",),
}
"""Functions to replace, by (method that maps the path or replaces the function, index of the path argument)."""
NEEDED = ("safetensors", "tokenizers")
"""Packages to import if they are installed. In other packages, functions are replaced if the program loaded them."""
PATHS = (
    "f",
    "file",
    "filename",
    "path",
    "database",
    "source",
    "where",
    "dst",
)  # possible names of the path argument
NOT_FOLLOWED = ("lstat", "readlink", "mkdir", "symlink")
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LISTS = vars(glob).values()  # since Python 3.13, pathlib calls scandir through a class in glob
CLASSES = {owner for owner in (*LISTS, subprocess.Popen) if isinstance(owner, type)}
"""Classes whose functions are replaced, besides those of FUNCTIONS."""


@contextlib.contextmanager
def scratch_files(folder: Path) -> Iterator[None]:
    """Let this process write files without changing the user's files, until the `with` block ends. Written files are
    stored in `folder`. If the process opens a path that it wrote to, it gets the stored file. Caches and system folders
    are written directly. All ranks of a check use the same `folder`."""
    view = FileFunctions(os.path.realpath(folder))
    with replaced(view, view.temporary):
        yield


@contextlib.contextmanager
def replaced(functions: FileFunctions, temporary: str | None) -> Iterator[None]:
    """Replace Python's file functions with `functions`, until the `with` block ends. temporary: the folder for
    temporary files."""
    pairs = [(original, functions.guarded(original, call)) for original, call in functions.all()]
    _replace({id(original): guarded for original, guarded in pairs})
    before, tempfile.tempdir = tempfile.tempdir, temporary
    try:
        yield
    finally:
        _replace({id(guarded): original for original, guarded in pairs})
        tempfile.tempdir, functions.ended = before, True


def _owned() -> Iterator[tuple[Any, str, str, int]]:
    """Yield (owner, name, use, position) of each function of FUNCTIONS that exists."""
    for (use, position), paths in FUNCTIONS.items():
        for owner, _, name in (path.rpartition(".") for path in paths):
            if owner.partition(".")[0] in (*NEEDED, *sys.modules):
                with contextlib.suppress(ImportError, AttributeError):
                    found = pkgutil.resolve_name(owner)
                    owners = [each for each in getattr(found, "__mro__", (found,)) if name in vars(each)]
                    yield from ((each, name, use, position) for each in owners[:1])


def _replace(functions: dict[int, Function]) -> None:
    """Replace functions in loaded modules and classes. functions: from ids to replacements."""
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__name__", "") not in _LEFT]
    classes = {owner for owner, *_ in _owned() if isinstance(owner, type)}
    for holder in (*modules, *CLASSES | classes):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(holder, name, functions[id(value)])
            elif type(value) is staticmethod and id(value.__func__) in functions:
                setattr(holder, name, staticmethod(functions[id(value.__func__)]))
    known = os.supports_follow_symlinks
    known |= {functions[id(each)] for each in known if id(each) in functions}


_LEFT = (
    "posix",
    "_io",
    __name__,
    FileView.__module__,
)  # modules to leave alone; the import system uses the first two


class FileFunctions(FileView):
    """A view of files, and replacements for Python's file functions that act on it."""

    def __init__(self, folder: str, free: Iterable[str] = ()) -> None:
        super().__init__(folder, free)
        self._inside = threading.local()
        self.ended = False
        """Whether `scratch_files` has ended. A replacement that is still called then runs the original function."""

    def all(self) -> Iterator[tuple[Function, Function]]:
        """Yield (function, replacement) for each function to replace, such as os.open."""
        for owner, name, use, position in _owned():
            of_path = functools.partial(self._of_path, use, position)
            yield vars(owner)[name], getattr(self, use) if use.startswith("_") else of_path

    def guarded(self, original: Function, instead: Function) -> Function:
        """Return a replacement for the file function `original`."""

        @functools.wraps(original, updated=())
        def call(*arguments: Any, **named: Any) -> Any:
            if self.ended or getattr(self._inside, "on", False):
                return original(*arguments, **named)
            if any(name.endswith("dir_fd") and value is not None for name, value in named.items()):
                raise NotImplementedError(f"os.{original.__name__} with dir_fd is unavailable here. Pass a whole path.")
            self._inside.on = True
            try:
                return instead(original, *arguments, **named)
            finally:
                self._inside.on = False

        return call

    def read(self, call: Callable[[], Any]) -> Any:
        """Call `call`, which reads files. Return its result."""
        return call()

    def _of_path(self, use: str, position: int, original: Function, *given: Any, **named: Any) -> Any:
        if use == "opened":
            rest = given[position + 1 :]
            use = _use(rest[0] if rest else named.get("flags", named.get("mode", "r")))
        follow = named.get("follow_symlinks", True) and getattr(original, "__name__", "") not in NOT_FOLLOWED
        mapped = getattr(self, use)

        def call() -> Any:
            arguments = [mapped(value, follow) if at == position else value for at, value in enumerate(given)]
            return original(*arguments, **{n: mapped(v, follow) if n in PATHS else v for n, v in named.items()})

        paths = [*given[position : position + 1], *(named[name] for name in PATHS if name in named)]
        again = use == "seen" and any(isinstance(each, str | bytes | os.PathLike) for each in paths)
        return self.read(call) if again else call()  # a stream can be read only once

    def _listed(self, original: Function, path: Any = None) -> Any:
        return self.read(functools.partial(self._list, original, "." if path is None else path))

    def _list(self, original: Function, path: Any) -> Any:
        logical, place = self.logical(path), self.seen(path)
        if logical is None or not os.path.isdir(place) or (place is path and not self.differs(logical)):
            return original(place)
        names, entries = self.names(logical), dict[str, os.DirEntry[str]]()
        if original.__name__ == "listdir":
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names
        for folder in (*reversed(self.layers(logical)), self.files + logical):
            with original(folder) if os.path.isdir(folder) else contextlib.nullcontext(()) as found:
                entries |= {entry.name: entry for entry in found}
        return _Entries(functools.partial(_Entry, folder=path), [entries[name] for name in names if name in entries])

    def _getcwd(self, original: Function) -> str:
        return str(original()).removeprefix(self.files)

    def _chdir(self, original: Function, path: Any) -> None:
        logical = self.logical(path)
        is_real = logical is not None and os.path.isdir(logical) and self.real(logical) == logical
        original(logical if is_real else self.seen(path))  # non-Python code must see the real directory

    def _removed(self, original: Function, path: Any, *rest: Any, **named: Any) -> None:
        logical = self.logical(path, False)
        if logical is None or not os.path.lexists(self.place(logical)):
            return original(self.seen(path, False), *rest, **named)  # type: ignore[no-any-return]
        mine = self.written(path, False)
        if not os.path.lexists(mine):
            Path(mine).touch()  # a stand-in for the file, so that the call below raises its usual errors
        if original.__name__ == "rmdir":
            self.copy(logical, inside=True)  # copy the contents: rmdir must fail unless the folder is empty
        original(mine, *rest, **named)
        self.hide(logical)

    def _rename(self, original: Function, src: Any, dst: Any) -> None:
        source, target = self.logical(src, False), self.logical(dst, False)
        if source is not None and not os.path.lexists(self.place(source)):
            return original(self.seen(src, False), dst)  # type: ignore[no-any-return]
        if target is not None and os.path.isdir(self.place(target)):
            self.copy(target, inside=True)
        mine, to = self.changed(src, False), self.written(dst, False)
        if source is not None:
            self.copy(source, inside=True)
        original(mine, to)
        for path in filter(None, (source, target)):
            self.hide(path)
        return None

    def _link(self, original: Function, src: Any, dst: Any) -> None:
        original(self.changed(src, False), self.changed(dst, False))


def _use(mode: str | int) -> str:
    """Return how a file opened by this mode, or by these flags, is used: "seen", "written" or "changed" in place."""
    if isinstance(mode, int):
        is_new = mode & os.O_TRUNC and not mode & os.O_EXCL
        mode = "r" if not mode & CHANGES else "w" if is_new else "a"
    return "seen" if set(mode).isdisjoint("wax+") else "written" if "w" in mode else "changed"


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


class _Entries(map):  # type: ignore[type-arg]
    """The result of `os.scandir`: an iterator that can be closed and used with `with`."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__
