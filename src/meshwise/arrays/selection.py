"""Select the first r elements of sorted parts, and merge them.

Sorting, quantiles and top-k use it.

Each round reads a few hundred samples, at equal steps, of the elements that are still undecided. This decides about 99
of 100 of them. When few are left, all of them are read. Equal elements are ordered by part, then by position, so that
the answer is exact and unique, also for equal elements and NaN. The function `order` alone defines the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array, numbered
from meshwise.arrays.reading import to_host
from meshwise.arrays.sharding import sharding
from meshwise.transfer.devices import OPEN_DEVICES

SAMPLES = 512  # about how many samples each round reads for a cut, from all parts together
FEWEST_A_PART = 8  # minimum samples per part, so that every round narrows the range


def order(values: Tensor, dim: int = 0, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return (sorted values, indices) along `dim`, as torch.sort does, also for complex numbers."""
    if not values.is_complex():
        return torch.sort(values, dim=dim, descending=descending, stable=True)
    at = torch.sort(values.imag, dim=dim, descending=descending, stable=True).indices
    then = torch.sort(values.real.gather(dim, at), dim=dim, descending=descending, stable=True).indices
    at = at.gather(dim, then)
    return values.gather(dim, at), at


def sort_values(values: Tensor, descending: bool = False) -> Tensor:
    """Return the values of a vector, sorted as by the function `order`. The indices are not returned."""
    if not _by_numpy(values):
        return order(values, 0, descending)[0]
    made = np.sort(values.numpy())
    return torch.from_numpy(made[::-1].copy() if descending else made)


def merge(runs: Sequence[Tensor], descending: bool = False) -> tuple[Tensor, Tensor]:
    """Merge sorted vectors. Return the values, and their positions in the concatenated vectors."""
    joined = torch.cat(list(runs))
    if descending or not _by_numpy(joined):
        return order(joined, 0, descending)
    at = torch.from_numpy(np.argsort(joined.numpy(), kind="stable"))
    return joined[at], at


def merge_values(runs: Sequence[Tensor], descending: bool) -> Tensor:
    """Return the merged values of sorted vectors, as `merge` does, without the positions."""
    joined = torch.cat(list(runs))
    if descending or not _by_numpy(joined):
        return order(joined, 0, descending)[0]
    return torch.from_numpy(np.sort(joined.numpy(), kind="stable"))


def _by_numpy(values: Tensor) -> bool:
    """Return whether to sort `values` with NumPy."""
    return values.is_cpu and not OPEN_DEVICES and not values.is_complex() and values.dtype is not torch.bfloat16


@dataclass
class _Window:
    """What `cuts` knows about the r smallest elements of a vector whose parts are sorted."""

    low: list[int]
    high: list[int]
    wanted: int

    @property
    def step(self) -> int:
        left = sum(self.high) - sum(self.low)
        return max(1, -(-left // max(SAMPLES, FEWEST_A_PART * len(self.low))))

    def positions(self, part: int) -> range:
        """Return which elements of a part to read as a sample: every `step`-th element that is still undecided."""
        return range(self.low[part] + self.step - 1, self.high[part], self.step)

    def narrow(self, parts: Tensor, step: int) -> None:
        """Decide for more elements whether they are among the r smallest, with a sample of the undecided elements."""
        count = len(self.low)
        if step == 1:
            self.low = [low + n for low, n in zip(self.low, _tally(parts[: self.wanted], count), strict=True)]
            self.high, self.wanted = list(self.low), 0
            return
        surely = max(0, (self.wanted - count * (step - 1)) // step)
        possibly = self.wanted // step  # number of samples that may lie before the cut
        ours, theirs, every = (_tally(some, count) for some in (parts[:surely], parts[:possibly], parts))
        for k in range(count):
            if theirs[k] < every[k]:
                self.high[k] = self.low[k] + step * (theirs[k] + 1) - 1
            self.low[k] += step * ours[k]
        self.wanted -= step * sum(ours)


def _tally(parts: Tensor, count: int) -> list[int]:
    return [int(n) for n in torch.bincount(parts, minlength=count)]


def cuts(x: Array, ranks: Sequence[int], *, descending: bool = False) -> list[list[int]]:
    """Return how many of the r smallest elements of a vector are in each of its parts, for each r in `ranks`."""
    held = x.sharding
    windows = [_Window([0] * len(held.sizes), list(held.sizes), rank) for rank in ranks]
    while True:
        for window in windows:
            if window.wanted in (0, sum(window.high) - sum(window.low)):
                window.low = window.high = list(window.high if window.wanted else window.low)
                window.wanted = 0
        todo = [window for window in windows if window.low != window.high]
        if not todo:
            return [window.low for window in windows]
        asked = [[at for window in todo for at in window.positions(part)] for part in range(len(held.sizes))]
        read = picked(x, asked)
        taken = [0] * len(asked)
        for window in todo:
            step = window.step
            samples, owners = [], []
            for part, values in enumerate(read):
                n = len(window.positions(part))
                samples.append(values[taken[part] : taken[part] + n])
                owners.append(torch.full((n,), part))
                taken[part] += n
            window.narrow(torch.cat(owners)[order(torch.cat(samples), descending=descending)[1]], step)


def picked(x: Array, asked: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the elements at the given positions of each part, in host memory, on every rank."""
    chosen = tuple(part[torch.tensor(asked[k], dtype=torch.int64)] for k, part in numbered(x))
    counts = tuple(map(len, asked))
    lies = sharding(x.sharding.places, 0, counts)
    values: tuple[Tensor, ...] = to_host(Array(chosen, lies, (sum(counts),), x.dtype, x.space), "samples").split(counts)
    return values
