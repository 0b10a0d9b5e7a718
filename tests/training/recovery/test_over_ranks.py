"""What ranks save in any layout, any number of them loads in any other: bitwise, each reading its own part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from meshwise.records.checkpoints import checkpoints_in, read_manifest
from meshwise.torch_compat.sharding import local_of, packed, with_local
from meshwise.training.recovery import loading, saving, tensor_files
from meshwise.training.recovery.loading import Stored, load, whole
from meshwise.training.recovery.saving import Saver
from meshwise.transfer.sharded import local_part
from meshwise.workers.join import join

LAYOUTS = ("replicated", "rows", "columns", "packed", "grid", "same dim twice", "rows of replicas")
SHAPE = (13, 12)


def value(name: str) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(LAYOUTS.index(name)))


def laid(name: str, kind: str, size: int) -> Tensor:
    """The value of `name`, laid out as `kind` says."""
    full = value(name)
    if kind == "replicated":
        return full
    if size == 4 and kind in ("grid", "same dim twice", "rows of replicas"):
        mesh = init_device_mesh("cpu", (2, 2))
        first = {"grid": Shard(0), "same dim twice": Shard(0), "rows of replicas": Replicate()}[kind]
        placements: Any = (first, Shard(1) if kind == "grid" else Shard(0))
    else:
        mesh = init_device_mesh("cpu", (size,))
        placements = ({"columns": Shard(1), "packed": packed(1, 3)}.get(kind, Shard(0)),)
    like = torch.distributed.tensor.distribute_tensor(torch.empty(SHAPE), mesh, [Replicate()] * mesh.ndim)
    spec = like._spec
    like = type(like)(like._local_tensor, type(spec)(mesh, placements, spec.tensor_meta), requires_grad=False)
    return with_local(like, local_part(like, full.__getitem__).clone())


def tree(size: int, rank: int, shift: int) -> dict[str, Any]:
    """Each value in a layout, other ones with another shift; a state of which each rank holds some entries."""
    kinds = {name: LAYOUTS[(number + shift) % len(LAYOUTS)] for number, name in enumerate(LAYOUTS)}
    own = {n: {"n": n, "m": torch.full((20,), float(n))} for n in range(7) if n % size == rank}
    return {"model": {name: laid(name, kind, size) for name, kind in kinds.items()}, "state": own, "step": 5}


def saved(folder: str, shift: int) -> bool:
    world = join().world
    tensor_files.SMALL = 100  # so that small values are divided, too
    try:
        said: list[str] = []
        saver = Saver(Path(folder), world, said.append)
        for step in (4, 5):  # who writes what is known the second time
            assert saver.save(lambda: tree(world.size, world.rank, shift), {"step": step}, wait=True)
        saver.settle()
        return (saver.saved, saver.wrong, said) == (5, "", [])
    finally:
        tensor_files.SMALL = 64 << 10


def loaded(folder: str, shift: int) -> bool:
    world = join().world
    found = load(Path(folder), world, print).tree
    assert sorted(found["state"]) == list(range(7)) and found["step"] == 5
    assert all(whole(each)["m"].equal(torch.full((20,), float(n))) for n, each in found["state"].items())
    for name, want in tree(world.size, world.rank, shift)["model"].items():
        stored: Stored = found["model"][name]
        assert local_of(stored.like(want)).equal(local_of(want)), (name, want)
    return True


@pytest.mark.parametrize(
    ("sizes", "shift"),
    [((2, 3), 1), *(pytest.param((4, 2, 3, 4), shift, marks=pytest.mark.slow) for shift in range(len(LAYOUTS)))],
)
def test_what_some_ranks_save_others_load(sizes: tuple[int, ...], shift: int, pool: Any, tmp_path: Path) -> None:
    for number, (first, then) in enumerate(itertools.pairwise(sizes)):
        folder = tmp_path / str(number)
        assert all(pool(first).run(saved, str(folder), shift))
        assert all(pool(then).run(loaded, str(folder), shift + 2))
        alone = whole(load(folder).tree)  # in this process, without a group
        assert all(alone["model"][name].equal(value(name)) for name in LAYOUTS)
        files = read_manifest(checkpoints_in(folder)[-1]).files
        sizes_of_files = [file.size for file in files]
        assert len(files) == first and max(sizes_of_files) < 2 * min(sizes_of_files)


def apart(folder: str) -> list[str]:
    """Save and load as machines do that do not share the folder: here all ranks see it, and are told otherwise."""
    world, said = join().world, list[str]()
    before = saving.seen_by_all
    saving.seen_by_all = loading.seen_by_all = lambda *given: False
    try:
        saver = Saver(Path(folder), world, said.append)
        assert saver.save(lambda: tree(world.size, world.rank, 1), {"step": 5}, wait=True)
        saver.settle()
        assert (saver.saved, saver.wrong) == (5, "")
        found = load(Path(folder) if world.rank == 0 else Path(folder, "elsewhere"), world, said.append).tree
    finally:
        saving.seen_by_all = loading.seen_by_all = before
    assert all(found["model"][name].equal(value(name)) for name in LAYOUTS)
    return said


def test_machines_that_share_no_folder_save_on_the_first(pool: Any, tmp_path: Path) -> None:
    said, nothing = pool(2).run(apart, str(tmp_path))
    assert said == [f"not every machine sees {tmp_path}: rank 0 writes the whole state."] and not nothing
    (saved,) = checkpoints_in(tmp_path)
    assert [file.name for file in read_manifest(saved).files] == ["rank0.safetensors", "rank1.safetensors"]
