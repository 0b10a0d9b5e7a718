"""Check that all ranks hold the same data.

It matters because each rank takes its share of every batch.

Compared are attributes of data sets and samplers: sizes, fingerprints, runs of their numbers and texts, and the sizes
of files that they name. No sample is read and no random number drawn, so augmentation is not compared. Objects given
earlier are not compared again, as they may cache what this rank has read.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler

from meshwise.compat.dispatch import rehearsing
from meshwise.compat.fingerprint import fingerprint
from meshwise.engine.engine import Engine
from meshwise.spec.errors import DataError
from meshwise.transfer import collectives

MOST_BYTES, MOST_SECONDS, MOST_THINGS = 1 << 20, 0.05, 256
STRETCHES, STRETCH = 16, 512  # of the numbers of a tensor, and how many each has
ITEMS, FILES, DEPTH = 256, 32, 6
"""The most items to read of a list, the most files to read sizes of, and the most levels of nesting to read."""
FEW = 16  # what has fewer rows, and not one for each sample, may be the rank's own: a range, a device
MOST_SENT = 4  # things whose numbers travel, where their bits are others
ROUNDING = 1e-3  # of a stretch's largest number: what the ranks' machines may compute otherwise
DIFFERENT = (
    "Not the same data: the ranks pass different data sets ({sizes} samples). Pass the whole data set on every rank: "
    "meshwise divides each batch, so remove split_dataset_by_node, dataset.shard and subsets by rank."
)
OTHER = (
    "Not the same data: rank {rank} has other values than rank 0 in {name}. Every rank must pass the same "
    "data, because meshwise takes the rank's share of each batch. Draw the data from the same seed on all ranks, not "
    "from a seed that depends on mw.rank() or RANK, or load one file. If the script splits the data by rank, pass all."
)
_NUMBERS = (bool, int, float, complex, numpy.generic)
_Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """What the ranks compare about one attribute of a data set or a sampler, such as a tensor of labels.

    size: how many rows the attribute has.
    told: facts that must be exactly equal on all ranks, such as shapes and texts.
    numbers: arrays of numbers from the attribute, which must be equal up to rounding. Only some numbers if there are
        many.
    row: whether the attribute has one row for each sample.
    """

    size: int
    told: tuple[Any, ...] = ()
    numbers: tuple[_Array, ...] = field(default=(), repr=False)
    row: bool = False

    @property
    def bits(self) -> tuple[int, int]:
        """A short summary of the attribute: its number of rows, and a checksum of `told` and `numbers`. The ranks
        exchange the summaries first. They exchange the values only if the summaries differ."""
        return self.size, zlib.crc32(b"".join(map(_Array.tobytes, self.numbers)), zlib.crc32(repr(self.told).encode()))


class SameData:
    """Compares the data sets and samplers that the ranks were given."""

    def __init__(self, engine: Engine) -> None:
        self._say = engine.notify
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def data_given(self, data: Any, samples: int | None, samplers: Sequence[Any] = ()) -> None:
        """Raise DataError if the ranks have different data sets or samplers. Only print a note if what differs does not
        have one row for each sample. Collective.

        samples: the number of samples in the data set. None if it has no length.
        """
        everyone = collectives.everyone()  # those too that work on the same samples
        if collectives.world_size(everyone) == 1 or isinstance(data, IterableDataset):
            return
        reading = Reading(self._known, samples)
        found = {} if rehearsing() else reading.read({"": data, "sampler": samplers})
        facts = samples, fingerprint(data), {name: held.bits for name, held in found.items()}
        ranks = collectives.gather_objects(facts, everyone)
        different = DIFFERENT.format(sizes=", ".join(f"rank {rank}: {one[0]}" for rank, one in enumerate(ranks)))
        if any(rank[:2] != ranks[0][:2] for rank in ranks):
            raise DataError(different)
        bits = [rank[2] for rank in ranks]
        unequal = [name for name in bits[0] if any(one.get(name, bits[0][name]) != bits[0][name] for one in bits)]
        for name in unequal[:MOST_SENT]:
            every: list[Held | None] = collectives.gather_objects(found.get(name), everyone)
            first = next(filter(None, every))
            rank = next((rank for rank, one in enumerate(every) if one is not None and _differ(first, one)), None)
            if rank is None:
                continue
            if name.endswith(".indices") and not name.startswith("sampler"):
                raise DataError(different)
            whose = name if name.startswith("sampler") else f"{type(data).__name__}{name}"
            text = OTHER.format(rank=rank, name=f"{whose} ({first.size:,} rows)")
            if first.row or name.startswith("sampler"):
                raise DataError(text)
            self._say(text)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers that choose the samples of a DataLoader, without samplers that meshwise replaces by its
    own."""
    both = [each for each in (loader.sampler, loader.batch_sampler) if type(each) is not BatchSampler]
    return [each for each in both if each is not None and not isinstance(each, DistributedSampler)]


