"""The same program with its parts on the ranks of a run: what it computes on virtual devices, on every rank."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from tests.arrays.programs import run
from tests.pool import Pool


def program(devices: str | None) -> list[Any]:
    """A program of each kind of move; what it reads."""
    xp = mw.array_namespace(devices)
    rng = xp.random.default_rng(4)
    x = rng.normal(0, 1, (7, 5))
    weights = [0, 3, 4][-len(xp.devices) :]
    uneven = xp.asarray(np.arange(35.0).reshape(7, 5), sharding=xp.shard(0, weights=weights))
    columns = xp.ones((7, 5), dtype=xp.float32, sharding=xp.shard(1))
    y = (x + uneven) * columns - xp.arange(5, device="cpu:1") / 2
    read = [y.numpy(), float(y.sum()), y.sum(axis=0).numpy(), y.var(axis=0).numpy(), int(y.argmax())]
    y += uneven.reshard(xp.shard(1))
    read += [y.numpy(), bool((y > 0).any()), repr(xp.arange(3)), np.asarray(y.to_device("cpu:1"))]
    return [*read, rng.permutation(6).numpy(), y.torch().numpy(), y.max(axis=1).numpy(), xp.random.rand(2).shape]


def equal(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(found, expected))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_compute_what_virtual_devices_do(pool: Callable[[int], Pool], ranks: int) -> None:
    expected = program(f"{ranks}xcpu")
    for found in pool(ranks).run(program, None):
        assert len(found) == len(expected)
        assert all(map(equal, found, expected)), (found, expected)


def programs_of_ranks(first: int, count: int) -> list[str]:
    """What differs from NumPy in so many random programs, on this rank."""
    found = []
    for seed in range(first, first + count):
        try:
            run(seed, mw.world_size(), over_ranks=True)
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_programs_over_ranks_are_numpys(pool: Callable[[int], Pool], ranks: int) -> None:
    assert pool(ranks).run(programs_of_ranks, 100 * ranks, 40) == [[]] * ranks


def of_other_devices() -> str:
    try:
        mw.array_namespace("5xcpu")
    except mw.UsageError as error:
        return str(error)
    return ""


def shards_of_ranks() -> tuple[list[float], list[int]]:
    xp = mw.array_namespace()
    rank = mw.rank()
    x = xp.from_shards([np.full(rank + 1, float(rank))])
    return x.numpy().tolist(), [len(part) for part in x.shards]


def test_what_ranks_are_not_is_refused_and_each_gives_its_own_part(pool: Callable[[int], Pool]) -> None:
    assert all("arrays of this run are divided over its 2 cpu ranks" in text for text in pool(2).run(of_other_devices))
    assert pool(2).run(shards_of_ranks) == [([0.0, 1.0, 1.0], [1]), ([0.0, 1.0, 1.0], [2])]


@pytest.mark.parametrize("after", ["", "y = x.max()"])
def test_a_value_that_one_rank_reads_ends_the_run_with_its_line(processes: None, tmp_path: Path, after: str) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import meshwise as mw\nx = mw.array_namespace().ones(10)\n"
        f"if mw.rank() == 0:\n    print(float(x.sum()))\n{after}\n"
    )
    command = [sys.executable, "-m", "meshwise", "run", "--devices", "2xcpu", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert ended.returncode != 0
    told = " ".join((ended.stdout + ended.stderr).split())
    assert "Ranks diverged: rank 0 reached sum at alone.py:4; rank 1 " in told


def read_by_dlpack() -> list[Any]:
    import torch

    xp = mw.array_namespace()
    arrays = [xp.asarray(3.0), xp.arange(3, device="cpu:1"), xp.arange(3), xp.arange(3, sharding=xp.replicated())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.from_dlpack(x).tolist() for x in arrays]


def test_dlpack_gives_all_of_an_array_on_each_rank(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(read_by_dlpack) == [[3.0, [0, 1, 2], [0, 1, 2], [0, 1, 2]]] * 2


def dtensors_both_ways() -> list[Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    xp, mesh = mw.array_namespace(), init_device_mesh("cpu", (2,))
    values = np.arange(15.0).reshape(5, 3)
    x = xp.asarray(values, sharding=xp.shard(0, sizes=[1, 4]))
    made = x.to_dtensor(mesh)
    there = [isinstance(made, DTensor), np.array_equal(made.full_tensor().numpy(), values), tuple(made.shape)]
    for placement in (Shard(0), Shard(1), Replicate()):
        given = distribute_tensor(torch.from_numpy(values), mesh, [placement])
        back = xp.from_dtensor(given)
        there += [np.array_equal(back.numpy(), values), back.shards[0].data_ptr() == given.to_local().data_ptr()]
    return there


def test_dtensors_both_ways(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(dtensors_both_ways):
        assert found == [True, True, (5, 3)] + [True] * 6
