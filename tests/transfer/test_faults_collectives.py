"""Faults below our code: torch's collectives, patched inside the ranks to deliver wrong bytes, each once at a random
place among 1,000 transfers. Every one is found at its place and named with its path; clean transfers raise no alarm.

The check is the one that measuring uses (`check_path`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.hardware.measure import cases
from meshwise.hardware.measure.cases import Member
from meshwise.hardware.measure.together import RanksSpec, check_path
from meshwise.torch_compat import collectives as compat
from tests.pool import Pool

TRANSFERS = 1000
SIZE = 4096
PATHS = {
    "all-reduce": RanksSpec("all-reduce", "", "", "gloo", 0, cases.all_reduce),
    "all-gather": RanksSpec("all-gather", "", "", "gloo", 0, cases.all_gather),
    "reduce-scatter": RanksSpec("reduce-scatter", "", "", "gloo", 0, cases.reduce_scatter),
    "broadcast": RanksSpec("broadcast", "", "", "gloo", 0, cases.broadcast),
    "all-to-all": RanksSpec("all-to-all", "", "", "gloo", 0, cases.all_to_all),
    "copy": RanksSpec("copy", "cpu:0", "cpu:1", "gloo", 2, cases.copy(0, 1)),
    "copy back": RanksSpec("copy", "cpu:1", "cpu:0", "gloo", 2, cases.copy(1, 0)),
}
# Each fault with the path that it is in, the function of torch.distributed that has it, and how its path is named.
FAULTS = {
    "a permuted all-gather": ("all-gather", compat._ALL_GATHER, "all-gather, gloo, 4.0 KiB: on rank"),
    "a reduce without one rank": ("all-reduce", "all_reduce", "all-reduce, gloo, 4.0 KiB: the sum on rank"),
    "a scattered reduce without one rank": ("reduce-scatter", compat._REDUCE_SCATTER, "reduce-scatter, gloo, 4.0 KiB:"),
    "a receive of zeros": ("copy back", "irecv", "copy cpu:1 -> cpu:0, gloo, 4.0 KiB: on rank 0, the data of rank 1"),
    "swapped blocks": ("all-to-all", "all_to_all_single", "all-to-all, gloo, 4.0 KiB: on rank"),
    "a broadcast that does not arrive": (
        "broadcast",
        "broadcast",
        "broadcast, gloo, 4.0 KiB: on rank 1, the data of rank 0",
    ),
}


def transfers(seed: int, faults: list[str]) -> tuple[dict[int, str], list[tuple[int, str]]]:
    """Carry out and check 1,000 transfers, each fault in one of them; where it was, and what was found, by number."""
    generator = random.Random(seed)
    names = generator.choices(list(PATHS), k=TRANSFERS)
    place = Member(dist.get_rank(), dist.get_world_size(), None, torch.device("cpu"))
    made = {name: path.make(place, SIZE) for name, path in PATHS.items()}
    where = {}
    for fault in faults:
        where[generator.choice([number for number, name in enumerate(names) if name == FAULTS[fault][0]])] = fault
    found = []
    for number, name in enumerate(names):
        with planted(where[number], generator) if number in where else contextlib.nullcontext():
            wrong = check_path(PATHS[name], place, made[name], number)
        if wrong is not None:
            found.append((number, wrong))
    return where, found


@contextlib.contextmanager
def planted(fault: str, generator: random.Random) -> Iterator[None]:
    """The next call of the fault's function has the fault, on one rank; later calls are right again."""
    _, name, _ = FAULTS[fault]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    victim = {"a receive of zeros": 0, "a broadcast that does not arrive": 1}.get(fault, generator.randrange(ranks))
    place = generator.randrange(0, SIZE // ranks - 64, 8)
    right = getattr(dist, name)

    def once(*arguments: Any, **more: Any) -> Any:
        setattr(dist, name, right)
        return faulty(fault, right, place, *arguments, **more)

    with mock.patch.object(dist, name, once if rank == victim else right):
        yield


def faulty(fault: str, right: Callable[..., Any], place: int, *arguments: Any, **more: Any) -> Any:
    """One wrong call. All of these look as if they had succeeded."""
    if fault == "a broadcast that does not arrive":
        arguments = (torch.empty_like(arguments[0]), *arguments[1:])
    elif "without one rank" in fault:
        at = 1 if "scattered" in fault else 0
        arguments[at].zero_()
    result = right(*arguments, **more)
    if fault == "a permuted all-gather":
        blocks = arguments[0].view(dist.get_world_size(), -1)
        blocks.copy_(blocks.roll(1, 0))
    elif fault == "swapped blocks":
        swap(arguments[0].view(-1), place, place + 32, 32)
    elif fault == "a receive of zeros":
        result.wait()
        arguments[0].zero_()
        result = None  # gloo waits for ever where a receive is waited for twice
    return result


def swap(data: Tensor, one: int, other: int, size: int) -> None:
    data[one : one + size], data[other : other + size] = (
        data[other : other + size].clone(),
        data[one : one + size].clone(),
    )


def check(pool: Pool, seed: int) -> None:
    for where, found in pool.run(transfers, seed, list(FAULTS)):
        assert len(where) == len(FAULTS)
        assert [number for number, _ in found] == sorted(where)
        for number, text in found:
            assert text.startswith(FAULTS[where[number]][2]), where[number]


def test_each_fault_among_a_thousand_transfers_is_found_and_named(pool: Callable[[int], Pool]) -> None:
    check(pool(2), 0)


def test_a_thousand_clean_transfers_raise_no_alarm(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(transfers, 1, []) == [({}, [])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_fault_is_found_wherever_it_is(pool: Callable[[int], Pool], seed: int) -> None:
    check(pool(2 + seed % 2 * 2), seed)
    assert pool(2).run(transfers, seed, []) == [({}, [])] * 2