class Reading:
    """Reads the values that data sets and samplers hold, up to limits on bytes and time."""

    def __init__(self, known: weakref.WeakValueDictionary[int, Any], samples: int | None) -> None:
        """known: the objects that were compared before, by id."""
        self._known, self._before, self._seen = known, set(known), set[int]()
        self._end, self._left = time.monotonic() + MOST_SECONDS, MOST_BYTES
        self._sizes = {samples}
        self._found: dict[str, Held] = {}

    def read(self, things: dict[str, Any]) -> dict[str, Held]:
        """Return the facts by which to compare objects with the same objects on another rank. The result maps the name
        of an object, or of an attribute inside it, to its facts.

        things: the objects to read, by name.
        """
        for name, thing in things.items():
            self._walk(name, thing, 0)
        return self._found

    def _walk(self, name: str, thing: Any, depth: int) -> None:
        over = self._left <= 0 or time.monotonic() > self._end or len(self._found) == MOST_THINGS
        if over or depth > DEPTH or id(thing) in self._seen or id(thing) in self._before:
            return
        self._seen.add(id(thing))
        if (parts := _parts(name, thing)) is None:
            self._hold(name, held(thing))
            return
        if isinstance(thing, Dataset) and isinstance(thing, Sized):
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                self._sizes.add(len(thing))
        for inner, part in parts:
            self._walk(inner, part, depth + 1)
        with contextlib.suppress(TypeError):  # a list, or what has no place for a weak reference
            self._known[id(thing)] = thing

    def _hold(self, name: str, found: Held | None) -> None:
        if found is None or (found.size not in self._sizes and found.size < FEW):
            return
        self._left -= sum(each.nbytes for each in found.numbers) + len(repr(found.told))
        self._found[name] = Held(found.size, found.told, found.numbers, found.size in self._sizes)


