"""Give each rank its view of files that rank 0 writes.

    rank 0          before it first changes a path, keeps a copy or hard link of it, or notes that it was absent
    other ranks     read their own file, or else the kept file, or else the user's file
    torch.save      runs on rank 0 alone; the others read the saved file through a hard link
    subprocess.run  runs on rank 0 alone; the others get its result, and see the files that it has changed

The shared folder has a log of rank 0's changes, and the files that rank 0 keeps (in `0`, or in `1` after a meeting) or
shares.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import OURS, is_users, user_lines, user_place
from meshwise.torch_compat.tree import leaves_of, map_tensors
from meshwise.training.process.session import tell
from meshwise.transfer.reading import meet, together
from meshwise.workers.file_view import parents
from meshwise.workers.scratch_files import FileFunctions, Function

PATIENCE = 60.0  # seconds that a rank waits for rank 0 to reach the same call
SAVES, RUNS = (torch.save, safetensors.torch.save_file), (subprocess.run, subprocess.call, os.system)
NEVER = "{here}: rank 0, last seen at {last}, has not reached {there}. Make that call on every rank alike, or on none."
IN_LOADER = "{here}: a loader's worker writes {path}, of rank 0's samples only. Write it before, or by num_workers=0."
STARTS = "{here}: every rank starts this program. Use subprocess.run, which only rank 0 does, or start it earlier."


def _whole(part: Tensor) -> Tensor:
    """Return the whole tensor that pickling `part` would write. Collective."""
    rebuild, given = part.__reduce_ex__(2)[:2]
    return rebuild(*given)  # type: ignore[no-any-return]


class RankFiles(FileFunctions):
    """The base class of all ranks' views."""

    save: Any
    run: Any

    def __init__(self, folder: str, rank: int, size: int, shared: bool, free: Iterable[str]) -> None:
        super().__init__(f"{folder}/rank{rank}", (folder, *free))
        self._shared, self._rank, self._size, self._alone = folder, rank, size, not shared
        self._epoch, self._process, self._calls, self._absent = 0, os.getpid(), Counter[Any](), set[Any]()
        os.makedirs(f"{folder}/made", exist_ok=True)
        self._log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def call(self) -> str:
        """Return a path for this call's result. It depends on the user's lines and how often they have called."""
        self._calls[lines := user_lines()] += 1
        made = f"{self._shared}/made/{hashlib.md5(repr((lines, self._calls[lines])).encode()).hexdigest()}"
        if self._rank == 0:
            Path(f"{made}.begun").touch()
        return made

    def _note(self, kind: str, path: str) -> None:
        os.write(self._log, (json.dumps([kind, self._epoch, path, user_place()]) + "\n").encode())

    def all(self) -> Iterator[tuple[Function, Function]]:
        yield from (pair for pair in super().all() if pair[0] not in SAVES)
        yield from ((save, self._save) for save in SAVES)
        yield from ((run, self._run) for run in RUNS)
        yield subprocess.Popen.__init__, self._starts

    def _save(self, save: Function, thing: Any, path: Any, *rest: Any, **named: Any) -> None:
        logical = self.logical(path) if isinstance(path, str | os.PathLike) and not self._alone else None
        parts = {id(part): part for part in leaves_of(Tensor, thing) if type(part) not in (Tensor, nn.Parameter)}
        if parts:
            meet(save.__name__)
        with together() if parts else nullcontext():
            if parts and save is not SAVES[0]:  # safetensors needs plain tensors
                thing, parts = map_tensors(lambda each: _whole(each) if id(each) in parts else each, thing), {}
            if logical is None or os.getpid() != self._process:
                save(thing, self.written(path), *rest, **named)
            else:
                self.save(partial(save, thing, path, *rest, **named), logical, parts.values())

    def _is_users(self) -> bool:
        """Return whether the user's code, not a library, calls a replaced function in the script's process."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((OURS, subprocess.__file__)):
            frame = frame.f_back
        return os.getpid() == self._process and is_users(frame.f_code.co_filename)

    def _run(self, run: Function, *given: Any, **named: Any) -> Any:
        alone = self._alone or not self._is_users()
        result = run(*given, **named) if alone else self.run(partial(run, *given, **named))
        if isinstance(result, BaseException):
            raise result
        return result

    def _starts(self, start: Function, *given: Any, **named: Any) -> None:
        if self._rank == 0 and self._is_users():
            tell(STARTS.format(here=user_place()))
        start(*given, **named)


class FirstFiles(RankFiles):
    """The view of rank 0: the real files. The old state of a path is kept before its first change."""

    _said = False

    def seen(self, path: Any, follow: bool = True) -> Any:
        return path

    def place(self, path: str) -> str:
        return path

    def written(self, path: Any, follow: bool = True, keep: bool = False) -> Any:
        self._keep(self.logical(path, follow))
        return path

    def _keep(self, path: str | None, link: bool = False) -> None:
        """Keep the state of a path, if it is not kept yet. link: whether a hard link is enough, without a copy."""
        kept = f"{self._shared}/{self._epoch}{path}"
        if path is None or os.path.lexists(kept) > os.path.isdir(kept) or not self._absent.isdisjoint(parents(path)):
            return
        kind, is_folder = "kept", os.path.isdir(path) and not os.path.islink(path)
        if is_folder and link:
            os.makedirs(kept, exist_ok=True)
            for name in os.listdir(path):
                self._keep(os.path.join(path, name), link)
        elif os.path.lexists(path) and not is_folder:
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            self._give(path, kept, link)
        elif is_folder or os.path.lexists(kept) or not os.path.isdir(os.path.dirname(path)):
            return
        else:
            self._absent.add(path)
            kind = "absent"
        self._note(kind, path)
        if torch.utils.data.get_worker_info() is not None and user_place() and not self._said:
            self._said = True
            print(IN_LOADER.format(here=user_place(), path=path), file=sys.stderr, flush=True)

    def _give(self, path: str, to: str, link: bool = True) -> None:
        """Make `to` a hard link to a file, or a copy. Other ranks see the complete file or none."""
        part = f"{self._shared}/{os.getpid()}-{time.monotonic_ns()}"
        with suppress(OSError):  # if a hard link cannot be made, the file is copied below
            if link:
                os.link(path, part, follow_symlinks=False)
        if not os.path.lexists(part):
            shutil.copy2(path, part, follow_symlinks=False)
        os.rename(part, to)

    def _moved(self, original: Function, *paths: Any, **named: Any) -> None:
        for each in (*paths[:2], *named.values()):
            self._keep(self.logical(each, False), link=True)
        original(*paths, **named)

    _removed = _rename = _link = _moved

    def save(self, save: Callable[[], None], path: str, parts: Iterable[Tensor]) -> None:
        made = self.call()
        self._keep(path, link=True)
        if os.path.isfile(path) and os.stat(path).st_nlink > 1:
            os.unlink(path)  # slower ranks may still read the old file
        try:
            save()
        finally:
            for rank in range(1, self._size) if os.path.isfile(path) else ():
                self._give(path, f"{made}.{rank}")

    def run(self, call: Callable[[], Any]) -> Any:
        made = self.call()
        try:
            result = call()
        except BaseException as error:
            result = error
        self.turn(made, before=True)
        Path(f"{made}.part").write_bytes(pickle.dumps(result))
        os.rename(f"{made}.part", made)
        return result

    def turn(self, call: str, before: bool) -> None:
        """From now on, keep the state of files for ranks that reach `call`. before: whether that call is yet to run."""
        if before:
            self._epoch += 1
            self._absent.clear()
            self._note("turn", call)


class LaterFiles(RankFiles):
    """The view of another rank: its own files, or else the files as they were at the start."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        logs = [f"{self._shared}/log{each}" for each in (0, self._rank)]
        self._read = {os.open(log, os.O_RDONLY | os.O_CREAT): 0 for log in logs}
        self._touched, self._near, self._changed, self._late = (set[str]() for _ in range(4))
        self._turns, self._last = {"": 0}, "the start"
        self._folders, self._held = dict[str, str](), dict[str, tuple[str, str]]()

    def _heard(self) -> int:
        """Read the logs of rank 0 and of this rank's processes. Return how many bytes were read so far."""
        for log, at in self._read.items():
            if (size := os.fstat(log).st_size) > at:
                *lines, part = os.pread(log, size - at, at).split(b"\n")
                self._read[log] = size - len(part)
                for line in lines:
                    self._hear(*json.loads(line))
        return sum(self._read.values())

    def _hear(self, kind: str, epoch: int, path: str, place: str) -> None:
        self._last = self._last if kind == "own" else place
        if kind == "turn":
            self._turns[path] = epoch
        else:
            self._touched.add(path)
            self._near.update(parents(path))
            self._folders.clear()
            self._changed.update([path] if kind != "own" else ())
            self._absent.update([(epoch, path)] if kind == "absent" else ())

    def original(self, path: str) -> str | None:
        self._heard()
        for epoch, kept in enumerate(self.layers(path)[:-1], self._epoch):
            if any((epoch, each) in self._absent for each in parents(path)):
                return None
            if os.path.lexists(kept) and not (os.path.isdir(kept) and os.path.isdir(path)):
                return kept
        return super().original(path)

    def layers(self, path: str) -> list[str]:
        return [*(f"{self._shared}/{epoch}{path}" for epoch in range(self._epoch, len(self._turns))), path]

    def _is_untouched(self, path: str) -> bool:
        """Return whether this path, its parents and its contents are unchanged."""
        self._heard()
        folder, _, name = os.path.join(os.getcwd(), path).rpartition(os.sep)
        real = self._folders.get(folder) or self._folders.setdefault(folder, os.path.realpath(folder))
        if name in ("", ".", "..") or real.startswith(self.files) or os.path.islink(path):
            return False
        return f"{real}/{name}" not in self._near and self._touched.isdisjoint(parents(f"{real}/{name}"))

    def seen(self, path: Any, follow: bool = True) -> Any:
        if isinstance(path, str | Path) and self._is_untouched(os.fspath(path)):
            return path
        logical = self.logical(path, follow)
        if logical in self._held and os.path.lexists(self.place(logical)):
            return self._wait(*self._held[logical])
        return super().seen(path, follow)

    def differs(self, path: str) -> bool:
        self._heard()
        return path in self._near

    def touch(self, path: str, keep: bool) -> None:
        if path not in self._touched:
            self._note("own", path)
        if path in self._held:
            if keep and os.path.lexists(self.files + path):
                shutil.copy2(self._wait(*self._held[path]), self.files + path)
            self._late.add(self._held.pop(path)[0])
        for made in filter(os.path.lexists, [*self._late]):
            os.unlink(made)
            self._late.remove(made)

    def save(self, save: Callable[[], None], path: str, parts: Iterable[Tensor]) -> None:
        for part in parts:
            _whole(part)
        Path(self.written(path)).touch()  # so that a listing of the folder shows the file
        self._held[path] = f"{self.call()}.{self._rank}", user_place()

    def _wait(self, made: str, there: str) -> str:
        """Wait until rank 0 has made the file `made` in the call at the line `there`. Return `made`."""
        end = time.monotonic() + PATIENCE
        while not os.path.lexists(made):
            self._heard()
            if time.monotonic() > end and not os.path.exists(f"{os.path.splitext(made)[0]}.begun"):
                raise UsageError(NEVER.format(here=user_place(), last=self._last, there=there))
            time.sleep(0.002)
        return made

    def run(self, call: Callable[[], Any]) -> Any:
        made = self._wait(self.call(), user_place())
        self.turn(made, before=False)
        return pickle.loads(Path(made).read_bytes())

    def turn(self, call: str, before: bool) -> None:
        """Show the files as rank 0 had them when it reached `call`. before: whether `call` has not run yet."""
        self._heard()
        self._epoch = self._turns.get(call, self._epoch)
        for path in () if before else sorted(self._changed, reverse=True):
            self.touch(path, keep=False)
            for mine in (self.files + path, self.mark(path)):
                with suppress(OSError):
                    (os.rmdir if os.path.isdir(mine) else os.unlink)(mine)

    def read(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call that reads files. Repeat it if rank 0 notes a change meanwhile."""
        while True:
            heard = self._heard()
            try:
                result = call()
            except OSError:
                if self._heard() == heard:
                    raise
                continue
            if self._heard() == heard:
                return result
            if hasattr(result, "close"):
                result.close()
