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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler

from meshwise.spec.errors import DataError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.loaders import fingerprint
from meshwise.training.engine.engine import Engine
from meshwise.transfer import collectives

MOST_BYTES, MOST_SECONDS, MOST_THINGS = 1 << 20, 0.05, 256
STRETCHES, STRETCH = 16, 512  # of the numbers of a tensor, and how many each has
ITEMS, FILES, DEPTH = 256, 32, 6
"""The most items to read of a list, the most files to read sizes of, and the most levels of nesting to read."""
FILE = "a file"  # of a list that names files, sizes are told
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
    """What the ranks compare about one attribute of a data set or a sampler, such as a tensor of labels."""

    size: int
    told: tuple[Any, ...] = ()
    numbers: tuple[_Array, ...] = field(default=(), repr=False)
    row: bool = False

    @property
    def bits(self) -> tuple[int, int]:
        """A short summary of the attribute: its number of rows, and a checksum of `told` and `numbers`."""
        return self.size, zlib.crc32(b"".join(map(_Array.tobytes, self.numbers)), zlib.crc32(repr(self.told).encode()))


class SameData:
    """Compares the data sets and samplers that the ranks were given."""

    def __init__(self, engine: Engine) -> None:
        self._say = engine.notify
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def data_given(self, data: Any, samples: int | None, samplers: Sequence[Any] = ()) -> None:
        """Raise DataError if the ranks have different data sets or samplers."""
        everyone = collectives.everyone()  # those too that work on the same samples
        if collectives.world_size(everyone) == 1 or isinstance(data, IterableDataset):
            return
        found = {} if rehearsing() else read({"": data, "sampler": samplers}, samples, self._known)
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


def read(things: dict[str, Any], samples: int | None, known: weakref.WeakValueDictionary[int, Any]) -> dict[str, Held]:
    """Return the facts by which to compare objects with the same objects on another rank, up to limits on bytes and
    time."""
    end, left, sizes, seen = time.monotonic() + MOST_SECONDS, MOST_BYTES, {samples}, set(known)
    found: dict[str, Held] = {}
    waiting = [(name, thing, 0) for name, thing in reversed(things.items())]
    while waiting and left > 0 and time.monotonic() < end and len(found) < MOST_THINGS:
        name, thing, depth = waiting.pop()
        if depth > DEPTH or id(thing) in seen:
            continue
        seen.add(id(thing))
        if (parts := _parts(name, thing)) is None:
            one = held(thing)
            if one is not None and (one.size in sizes or one.size >= FEW):
                left -= sum(each.nbytes for each in one.numbers) + len(repr(one.told))
                found[name] = replace(one, row=one.size in sizes)
            continue
        if isinstance(thing, Dataset) and isinstance(thing, Sized):
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                sizes.add(len(thing))
        waiting += [(inner, part, depth + 1) for inner, part in reversed(parts)]
        with contextlib.suppress(TypeError):  # a list, or what has no place for a weak reference
            known[id(thing)] = thing
    return found


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
    told, scalars, arrays = list[Any](), list[Any](), list[_Array]()

    def add(item: Any, depth: int = 0) -> bool:
        """Note an item, and what it holds. Return False if it has a type that cannot be compared."""
        if isinstance(item, str | os.PathLike):
            bytes_of = _size_of_file(str(item)) if len(told) < FILES else None
            if bytes_of is not None:
                told.append((FILE, bytes_of))
            elif not any(isinstance(each, tuple) and each[:1] == (FILE,) for each in told):
                told.append(str(item))
        elif isinstance(item, bytes):
            told.append(zlib.crc32(item))
        elif isinstance(item, _NUMBERS):
            scalars.append(item)
        elif isinstance(item, Tensor | numpy.ndarray) and (found := held(item)) is not None:
            told.append(found.told)
            arrays.extend(found.numbers[:1])
        elif type(item) in (list, tuple, dict) and depth < DEPTH:
            parts = list(item.values() if isinstance(item, dict) else item)
            told.append(len(parts))
            return all(add(part, depth + 1) for part in parts[:FEW])
        else:
            return False
        return True

    if not items or not all(map(add, items)):
        return None
    return Held(size, tuple(told), (*([numpy.asarray(scalars)] if scalars else ()), *arrays))


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
