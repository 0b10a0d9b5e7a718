"""Perturb communication at random, so that races show.

A quiet run hides races. Here ranks and streams are delayed at random, and a buffer that an exchange writes holds NaN
until the program has waited for the exchange.

The functions of `torch.distributed` are wrapped, where Python calls them by that name (as `fully_shard` and meshwise
do). An asynchronous exchange (`async_op=True`, `isend`, `irecv`) gets copies of its buffers. The program's
buffer for the result holds NaN until the exchange's `wait` or future ends; then the result is copied in. Two kinds of
mistakes are noted: a buffer that changed during an exchange, and an exchange for which nobody has waited.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.spec.user_code import user_place
from meshwise.torch_compat.collectives import as_bytes
from meshwise.torch_compat.driver import hold_stream

PARTS = "all_gather all_gather_into_tensor all_gather_single reduce_scatter reduce_scatter_tensor reduce_scatter_single"
WRITES_AND_READS: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("all_reduce", "broadcast"), (0, 0)),
    **dict.fromkeys((*PARTS.split(), "all_to_all", "all_to_all_single"), (0, 1)),
    "isend": (None, 0),
    "irecv": (0, None),
    "barrier": (None, None),
}
"""Maps a function of torch.distributed to the indices of the argument written and the argument sent (None: nothing)."""
OFTEN, LATE = 0.2, 0.002  # chance of a delay before or after an exchange, and its greatest length in seconds
SELDOM, VERY_LATE = 0.04, 0.05  # the same for a longer delay, whose chance is included in OFTEN
BYTE = 0xFF  # fills uint8 buffers: if they hold the bytes of floats, most floating dtypes read them as NaN


class Perturbed:
    """Delays the communication of this process at random, and collects the races that this reveals. The delays are
    determined by `seed` and `rank`."""

    def __init__(self, seed: int, rank: int) -> None:
        self.races: list[str] = []
        """One sentence for each race: the function that communicates, its source line, and the program's mistake."""
        self._random, self._open = random.Random(f"{seed}/{rank}"), list[_Exchange]()

    def note(self, what: str) -> None:
        """Record a race, described by the text `what`, unless the same text was recorded before."""
        if what not in self.races:
            self.races.append(what)

    def delay(self) -> None:
        """Delay this process and its current CUDA stream at random: usually not at all, sometimes by up to 50 ms."""
        draw, share = self._random.random(), self._random.random()
        seconds = share * (VERY_LATE if draw < SELDOM else LATE if draw < OFTEN else 0.0)
        if seconds:
            time.sleep(seconds)
            hold_stream(seconds)

    def call(self, name: str, real: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch.distributed with random delays."""
        self.delay()
        if name in ("isend", "irecv") or kwargs.get("async_op"):
            writes, reads = (None if at is None else args[at] for at in WRITES_AND_READS[name])
            return self.held(name, writes, reads, lambda w, r: real(*_instead(args, name, w, r), **kwargs))
        found = real(*args, **kwargs)
        self.delay()
        return found

    def held(self, name: str, writes: Any, reads: Any, begin: Callable[[Any, Any], Any]) -> Any:
        """Begin an asynchronous exchange, and return its handle."""
        exchange = _Exchange(self, f"{name} at {user_place() or 'meshwise'}", writes, reads)
        work = begin(exchange.hidden, exchange.sent)
        if work is None:  # this rank is not in the group
            exchange.settle()
            return None
        exchange.work = work
        self._open.append(exchange)
        return exchange

    def under_way(self) -> list[str]:
        """Return the names of the asynchronous exchanges that the program has begun, but not waited for."""
        return [each.name for each in self._open if not each.settled]


class _Exchange:
    """The handle that the program gets for an asynchronous exchange, in place of torch's handle."""

    def __init__(self, owner: Perturbed, name: str, writes: Any, reads: Any) -> None:
        self._owner, self.name, self.work, self.settled = owner, name, None, False
        self._writes, self._reads = _tensors(writes), [] if reads is writes else _tensors(reads)
        self.sent = None if reads is None else _like(reads, [t.detach().clone() for t in _tensors(reads)])
        self.hidden = self.sent if reads is writes else _like(writes, [t.detach().clone() for t in self._writes])
        for tensor in self._writes:
            _spoil(tensor)

    def wait(self, *arguments: Any) -> Any:
        self._owner.delay()
        found = self.work.wait(*arguments)  # type: ignore[attr-defined]
        self.settle()
        return found

    def get_future(self) -> Any:
        def ended(done: Any) -> Any:
            found = done.value()
            self._owner.delay()
            self.settle()
            return self._writes if isinstance(found, list) else found

        return self.work.get_future().then(ended)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["work"], name)

    def settle(self) -> None:
        """Copy the received data into the program's tensors, because the exchange has ended."""
        if self.settled:
            return
        self.settled = True
        with torch.no_grad():
            for tensor, result in zip(self._writes, _tensors(self.hidden), strict=True):
                if not _is_spoilt(tensor):
                    self._owner.note(f"{self.name}: its buffer was written before the exchange ended")
                tensor.detach().copy_(result)
                _spoil(result)
            # An exchange in place has no `_reads`: its only buffer was checked above.
            for tensor, before in zip(self._reads, _tensors(self.sent), strict=False):
                if not torch.equal(as_bytes(tensor), as_bytes(before)):
                    self._owner.note(f"{self.name}: its data was changed before the exchange ended")


def _tensors(value: Any) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


def _like(value: Any, tensors: list[Tensor]) -> Any:
    return None if value is None else tensors[0] if isinstance(value, Tensor) else tensors


def _spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)
        elif tensor.dtype == torch.uint8:
            tensor.detach().fill_(BYTE)


def _is_spoilt(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.detach().isnan().all())
    return tensor.dtype != torch.uint8 or bool((tensor.detach() == BYTE).all())


def _instead(args: Sequence[Any], name: str, writes: Any, reads: Any) -> list[Any]:
    found = list(args)
    for at, value in zip(WRITES_AND_READS[name], (writes, reads), strict=True):
        if at is not None:
            found[at] = value
    return found


def open_exchanges() -> list[str]:
    """Describe the asynchronous exchanges, such as sends, that this process has begun but not waited for. Each text has
    the function of torch.distributed and the source line of the call. Return an empty list outside of the context
    manager `perturbed`."""
    return _now[-1].under_way() if _now else []


_now: list[Perturbed] = []


@contextlib.contextmanager
def perturbed(seed: int, rank: int) -> Iterator[Perturbed]:
    """In the block, delay the communication of this process at random, so that races show. Yield the `Perturbed`, whose
    list `races` describes the races that were found."""
    owner = Perturbed(seed, rank)
    ours: dict[Any, Callable[..., Any]] = {}
    point = dist.P2POp

    def surrounded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return owner.call(name, real, args, kwargs)

        ours[call] = real
        return call

    def point_to_point(op: Any, *args: Any, **kwargs: Any) -> Any:
        return point(ours.get(op, op), *args, **kwargs)  # pass the original, since torch compares `op` with it

    changed: dict[str, Any] = {
        name: surrounded(name, getattr(dist, name)) for name in WRITES_AND_READS if hasattr(dist, name)
    }
    with patch.multiple(dist, P2POp=point_to_point, **changed):
        _now.append(owner)
        try:
            yield owner
            for name in owner.under_way():
                owner.note(f"{name}: the program never waited for it")
        finally:
            _now.pop()