def _parts(name: str, thing: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of an object that holds other objects, as pairs (name, part)."""
    if isinstance(thing, Tensor | numpy.ndarray | nn.Module | type) or _is_table(thing):
        return None
    if type(thing) in (list, tuple) and len(thing) <= FEW and not any(isinstance(each, _NUMBERS) for each in thing):
        return [(f"{name}[{place}]", part) for place, part in enumerate(thing)]
    if type(thing) is dict:
        return [(f"{name}[{key!r}]", part) for key, part in thing.items()] if len(thing) <= FEW else None
    if isinstance(thing, Dataset | Sampler) or hasattr(type(thing), "__getitem__"):
        return [(f"{name}.{key}", part) for key, part in getattr(thing, "__dict__", {}).items()] or None
    return None


def _is_table(thing: Any) -> bool:
    return type(thing).__module__.startswith("pandas.") and hasattr(thing, "iloc")


def held(thing: Any) -> Held | None:
    """Return the facts by which to compare a tensor, an array, a table or a list with the same object on another rank.
    Return None if the object cannot be compared."""
    if _is_table(thing):
        return _held_items(thing.iloc[_places(len(thing), ITEMS)].to_numpy().tolist(), len(thing))
    if isinstance(thing, numpy.ndarray) and thing.ndim and thing.dtype.kind not in "biufc":
        return _held_items([each for part in _stretches(thing) for each in part.tolist()][:ITEMS], len(thing))
    if isinstance(thing, numpy.ndarray) and thing.ndim:
        return Held(len(thing), (thing.shape, str(thing.dtype)), tuple(_stretches(thing)))
    if type(thing) in (Tensor, nn.Parameter) and thing.dim() and _has_numbers(thing):
        return Held(len(thing), (tuple(thing.shape), str(thing.dtype)), tuple(map(_as_array, _stretches(thing))))
    if isinstance(thing, range):
        return Held(len(thing), (thing,))
    if type(thing) in (list, tuple):
        return _held_items([thing[place] for place in _places(len(thing), ITEMS)], len(thing))
    return None


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def _held_items(items: list[Any], size: int) -> Held | None:
    """Return the facts by which to compare a list, a table or an array of objects with the same object on another
    rank."""
    found = _Items()
    if not items or not all(map(found.add, items)):
        return None
    return Held(size, tuple(found.told), (*([numpy.asarray(found.scalars)] if found.scalars else ()), *found.arrays))


class _Items:
    """Collects what the ranks compare about the items of a list.

    told: facts that must be exactly equal, such as texts and sizes of files.
    scalars: the items that are numbers.
    arrays: numbers from the items that are tensors or arrays.
    """

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.scalars: list[Any] = []
        self.arrays: list[_Array] = []
        self._files = self._texts = 0

    def add(self, item: Any, depth: int = 0) -> bool:
        """Record an item of the list, so that it can be compared with the same item on another rank. Recorded are e.g.
        a number, a text, or a checksum of bytes. Items inside a list or dict are recorded too.

        Return False if the item has a type that cannot be compared.
        """
        if isinstance(item, str | os.PathLike):
            self._add_text(str(item))
        elif isinstance(item, bytes):
            self.told.append(zlib.crc32(item))
        elif isinstance(item, _NUMBERS):
            self.scalars.append(item)
        elif isinstance(item, Tensor | numpy.ndarray) and (found := held(item)) is not None:
            self.told.append(found.told)
            self.arrays.extend(found.numbers[:1])
        elif type(item) in (list, tuple, dict) and depth < DEPTH:
            parts = list(item.values() if isinstance(item, dict) else item)
            self.told.append(len(parts))
            return all(self.add(part, depth + 1) for part in parts[:FEW])
        else:
            return False
        return True

    def _add_text(self, text: str) -> None:
        """Record a text of a data set, so that it can be compared between the ranks."""
        looks = self._files < FILES and self._texts < FILES
        if looks and (size := _size_of_file(text)) is not None:
            self.told.append(size)
            self._files += 1
        elif not self._files:
            self.told.append(text)
            self._texts += 1


def _size_of_file(name: str) -> int | None:
    try:
        found = Path(name).stat()
    except (OSError, ValueError):  # a text that cannot be a name
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _places(size: int, most: int) -> list[int]:
    """Return at most `most` indices below `size`."""
    if size <= most:
        return list(range(size))
    length = most // STRETCHES
    starts = [number * (size - length) // (STRETCHES - 1) for number in range(STRETCHES)]
    return [start + step for start in starts for step in range(length)]


def _stretches(array: Any) -> Iterator[Any]:
    """Yield runs of consecutive elements of a tensor or an array, at evenly spaced places."""
    size = math.prod(array.shape)
    if size <= STRETCHES * STRETCH:
        flat = array.reshape(-1)
        yield from (flat[start : start + STRETCH] for start in range(0, size, STRETCH))
        return
    places = numpy.asarray(_places(size, STRETCHES * STRETCH))
    for start in range(0, len(places), STRETCH):
        index = numpy.unravel_index(places[start : start + STRETCH], tuple(array.shape))
        yield array[tuple(map(torch.as_tensor, index)) if isinstance(array, Tensor) else index]


def _as_array(tensor: Tensor) -> _Array:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    small = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return (tensor.float() if small else tensor).numpy()


def _differ(one: Held, other: Held) -> bool:
    """Return whether two ranks hold different values of an attribute."""
    if (one.size, one.told) != (other.size, other.told) or len(one.numbers) != len(other.numbers):
        return True
    apart = [pair for pair in zip(one.numbers, other.numbers, strict=True) if not _close(*pair)]
    empty = [pair for pair in apart if not (pair[0].any() and pair[1].any())]
    return len(apart) > len(empty) or len(empty) * 2 > len(one.numbers)


def _close(one: _Array, other: _Array) -> bool:
    if one.dtype.kind not in "fc" or one.shape != other.shape:
        return numpy.array_equal(one, other)
    finite = numpy.abs(one[numpy.isfinite(one)])
    atol = ROUNDING * float(finite.max()) if finite.size else 0.0
    return numpy.allclose(one, other, rtol=0, atol=atol, equal_nan=True)
