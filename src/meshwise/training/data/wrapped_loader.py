"""Read through a wrapper around a DataLoader, such as timm's PrefetchLoader.

Each batch that the wrapper yields is paired with the rank's share of the DataLoader's batch from which it was made.

A wrapper may read ahead: it may have read further batches when it yields a batch. But it yields one batch for each
batch that it reads, in the same order, so batches and shares can be paired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from typing import Any

from torch.utils.data import DataLoader

from meshwise.spec.errors import UsageError
from meshwise.training.data.order import BatchSlice


class Wrapper:
    """Runs a loader that wraps a DataLoader, such as timm's PrefetchLoader. Each batch of the wrapping loader is made
    from a batch of the DataLoader, and gets the `BatchSlice` of that batch."""

    def __init__(self, name: str, begin: Callable[[], Iterator[Any]]) -> None:
        """name: the name of the wrapping loader's class.
        begin: the wrapping loader's original `__iter__`, which reads batches from the DataLoader."""
        self._name, self._begin = name, begin
        self._fed: Iterator[Any] | None = None

    def take(self) -> Iterator[Any] | None:
        """Return the DataLoader's batches when the wrapping loader first asks for them in a loop, otherwise None."""
        fed, self._fed = self._fed, None
        return fed

    def pairs(self, inner: Iterator[tuple[Any, BatchSlice]]) -> Iterator[tuple[Any, BatchSlice]]:
        """Yield each batch of the wrapping loader with its `BatchSlice`."""
        read: deque[BatchSlice] = deque()

        def feed() -> Iterator[Any]:
            for batch, part in inner:
                read.append(part)
                yield batch

        self._fed = feed()
        for batch in self._begin():
            if not read:
                break
            yield batch, read.popleft()
        else:
            if not read:
                return
        raise UsageError(
            f"mw.distribute: {self._name} yields more or fewer batches than it reads from its DataLoader. The samples "
            "of a batch are therefore unknown. Pass the DataLoader itself, and join or drop batches in the loop."
        )


def loader_inside(thing: Any) -> str | None:
    """Return the name of the attribute in which `thing`, an iterable such as a wrapping loader, holds a DataLoader.

    Returns None if `thing` cannot be iterated, or if it holds no DataLoader or several.
    """
    held = [name for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, DataLoader)]
    return held[0] if len(held) == 1 and hasattr(type(thing), "__iter__") else None


def read_through(outer: Any, name: str, inner: Any) -> Wrapper:
    """Make the loader `outer` read from `inner`, which is assigned to its attribute `name`."""
    kind = type(outer)
    setattr(outer, name, inner)
    wrapper = Wrapper(kind.__name__, lambda: kind.__iter__(outer))

    def later(self: Any) -> Iterator[Any]:  # like a generator, begin only when the first batch is read
        yield from inner.begin_loop()

    begins = later if isgeneratorfunction(kind.__iter__) else lambda self: inner.begin_loop()
    members = {"__iter__": begins, "__module__": kind.__module__, "__doc__": kind.__doc__}
    outer.__class__ = type(kind.__name__, (kind,), members)
    return wrapper
