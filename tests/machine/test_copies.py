"""Paths of copies: which there are, and that a byte which does not arrive is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwise.machine.measure.copies import CopySpec, copy_paths, copy_spec, measure_copy
from meshwise.machine.measure.result import PathResult

SIZES = (1024, 4096, 65536)


def copied(target: Tensor, source: Tensor, how: str) -> None:
    target.copy_(source)


def measured(path: CopySpec, move: Callable[[Tensor, Tensor, str], None] = copied) -> PathResult:
    return measure_copy(path, SIZES, 10.0, move, lambda name: "cpu")


def test_every_pair_has_its_paths() -> None:
    paths = copy_paths(["cuda:0", "cuda:1", "cuda:2"], lambda a, b: {a, b} != {"cuda:0", "cuda:2"})
    one_way = [(p.source, p.target, p.path) for p in paths if p.operation == "copy"]
    assert len(one_way) == len(set(one_way)) == 3 * 4 + 2 * 4 + 2
    assert ("cuda:0", "cuda:2", "peer") not in one_way and ("cuda:0", "cuda:2", "staged") in one_way
    (fan_out,) = [p for p in paths if p.operation == "one-to-all"]
    assert fan_out.legs == (("cuda:0", "cuda:1"), ("cuda:0", "cuda:2")) and fan_out.path == "staged"


def test_one_device_has_paths_to_the_host_only() -> None:
    assert {(p.source, p.target) for p in copy_paths(["cuda:0"], lambda a, b: True)} == {
        ("host", "cuda:0"),
        ("cuda:0", "host"),
    }


PAGEABLE = copy_spec("copy", "host", "cpu:0", "pageable")
FAN_IN = copy_spec("all-to-one", "all", "cpu:0", "peer", ("cpu:1", "cpu:0"), ("cpu:2", "cpu:0"))


def test_a_path_that_works_has_times_by_size() -> None:
    result = measured(PAGEABLE)
    assert result.wrong is None and result.timings.sizes == SIZES and all(s > 0 for s in result.timings.seconds)
    assert len(result.timings.p95) == len(result.timings.p99) == len(SIZES) and result.ranks == 2


def test_ranks_are_those_that_take_part() -> None:
    assert measured(FAN_IN).ranks == 3


def zeros(target: Tensor, source: Tensor, how: str) -> None:
    target.zero_()


def nothing(target: Tensor, source: Tensor, how: str) -> None:
    pass


def one_bit(target: Tensor, source: Tensor, how: str) -> None:
    target.copy_(source)
    target[target.numel() // 2] ^= 16


def swapped(target: Tensor, source: Tensor, how: str) -> None:
    half = target.numel() // 2
    target[:half], target[half:] = source[half:], source[:half]


@pytest.mark.usefixtures("takes_seconds")
@pytest.mark.parametrize("fault", [zeros, nothing, one_bit, swapped])
@pytest.mark.parametrize("path", [PAGEABLE, FAN_IN])
def test_what_does_not_arrive_is_found_and_named(path: CopySpec, fault: Callable[[Tensor, Tensor, str], None]) -> None:
    wrong = measured(path, fault).wrong
    assert wrong is not None and f"{path.legs[0][0]} -> cpu:0, {path.path}: byte " in wrong
    if fault is one_bit:
        assert f"byte {SIZES[-1] // 2:,} of {SIZES[-1]:,}" in wrong


def test_a_leg_that_gets_another_legs_data_is_found() -> None:
    sent: list[Tensor] = []

    def always_the_first(target: Tensor, source: Tensor, how: str) -> None:
        sent.append(source)
        target.copy_(sent[-2] if len(sent) % 2 == 0 else source)

    wrong = measured(FAN_IN, always_the_first).wrong
    assert wrong is not None and "cpu:2 -> cpu:0" in wrong


def test_a_path_that_is_too_slow_leaves_large_sizes_out_and_says_so() -> None:
    def slow(target: Tensor, source: Tensor, how: str) -> None:
        torch.ones(1 << 16).sum() if target.numel() < 4096 else None
        for _ in range(target.numel() // 1024):
            torch.ones(1 << 12).sum()
        target.copy_(source)

    result = measure_copy(PAGEABLE, (1024, 1 << 22), 0.05, slow, lambda name: "cpu")
    assert result.timings.sizes == (1024,) and "4.0 MiB and more were left out" in result.note
