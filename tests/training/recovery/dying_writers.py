"""Ranks that save, each in a process of its own, of which one is killed before a line of its choice; and harm to files.

For tests/training/recovery/test_writing.py and bench/checkpoint_kills.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from meshwise.records.checkpoints import MANIFEST, PART, name_of, prune
from meshwise.spec.errors import CheckpointError
from meshwise.training.recovery.loading import load, whole
from meshwise.training.recovery.tensor_files import SMALL, as_bytes, deal, held, laid_out, views
from meshwise.training.recovery.values import encoded
from meshwise.training.recovery.writing import Deal, Writing

OF_THE_PROTOCOL = ("training/recovery/writing.py", "training/recovery/tensor_files.py", "records/checkpoints.py")


class FolderStore:
    """A store for processes of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, text: str) -> None:
        beside = self._folder / f".{key.replace('/', '-')}"
        beside.write_text(text)
        beside.rename(self._folder / key.replace("/", "-"))

    def check(self, keys: list[str]) -> bool:
        return all((self._folder / key.replace("/", "-")).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return (self._folder / key.replace("/", "-")).read_bytes()


def state(step: int) -> dict[str, Any]:
    return {f"w{n}": torch.full((SMALL // 4,), float(step)) for n in range(3)} | {"step": step}


def writing(rank: int, step: int, folder: Path, store: FolderStore, ranks: int = 2) -> Writing:
    """What `rank` of several, which hold the same, writes."""
    values, tensors = encoded(state(step))
    shapes = {name: held(tensor) for name, tensor in tensors.items()}
    dealt = Deal((), shapes, deal([shapes] * ranks))
    beginning, places, size = laid_out(dealt.parts[rank], shapes)
    buffer = torch.empty(size - len(beginning), dtype=torch.uint8)
    for part, at in places.items():
        source = views(tensors[part.name])[part.box]
        begin = at - len(beginning)
        buffer[begin : begin + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
    facts, part_folder = {"step": step, "attempt": 1}, folder / (name_of(step, 1) + PART)
    content = [(f"rank{rank}.safetensors", beginning, as_bytes(buffer))]
    return Writing(rank, ranks, f"save{step}", part_folder, content, dealt, facts, values, store)


def in_a_process(own: Writing, dies_at: int | None, count: Path | None = None, keep: int = 1) -> int:
    """Write, and remove what is older, in a process of its own, which is killed before it comes to the line of this
    number."""
    pid = os.fork()
    if pid:
        return pid
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(OF_THE_PROTOCOL):
            return None
        if event == "line" and frame.f_code.co_name != "_awaited":  # it waits for as long as it likes
            lines += 1
            if lines == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with contextlib.suppress(BaseException):
        sys.settrace(trace)
        own.run()
        if own.rank == 0 and not own.said:
            prune(own.folder.parent, keep=keep)
        sys.settrace(None)
        if count is not None:
            count.write_text(str(lines))
    os._exit(0)


def ended(pids: list[int], seconds: float) -> None:
    """Wait for the processes; who is not done after so many seconds is killed, as the launcher does."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def saved_by(
    ranks: int, folder: Path, step: int, victim: int | None = None, at: int | None = None, keep: int = 1
) -> list[int]:
    """Ranks save, of which one dies, and the first keeps so many states. Returns how many lines each ran."""
    words = folder / f"board-{step}-{victim}-{at}"
    words.mkdir(parents=True)
    every = [writing(rank, step, folder / "checkpoint", FolderStore(words), ranks) for rank in range(ranks)]
    counts = [words / f"count{rank}" for rank in range(ranks)]
    pids = [in_a_process(own, at if own.rank == victim else None, counts[own.rank], keep) for own in every]
    if victim is None:
        ended(pids, 30)
    else:
        ended([pids.pop(victim)], 30)
        ended(pids, 0.02)
    return [int(path.read_text()) if path.exists() else 0 for path in counts]


def begun(folder: Path, ranks: int) -> None:
    """One checkpoint, of step 1, lies in the folder and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    saved_by(ranks, folder, 1)


def found(folder: Path) -> int | None:
    """The step of the newest whole state, whose values are those of that step and no other; None where there is none.

    Raises AssertionError for a mixture.
    """
    try:
        newest = load(folder / "checkpoint")
    except CheckpointError:
        return None
    tree = whole(newest.tree)
    assert tree["step"] == newest.saved.step, f"a mixture: {tree}"
    assert all(tree[name].equal(value) for name, value in state(tree["step"]).items() if name != "step"), tree
    return newest.saved.step


def _flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(len(content) * share), len(content) - 1)] ^= 1
    path.write_bytes(content)


def _zeros(path: Path, begin: float, end: float) -> None:
    content = bytearray(path.read_bytes())
    first, last = int(len(content) * begin), int(len(content) * end)
    content[first:last] = bytes(last - first)
    path.write_bytes(content)


def _exchange(one: Path, other: Path) -> None:
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])


def _cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def harms(folder: Path) -> dict[str, Callable[[], object]]:
    """Every kind of damage to every file of the newest of the two checkpoints in a folder, by name."""
    older, newest = sorted(path for path in (folder / "checkpoint").iterdir() if path.is_dir())
    names = sorted(path.name for path in newest.iterdir())
    done: dict[str, Callable[[], object]] = {}
    for name in names:
        path = newest / name
        for share in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
            done[f"bit at {share:.0%}: {name}"] = lambda path=path, share=share: _flip(path, share)
        for share in (0.0, 0.25, 0.5, 0.9):
            done[f"cut to {share:.0%}: {name}"] = lambda path=path, share=share: _cut(path, share)
        for begin, end in ((0.0, 1.0), (0.4, 0.6), (0.9, 1.0)):
            done[f"zeros {begin:.0%} to {end:.0%}: {name}"] = lambda p=path, b=begin, e=end: _zeros(p, b, e)
        done[f"a byte more: {name}"] = lambda path=path: path.write_bytes(path.read_bytes() + b"x")
        done[f"missing: {name}"] = lambda path=path: path.unlink()
        done[f"a folder: {name}"] = lambda path=path: (path.unlink(), path.mkdir())
        done[f"stale copy: {name}"] = lambda path=path: shutil.copy(older / path.name, path)
        for other in names[: names.index(name)]:
            done[f"swapped: {name}, {other}"] = lambda path=path, other=other: _exchange(path, newest / other)
    done["all stale: the older one's files under the newer name"] = lambda: (
        shutil.rmtree(newest),
        shutil.copytree(older, newest),
    )
    done["renamed"] = lambda: newest.rename(newest.with_name("step-00000009.1"))
    done["emptied"] = lambda: (shutil.rmtree(newest), newest.mkdir())
    done["manifest's rest of the other"] = lambda: (newest / MANIFEST).write_text(
        (newest / MANIFEST).read_text().replace('"step":2', '"step":1')
    )
    return done
