"""Collectives of real ranks agree with what one process computes from all tensors, whatever kind of tensor it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.reports.recorder import WIDTH, Recorder, make_current
from meshwise.reports.spans import NO_COLLECTIVE
from meshwise.torch_compat import collectives as compat
from meshwise.transfer import collectives
from meshwise.transfer.comm_log import comm_log
from tests.pool import Pool

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
LAYOUTS = ("contiguous", "transposed", "strided", "without elements", "conjugated")


def tensor_of(rank: int, ranks: int, dtype: torch.dtype, layout: str) -> Tensor:
    """What rank `rank` has; any process can make it. The first dimension is divisible by the ranks."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = {"without elements": (ranks, 0), "strided": (2 * ranks, 6)}.get(layout, (2 * ranks, 2 * ranks))
    values = torch.randint(0, 3, shape, generator=generator)
    tensor = values.to(dtype) if not dtype.is_complex else torch.complex(values.double(), -values.double()).to(dtype)
    if layout == "transposed":
        return tensor.t()
    if layout == "strided":
        return tensor[:, ::3]
    return tensor.conj() if layout == "conjugated" else tensor


def summed(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dtype == torch.bool:
        return torch.stack(tensors).any(0)
    wide = torch.float32 if tensors[0].dtype.itemsize == 1 and tensors[0].dtype.is_floating_point else None
    if wide is None and not tensors[0].dtype.is_floating_point and not tensors[0].dtype.is_complex:
        wide = torch.int64
    return torch.stack([t.to(wide) if wide else t for t in tensors]).sum(0).to(tensors[0].dtype)


def same(found: Tensor | None, expected: Tensor) -> bool:
    return (
        found is not None
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and (compat.as_bytes(found).equal(compat.as_bytes(expected)) or (found.is_complex() and found.equal(expected)))
    )  # complex zeros may differ in their sign


def every_collective(dtype: torch.dtype, layout: str) -> list[str]:
    """The collectives that give this rank something else than one process computes."""
    rank, ranks = collectives.get_rank(), collectives.world_size()
    all_of_them = [tensor_of(at, ranks, dtype, layout) for at in range(ranks)]
    own, rows, last = all_of_them[rank], len(all_of_them[0]) // ranks, ranks - 1
    mine = slice(rank * rows, (rank + 1) * rows)

    def writable(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    sums = summed(all_of_them)
    if rank % 2 == 0:
        collectives.send(own, (rank + 1) % ranks)
        got = own
    else:
        got = collectives.receive(writable(own), (rank - 1) % ranks)
    swapped = writable(own)
    collectives.send_receive([(own, ranks - 1 - rank)], [(swapped, ranks - 1 - rank)])
    checks = {
        "all_reduce": same(collectives.all_reduce(writable(own)), sums),
        "a sum that is begun": same(collectives.begin_sum(writable(own)).wait(), sums),
        "all_gather": same(collectives.all_gather(own), torch.stack(all_of_them)),
        "reduce_scatter": same(collectives.reduce_scatter(own), sums[mine]),
        "broadcast": same(collectives.broadcast(writable(own), last), all_of_them[last]),
        "all_to_all": same(collectives.all_to_all(own), torch.cat([t[mine] for t in all_of_them])),
        "send and receive": same(got, all_of_them[rank - rank % 2]),
        "send_receive": same(swapped, all_of_them[ranks - 1 - rank]),
    }
    return [name for name, right in checks.items() if not right]


def of_all_kinds(layout: str, direct_from: int) -> list[str]:
    before, compat.DIRECT_FROM = compat.DIRECT_FROM, direct_from
    try:
        return [f"{name} of {dtype}" for dtype in DTYPES for name in every_collective(dtype, layout)]
    finally:
        compat.DIRECT_FROM = before


@pytest.mark.parametrize("direct_from", [compat.DIRECT_FROM, 0], ids=["by gloo", "composed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_is_right_for_every_dtype(
    pool: Callable[[int], Pool], ranks: int, layout: str, direct_from: int
) -> None:
    assert pool(ranks).run(of_all_kinds, layout, direct_from) == [[]] * ranks


def reductions() -> list[str]:
    rank, ranks = collectives.get_rank(), collectives.world_size()
    everyone = torch.arange(1, 2 * ranks + 1).view(ranks, 2).flip(0)
    expected = {"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0), "product": everyone.prod(0)}
    bools = everyone > ranks
    expected_bools = {"sum": bools.any(0), "max": bools.any(0), "min": bools.all(0), "product": bools.all(0)}
    wrong = []
    for op in expected:
        wrong += [op] * (not same(collectives.all_reduce(everyone[rank].clone(), op), expected[op]))
        wrong += [f"{op} of bools"] * (not same(collectives.all_reduce(bools[rank].clone(), op), expected_bools[op]))
        whole = everyone[rank].repeat(ranks, 1)
        wrong += [f"{op} scattered"] * (not same(collectives.reduce_scatter(whole, op)[0], expected[op]))
    return wrong


def test_every_reduction_is_right(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(reductions) == [[]] * 4


def chunks_of_a_chain() -> list[bool]:
    rank, size = collectives.get_rank(), 3 * compat.CHUNK + 5
    found = []
    for source in range(collectives.world_size()):
        expected = torch.arange(size).to(torch.uint8) + source
        tensor = expected.clone() if rank == source else torch.zeros(size, dtype=torch.uint8)
        collectives.broadcast(tensor, source)
        found.append(tensor.equal(expected))
    return found


def test_a_chain_passes_every_chunk_on_whoever_begins(pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(as_composed, chunks_of_a_chain):
        assert found == [True] * 4


def as_composed(function: Callable[[], Any]) -> Any:
    before, compat.DIRECT_FROM = compat.DIRECT_FROM, 0
    try:
        return function()
    finally:
        compat.DIRECT_FROM = before


def in_groups() -> dict[str, Any]:
    rank = dist.get_rank()
    groups = [collectives.group_of(ranks) for ranks in ([0, 1], [2, 3])]
    own = groups[rank // 2]
    peer = 1 - collectives.get_rank(own)
    recorder = Recorder()
    before = make_current(recorder)
    with comm_log() as log:
        found = {
            "sum": collectives.all_reduce(torch.tensor([float(rank)]), group=own).item(),
            "gathered": collectives.all_gather(torch.tensor(rank), own).tolist(),
            "objects": collectives.gather_objects(rank, own),
            "broadcast": collectives.broadcast(torch.tensor([rank]), 1, own).item(),
        }
        box = torch.zeros(1, dtype=torch.int64)
        collectives.send_receive([(torch.tensor([rank]), peer)], [(box, peer)], own)
        collectives.barrier(own)
    make_current(before)
    rows, _ = recorder.drain()
    numbers = {rows[at + WIDTH - 1] for at in range(0, len(rows), WIDTH)}
    moves = [(m.operation, m.source, m.target, m.bytes, m.path, m.seconds > 0) for m in log]
    return found | {"peer": box.item(), "numbers": numbers, "moves": moves}


def test_a_group_is_on_its_own_and_its_spans_have_no_number(pool: Callable[[int], Pool]) -> None:
    for rank, found in enumerate(pool(4).run(in_groups)):
        first, peer = rank - rank % 2, rank + 1 - 2 * (rank % 2)
        both = f"ranks {first},{first + 1}"
        assert found == {
            "sum": 2.0 * first + 1,
            "gathered": [first, first + 1],
            "objects": [first, first + 1],
            "broadcast": first + 1,
            "peer": peer,
            "numbers": {NO_COLLECTIVE},
            "moves": [
                ("all-reduce", both, both, 4, "gloo", True),
                ("all-gather", both, both, 16, "gloo", True),
                ("broadcast", f"rank {first + 1}", both, 8, "gloo", True),
                ("send-receive", f"rank {rank}", f"rank {peer}", 8, "gloo", True),
                ("barrier", both, both, 0, "gloo", True),
            ],
        }


def recorded() -> tuple[list[tuple[int, str, int]], list[tuple[str, int]]]:
    tensor, rank, ranks = torch.zeros(8), dist.get_rank(), dist.get_world_size()
    recorder = Recorder()
    before = make_current(recorder)
    with comm_log() as log:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "begin_sum"):
            result = getattr(collectives, name)(tensor)
        result.wait()
        collectives.send(tensor, 1) if rank == 0 else collectives.receive(tensor, 0)
        collectives.broadcast_tensors([tensor, tensor])
    make_current(before)
    rows, _ = recorder.drain()
    spans = [(rows[at + 5], recorder.names[rows[at]][2], rows[at + 4]) for at in range(0, len(rows), WIDTH)]
    assert ranks == 2 and all(moved.seconds > 0 for moved in log)
    return sorted(spans), [(moved.operation, moved.bytes) for moved in log]


def test_every_collective_leaves_its_span_and_its_line_in_the_log(pool: Callable[[int], Pool]) -> None:
    names = ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "all-reduce"]
    moved = list(zip(names, [32, 64, 32, 32, 32, 32], strict=True))
    for rank, (spans, log) in enumerate(pool(2).run(recorded)):
        point = ("send" if rank == 0 else "receive", 32)
        assert spans == [(NO_COLLECTIVE, *point), *((at, *move) for at, move in enumerate(moved)), (6, "broadcast", 64)]
        assert log == [*moved, point, ("broadcast", 64)]


def test_a_world_of_one_has_what_it_gave() -> None:
    tensor = torch.arange(4.0)
    assert collectives.all_reduce(tensor) is tensor
    assert collectives.all_gather(tensor).equal(tensor.view(1, 4))
    assert collectives.reduce_scatter(tensor).equal(tensor)
    assert collectives.all_to_all(tensor).equal(tensor)
    assert collectives.begin_mean(tensor.clone()).wait().equal(tensor)
