"""Check that all ranks hold the same data.

This matters because each rank takes its share of every batch.

The ranks compare attributes of data sets and samplers: sizes, fingerprints, some numbers and texts. No sample
is read and no random number drawn, so augmentation is not compared. Objects given earlier are not compared again, as
they may cache what this rank has read.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler

from meshwise.spec.errors import DataError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.loaders import fingerprint
from meshwise.training.engine.engine import Engine
from meshwise.transfer import collectives

THINGS, DEPTH = 64, 6  # maximum number of attributes to compare, and of levels of nesting to read
ITEMS, NUMBERS, RUNS = 256, 4096, 16  # how many list entries and array numbers to compare, in RUNS runs of neighbors
FEW = 16  # shorter objects, such as a rank's own range, are compared only if they have a row per sample
ROUNDING = 1e-6  # relative tolerance, because machines may round differently
DIFFERENT = (
    "Not the same data: the ranks pass different data sets ({sizes} samples). Pass the whole data set on every rank: "
    "meshwise divides each batch, so remove split_dataset_by_node, dataset.shard and subsets by rank."
)
OTHER = (
    "Not the same data: rank {rank} has other values than rank 0 in {name}. Every rank must pass the same "
    "data, because meshwise takes the rank's share of each batch. Draw the data from the same seed on all ranks, not "
    "from a seed that depends on mw.rank() or RANK, or load one file. If the script splits the data by rank, pass all."
)
_NUMBER = int | float | complex | numpy.generic


@dataclass(frozen=True)
class Held:
    """What the ranks compare about one attribute of a data set or a sampler, such as a tensor of labels.

    exact: a checksum of its integers and texts. total: a weighted sum of its floating-point numbers. row: whether it
        has a row for each sample."""

    size: int
    exact: int
    total: float
    row: bool


class SameData:
    """Compares the data sets and samplers that the ranks were given."""

    def __init__(self, engine: Engine) -> None:
        self._say = engine.notify
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def data_given(self, data: Any, samples: int | None, samplers: Sequence[Any] = ()) -> None:
        """Raise DataError if the ranks have different data sets or samplers."""
        everyone = collectives.everyone()  # including ranks that get the same samples
        if collectives.world_size(everyone) == 1 or isinstance(data, IterableDataset):
            return
        found = {} if rehearsing() else read({"": data, "sampler": samplers}, samples, self._known)
        first, *others = collectives.gather_objects((samples, fingerprint(data), found), everyone)
        if any(other[:2] != first[:2] for other in others):
            sizes = ", ".join(f"rank {rank}: {one[0]}" for rank, one in enumerate([first, *others]))
            raise DataError(DIFFERENT.format(sizes=sizes))
        for name, held in first[2].items():
            rank = next((rank for rank, (*_, one) in enumerate(others, 1) if _differ(held, one.get(name, held))), None)
            if rank is None:
                continue
            whose = name if name.startswith("sampler") else f"{type(data).__name__}{name}"
            text = OTHER.format(rank=rank, name=f"{whose} ({held.size:,} rows)")
            if held.row or name.startswith("sampler"):
                raise DataError(text)
            self._say(text)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers that choose the samples of a DataLoader, without samplers that meshwise replaces with its
    own."""
    both = [each for each in (loader.sampler, loader.batch_sampler) if type(each) is not BatchSampler]
    return [each for each in both if each is not None and not isinstance(each, DistributedSampler)]


def read(things: dict[str, Any], samples: int | None, known: weakref.WeakValueDictionary[int, Any]) -> dict[str, Held]:
    """Return facts about these objects, to compare them with the same objects on other ranks."""
    sizes, seen, found = {samples}, set(known), dict[str, Held]()
    waiting = [(name, thing, 0) for name, thing in reversed(things.items())]
    while waiting and len(found) < THINGS:
        name, thing, depth = waiting.pop()
        if depth > DEPTH or id(thing) in seen:
            continue
        seen.add(id(thing))
        if (parts := _parts(name, thing)) is None:
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # e.g. sparse tensors cannot be read
                if (size := len(thing)) in sizes or size >= FEW:
                    found[name] = Held(size, *_facts(_some(thing)), size in sizes)
            continue
        if isinstance(thing, Dataset) and isinstance(thing, Sized):
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                sizes.add(len(thing))
        waiting += [(inner, part, depth + 1) for inner, part in reversed(parts)]
        with contextlib.suppress(TypeError):  # a list, for example, cannot be weakly referenced
            known[id(thing)] = thing
    return found


