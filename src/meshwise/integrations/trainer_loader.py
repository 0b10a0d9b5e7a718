"""Give a Trainer distributed loaders, with epochs, skipping and look-ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

from meshwise.integrations.private_parts import loop_begins, loop_ends
from meshwise.torch_compat.dispatch import rehearsing, without_interception
from meshwise.training.data.order import BatchSlice
from meshwise.training.script.distributed_loader import DistributedLoader, OverLoader

Share = tuple[Any, BatchSlice]


class Reader:
    """Reads (batch, this rank's slice of the batch) for a distributed loader, and lets a Trainer look at batches before
    it processes them. It is stored in the loader's attribute `wrapper`."""

    def __init__(self) -> None:
        self._pairs: Iterator[Share] = iter(())
        self._waiting = deque[Share]()

    def take(self) -> None:
        """Return None, so that the loader begins its usual loop."""

    def pairs(self, inner: Iterator[Share]) -> Iterator[Share]:
        self._pairs, self._waiting = inner, deque()
        return self

    def __iter__(self) -> Iterator[Share]:
        return self

    def __next__(self) -> Share:
        return self._waiting.popleft() if self._waiting else next(self._pairs)

    def look(self, count: int) -> list[Share]:
        """Return the next `count` batches without consuming them."""
        with nullcontext() if rehearsing() else without_interception():
            while len(self._waiting) < count and (pair := next(self._pairs, None)) is not None:
                self._waiting.append(pair)
        return list(self._waiting)[:count]


class TrainerLoader(OverLoader):
    """A distributed loader with the methods that a Trainer calls to set the epoch and to skip batches."""

    end_of_dataloader, remainder = False, -1

    def __init__(self, loader: DistributedLoader, state: Any) -> None:
        """state: accelerate's GradientState, which records whether each running loop is at its last batch."""
        self._loader, self._state, self.skipped = loader, state, 0
        self._reader = loader.wrapper = Reader()  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, and call `set_epoch` of its data set and samplers, whose order may depend on the
        epoch."""
        for each in (self.batch_sampler, self.sampler, self.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        self._loader.go_to(epoch, self.skipped)
        self.skipped = 0

    def __iter__(self) -> _Epoch:
        return _Epoch(self, iter(self._loader), self._reader, self._state)


class _Epoch:
    def __init__(self, loader: TrainerLoader, batches: Iterator[Any], reader: Reader, state: Any) -> None:
        self._loader, self._batches, self._reader, self._state = loader, batches, reader, state
        loader.end_of_dataloader = False
        loop_begins(state, loader)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            loop_ends(self._state, self._loader)
            raise StopIteration
        self._loader.end_of_dataloader = not self.look(1)
        return batch

    def look(self, count: int) -> list[Share]:
        return self._reader.look(count)


def skip_batches(otherwise: Callable[..., Any], loader: Any, num_batches: int = 0) -> Any:
    """Make the next epoch of a `TrainerLoader` begin after `num_batches` batches, and return the loader."""
    if not isinstance(loader, TrainerLoader):
        return otherwise(loader, num_batches)
    loader.skipped = num_batches
    return loader


class Window:
    """The batches of one optimizer step. Each batch is read only when it is processed."""

    def __init__(self, epoch: Iterator[Any], count: int) -> None:
        self._epoch, self._count = epoch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._epoch, self._count)
