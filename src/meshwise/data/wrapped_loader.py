"""Read through a wrapper around a DataLoader, such as timm's PrefetchLoader.

Each batch of the wrapper gets the share of the inner batch that it was made from.

A wrapper may read ahead, so the batch that it yields need not be the one that it read last. But it yields one batch for
each that it reads, in the same order, by which each of its batches gets a share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from meshwise.data.order import BatchSlice
from meshwise.spec.errors import UsageError


class _Loader(Protocol):
    def begin_loop(self) -> Iterator[Any]: ...


class Wrapper:
    """Passes the batches of an inner loader through the loader around it, and keeps track of their shares."""

    def __init__(self, name: str, begin: Callable[[], Iterator[Any]]) -> None:
        """name: the outer loader's class name. begin: calls the outer loader's original `__iter__`."""
        self._name, self._begin = name, begin
        self._fed: Iterator[Any] | None = None

    def take(self) -> Iterator[Any] | None:
        """Return the batches for the outer loader, when it begins to read the inner one; None for any other reader."""
        fed, self._fed = self._fed, None
        return fed

    def pairs(self, inner: Iterator[tuple[Any, BatchSlice]]) -> Iterator[tuple[Any, BatchSlice]]:
        """Yield the outer loader's batches, each with its share. UsageError if the outer loader yields more or fewer
        batches than it reads."""
        read: deque[BatchSlice] = deque()

        def feed() -> Iterator[Any]:
            for batch, part in inner:
                read.append(part)
                yield batch

        self._fed = feed()
        for batch in self._begin():
            if not read:
                raise self._other_batches()
            yield batch, read.popleft()
        if read:
            raise self._other_batches()

    def _other_batches(self) -> UsageError:
        return UsageError(
            f"mw.distribute: {self._name} gives more or fewer batches than it reads from its DataLoader, so the "
            "samples of a batch are not known. Give mw.distribute the DataLoader, and join or drop batches in the loop."
        )


def loader_inside(thing: Any) -> str | None:
    """Return the name of the attribute that holds the only DataLoader of an iterable; None if there is not just one."""
    held = [name for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, DataLoader)]
    return held[0] if len(held) == 1 and hasattr(type(thing), "__iter__") else None


def read_through(outer: Any, name: str, inner: _Loader) -> Wrapper:
    """Make `outer` read `inner`, in place: set attribute `name`, and make its class a subclass of the same name."""
    kind = type(outer)
    setattr(outer, name, inner)
    wrapper = Wrapper(kind.__name__, lambda: kind.__iter__(outer))
    members = {"__iter__": lambda self: inner.begin_loop(), "__module__": kind.__module__, "__doc__": kind.__doc__}
    outer.__class__ = type(kind.__name__, (kind,), members)
    return wrapper