def _parts(name: str, thing: Any) -> list[tuple[str, Any]] | None:
    """Return pairs (name, part) for an object that holds other objects; None for any other object."""
    if isinstance(thing, Tensor | numpy.ndarray | nn.Module | type) or hasattr(thing, "iloc"):
        return None
    if type(thing) in (list, tuple) and len(thing) <= FEW and not any(isinstance(each, _NUMBER) for each in thing):
        return [(f"{name}[{place}]", part) for place, part in enumerate(thing)]
    if type(thing) is dict:
        return [(f"{name}[{key!r}]", part) for key, part in thing.items()] if len(thing) <= FEW else None
    if isinstance(thing, Dataset | Sampler) or hasattr(type(thing), "__getitem__"):
        return [(f"{name}.{key}", part) for key, part in getattr(thing, "__dict__", {}).items()] or None
    return None


def _some(thing: Any) -> Any:
    """Return some rows of an array, a table or a list."""
    if isinstance(thing, Tensor | numpy.ndarray):
        return thing[_places(len(thing), max(RUNS, NUMBERS // max(1, math.prod(thing.shape[1:]))))]
    places = _places(len(thing), ITEMS)
    if hasattr(thing, "iloc"):
        return thing.iloc[places].to_numpy()
    if type(thing) not in (list, tuple, range):
        raise TypeError
    return [thing[place] for place in places]


def _places(size: int, most: int) -> numpy.ndarray[Any, Any]:
    """Return about `most` indices below `size`, in runs: neighbors are cheap to read from a mapped file."""
    length = -(-min(size, most) // RUNS)
    starts = numpy.linspace(0, size - length, RUNS).astype(int)
    return numpy.unique(starts[:, None] + numpy.arange(length))


def _facts(rows: Any) -> tuple[int, float]:
    """Return a checksum of the integers and texts in rows, and a sum of their floats, weighted by position."""
    exact, floats = list[Any](), [numpy.zeros(0)]
    for leaf in _leaves(rows):
        if isinstance(leaf, str | bytes | os.PathLike):
            exact.append(Path(os.fsdecode(leaf)).name)  # machines may keep the same files in different folders
            continue
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().resolve_conj().cpu()
            leaf = leaf.float() if leaf.is_floating_point() and leaf.itemsize < 4 else leaf
        elif not isinstance(leaf, numpy.ndarray | _NUMBER):
            raise TypeError
        numbers = numpy.asarray(leaf).ravel()
        numbers = numbers[:: len(numbers) // NUMBERS + 1]
        if numbers.dtype.kind in "fc":
            floats.append(numbers)
        else:
            exact.append(numbers.tolist())
    sizes = numpy.abs(numpy.concatenate(floats))
    return zlib.crc32(repr(exact).encode()), float(numpy.nansum(sizes * numpy.arange(1, len(sizes) + 1)))


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the texts, numbers and arrays in `tree`, and the length of each list, tuple or dict."""
    if isinstance(tree, numpy.ndarray) and tree.dtype.kind not in "biufc":
        tree = tree.ravel().tolist()
    if type(tree) not in (list, tuple, dict) or depth > DEPTH:
        yield tree
        return
    parts = list(tree.values() if isinstance(tree, dict) else tree)
    yield len(parts)
    for part in parts[: FEW if depth else ITEMS]:
        yield from _leaves(part, depth + 1)


def _differ(one: Held, other: Held) -> bool:
    exact = (one.size, one.exact) == (other.size, other.exact)
    return not (exact and math.isclose(one.total, other.total, rel_tol=ROUNDING))
