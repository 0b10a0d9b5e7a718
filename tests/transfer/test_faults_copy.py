"""Faults below our code, each at a random place among 1,000 transfers: all found with their path, no false alarm.

What fails is torch's own copy: its method, or the operator under it. Every copy of ours ends there, so what is
corrupted is what a broken link would corrupt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch

from meshwise.spec.errors import TransferError
from meshwise.transfer.checksum import raw_bytes
from meshwise.transfer.copy import copy
from meshwise.transfer.device_collectives import all_reduce, broadcast, gather, scatter
from meshwise.transfer.devices import VirtualDevices
from meshwise.transfer.virtual import virtual_devices

TRANSFERS, SEEDS = 1000, range(20)
Fault = Callable[[Tensor, random.Random], None]


def zeros(arrived: Tensor, draw: random.Random) -> None:
    arrived.zero_()


def swapped_blocks(arrived: Tensor, draw: random.Random) -> None:
    """Two blocks of one length, from 1 element to half of all, change places."""
    flat = arrived.as_strided((arrived.numel(),), (1,))
    length = draw.randint(1, flat.numel() // 2)
    first = draw.randint(0, flat.numel() - 2 * length)
    second = draw.randint(first + length, flat.numel() - length)
    block = flat[first : first + length].clone()
    flat[first : first + length] = flat[second : second + length]
    flat[second : second + length] = block


def flipped_bit(arrived: Tensor, draw: random.Random) -> None:
    raw = raw_bytes(arrived)
    raw[draw.randrange(raw.numel())] ^= 1 << draw.randrange(8)


class Broken:
    """Once armed, one of torch's next copies, by the toss of a coin, gives other bytes than it was given."""

    def __init__(self, fault: Fault, draw: random.Random) -> None:
        self.fault, self.draw, self.armed, self.changed = fault, draw, False, False

    def __call__(self, dst: Tensor) -> None:
        if self.armed and not self.changed and dst.is_contiguous() and dst.numel() > 1 and self.draw.random() < 0.5:
            before = raw_bytes(dst).clone()
            self.fault(dst, self.draw)
            self.changed = not torch.equal(before, raw_bytes(dst))


@pytest.fixture(params=["method", "operator"])
def break_copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Broken], None]]:
    """Put the fault into `Tensor.copy_`, or below all Python into the operator `aten::copy_`."""
    modes = []
    if request.param == "method":
        original = Tensor.copy_

        def through(broken: Broken) -> None:
            def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
                result = original(self, src, non_blocking)
                broken(self)
                return result

            monkeypatch.setattr(Tensor, "copy_", copy_)

    else:

        def through(broken: Broken) -> None:
            class Mode(_python_dispatch.TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                    result = func(*args, **(kwargs or {}))
                    if func is torch.ops.aten.copy_.default:
                        broken(args[0])
                    return result

            modes.append(Mode())
            modes[-1].__enter__()

    yield through
    for mode in modes:
        mode.__exit__(None, None, None)


def random_source(draw: random.Random) -> Tensor:
    """Some layout of some dtype, of 2 to some 20,000 elements, no two of which are alike where the dtype allows it."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    shape = [draw.randint(2, 30) for _ in range(draw.randint(1, 3))]
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64])
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, generator=generator).to(dtype)
    else:
        made = torch.randint(1, 127, shape, generator=generator, dtype=dtype)
    if draw.random() < 0.3:
        made = made.transpose(0, -1)
    return made


def transfers(
    devices: VirtualDevices, draw: random.Random, count: int
) -> Iterator[tuple[str | None, Callable[[], object]]]:
    """Random transfers between random places, each with the check: the path that is asked for, and what transfers."""
    for _ in range(count):
        source, target = draw.sample(list(devices), 2)
        src = random_source(draw)
        devices.places.set(src, source.index)
        kind = draw.random()
        if kind < 0.8:
            dst = torch.empty(src.shape, dtype=src.dtype, device=target)
            path = draw.choice(["peer", "staged"])
            yield path, lambda d=dst, s=src, p=path: copy(d, s, path=p, verify=True)  # type: ignore[misc]
        elif kind < 0.87:
            yield None, lambda s=src: broadcast(s, devices, verify=True)  # type: ignore[misc]
        elif kind < 0.94:
            yield None, lambda s=src, t=target: gather(scatter(s, devices, verify=True), t, verify=True)  # type: ignore[misc]
        else:
            parts = [torch.full((draw.randint(8, 8),), i + 1.5, device=d) for i, d in enumerate(devices)]
            yield None, lambda p=parts: all_reduce(p, verify=True)  # type: ignore[misc]


@pytest.mark.usefixtures("takes_seconds")
@pytest.mark.slow
def test_a_thousand_clean_transfers_raise_no_alarm() -> None:
    with virtual_devices(3) as devices:
        done = [run() for _, run in transfers(devices, random.Random(0), TRANSFERS)]
    assert len(done) == TRANSFERS


FEW = 60  # transfers a seed in the fast test; the slow one has all


def hunt(fault: Fault, seed: int, count: int, break_copies: Callable[[Broken], None]) -> None:
    """One fault at a random place among `count` transfers: that very transfer raises, and no other one."""
    draw = random.Random(seed)
    with virtual_devices(3) as devices:
        broken, place = Broken(fault, draw), draw.randrange(count)
        runs = transfers(devices, draw, count + 20)  # some more, for a coin that falls late
        break_copies(broken)
        for number, (path, run) in enumerate(runs):
            before, broken.armed = broken.changed, number >= place
            try:
                run()
            except TransferError as error:
                assert broken.changed and not before, f"a false alarm: {error}"
                said = re.search(r" from (cpu:\d) to (cpu:\d) by path '(\w+)': .* The first wrong byte is ", str(error))
                assert said is not None, error
                source, target, named = said.groups()
                assert named == (path or ("direct" if source == target else "peer"))
                return
            assert not broken.changed, "a corrupted transfer passed"
    raise AssertionError("no copy was ever corrupted: the fault does not reach what it should")


FAULTS = [zeros, swapped_blocks, flipped_bit]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_fault_among_few_transfers_is_found(
    fault: Fault, seed: int, break_copies: Callable[[Broken], None]
) -> None:
    hunt(fault, seed, FEW, break_copies)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_fault_among_a_thousand_transfers_is_found(
    fault: Fault, seed: int, break_copies: Callable[[Broken], None]
) -> None:
    hunt(fault, seed, TRANSFERS, break_copies)


@pytest.mark.parametrize("size", [1 << 24, pytest.param(1 << 30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ["peer", "staged"])
def test_one_bit_flipped_in_a_large_copy_is_located(size: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(size)
    original = Tensor.copy_
    where: list[int] = []

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        result = original(self, src, non_blocking)
        offset = raw_bytes(self).storage_offset()
        if self.untyped_storage().nbytes() == size and not where and draw.random() < 0.3:  # some chunk of the target
            at = draw.randrange(self.numel() * self.element_size())
            raw_bytes(self)[at] ^= 1 << draw.randrange(8)
            where.append(offset + at)
        return result

    with virtual_devices(2) as devices:
        src = torch.empty(size, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(1))
        dst = torch.empty(size, dtype=torch.uint8)
        for index, tensor in enumerate((src, dst)):
            devices.places.set(tensor, index)
        monkeypatch.setattr(Tensor, "copy_", copy_)
        with pytest.raises(TransferError) as caught:
            for _ in range(20):  # until the coin falls
                copy(dst, src, path=path, verify=True)
    assert f"by path '{path}'" in str(caught.value) and f"The first wrong byte is {where[0]:,} " in str(caught.value)
