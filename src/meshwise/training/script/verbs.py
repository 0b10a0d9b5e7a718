"""Tell a program its rank, the number of ranks and its memory.

Other functions let rank 0 do something first or alone.

Each function works on one device, without a launcher, and before `mw.distribute`.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshwise.hardware.memory import peak_bytes, used_bytes
from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text
from meshwise.spec.user_code import user_place
from meshwise.training.process import once, session
from meshwise.transfer import collectives
from meshwise.workers.join import join, rank_context
from meshwise.workers.verb_log import log_verb

MOST = 8  # record the lines of at most this many calls of mw.world_size


def rank() -> int:
    """Return the rank of this process, counted from 0."""
    return rank_context().world.rank


def world_size() -> int:
    """Return the number of ranks in this run. A program that sees whole batches does not need it."""
    size = rank_context().world.size
    if size > 1 and len(session.sized) < MOST:
        session.sized.append(user_place())
    return size


@contextlib.contextmanager
def accumulate() -> Iterator[None]:
    """Return a context manager in which `mw.backward` keeps gradients on their rank, without reducing them.

    All of them are reduced by the next `mw.backward` outside of the context, by `optimizer.step`, or when code reads a
    gradient, as for clipping. Such code must run on every rank.

    In a loop with `mw.checkpoint`, count batches by `enumerate(loader, loader.start)`, because the loop may resume
    inside an epoch. The state is saved only after an optimizer step."""
    engine = session.default_engine()
    before, engine.reduce = engine.reduce, False
    try:
        yield
    finally:
        engine.reduce = before


def is_main() -> bool:
    """Return whether this process is rank 0. Use it for things to be done once, such as a plot or a line in a file.

    Code that all ranks must run together (`mw.backward`, `mw.sum`, a sharded model's forward) must not be under `if
    mw.is_main()`."""
    return rank_context().world.rank == 0


def barrier() -> None:
    """Wait until every rank has reached this call. Collective."""
    log_verb("mw.barrier")
    _wait()


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the body of the `with` statement on rank 0 first, and on the other ranks afterwards. For example, rank 0 can
    download a file that the other ranks then read.

    Collective. If rank 0 raises an error, the other ranks wait until the run ends with that error."""
    log_verb("mw.main_first")
    if not is_main():
        _wait()
    yield
    if is_main():
        _wait()


def print(*values: Any, **options: Any) -> None:
    """Call Python's `print` on rank 0 only. The arguments are computed on every rank, so they may use collectives."""
    session.show(" ".join(map(str, values)))
    if is_main():
        builtins.print(*values, **options)


@dataclass(frozen=True)
class Memory:
    """How much memory of a device this process uses, in bytes.

    allocated: the memory of its tensors. On a CPU, this is the resident memory of the whole process.
    reserved: the memory that torch has taken from the driver, including the memory of tensors. None on a CPU.
    peak: the largest value of `allocated` so far."""

    device: str
    allocated: int
    reserved: int | None
    peak: int

    def __str__(self) -> str:
        reserved = "" if self.reserved is None else f", {bytes_text(self.reserved)} reserved"
        return f"{self.device}: {bytes_text(self.allocated)} allocated{reserved}, peak {bytes_text(self.peak)}"


def memory(device: str | torch.device | None = None) -> Memory:
    """Return how much memory this process uses on `device`. By default, this is the device of this rank.

    `mw.print(mw.memory())` prints a line for rank 0: `cuda:0: 10.2 GiB allocated, 12.0 GiB reserved, peak 11.1 GiB`."""
    name = str(rank_context().world.device if device is None else device)
    reserved = torch.get_device_module(name).memory_reserved(name) if has_streams(name) else None
    return Memory(name, used_bytes(name), reserved, peak_bytes(name))


def empty_cache() -> None:
    """Give memory that torch has reserved, but that no tensor uses, back to the driver for other processes on this
    device.

    This does not speed up the program, because later tensors request memory from the driver again. On a CPU, it does
    nothing."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _wait() -> None:
    join()
    with once.meeting():
        collectives.barrier(collectives.everyone())  # including ranks that split one model
