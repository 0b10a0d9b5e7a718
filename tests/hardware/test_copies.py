"""Copies of one process: every path is measured, and a byte that does not arrive is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwise.hardware.measure.copies import copy_paths, measure_copy, measure_in_process
from meshwise.hardware.measure.result import PathResult, PathSpec, Progress
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.virtual import virtual_devices

SIZES = (1024, 4096, 65536)


def copied(target: Tensor, source: Tensor, how: str) -> None:
    target.copy_(source)


def measured(path: PathSpec, move: Callable[[Tensor, Tensor, str], None] = copied) -> PathResult:
    return measure_copy(path, SIZES, 10.0, move)


def test_every_pair_has_its_paths() -> None:
    paths = copy_paths(["cuda:0", "cuda:1", "cuda:2"], lambda a, b: {a, b} != {"cuda:0", "cuda:2"})
    one_way = [(p.source, p.target, p.path) for p in paths]
    assert len(one_way) == len(set(one_way)) == 3 * 4 + 2 * 4 + 2
    assert ("cuda:0", "cuda:2", "peer") not in one_way and ("cuda:0", "cuda:2", "staged") in one_way


def test_one_device_has_paths_to_the_host_only() -> None:
    assert {(p.source, p.target) for p in copy_paths(["cuda:0"], lambda a, b: True)} == {
        ("host", "cuda:0"),
        ("cuda:0", "host"),
    }


PAGEABLE = PathSpec("copy", "host", "cpu:0", "pageable", 2)
PEER = PathSpec("copy", "cpu:1", "cpu:0", "peer", 2)


def test_a_path_that_works_has_times_by_size() -> None:
    result = measured(PAGEABLE)
    assert result.wrong is None and result.timings.sizes == SIZES and all(s > 0 for s in result.timings.seconds)
    assert len(result.timings.p95) == len(result.timings.p99) == len(SIZES) and result.ranks == 2


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
@pytest.mark.parametrize("path", [PAGEABLE, PEER])
def test_what_does_not_arrive_is_found_and_named(path: PathSpec, fault: Callable[[Tensor, Tensor, str], None]) -> None:
    wrong = measured(path, fault).wrong
    assert wrong is not None and f"{path.source} -> cpu:0, {path.path}: byte " in wrong
    if fault is one_bit:
        assert f"byte {SIZES[-1] // 2:,} of {SIZES[-1]:,}" in wrong


def test_a_path_that_is_too_slow_leaves_large_sizes_out_and_says_so() -> None:
    def slow(target: Tensor, source: Tensor, how: str) -> None:
        torch.ones(1 << 16).sum() if target.numel() < 4096 else None
        for _ in range(target.numel() // 1024):
            torch.ones(1 << 12).sum()
        target.copy_(source)

    result = measure_copy(PAGEABLE, (1024, 1 << 22), 0.05, slow)
    assert result.timings.sizes == (1024,) and "4.0 MiB and more were left out" in result.note


def test_every_path_is_measured_and_seen_by_the_log() -> None:
    heard: list[PathResult] = []
    said: list[str] = []
    with virtual_devices(2), comm_log() as log:
        measure_in_process(["cpu:0", "cpu:1"], (1024, 4096), 2.0, Progress(said.append, heard.append))
    paths = [(result.source, result.target, result.path) for result in heard]
    ends = [("host", "cpu:0"), ("cpu:0", "host"), ("host", "cpu:1"), ("cpu:1", "host")]
    assert paths == [(*pair, "pageable") for pair in ends]
    assert all(result.wrong is None and result.timings.sizes == (1024, 4096) for result in heard)
    assert said[0] == "copy host -> cpu:0, pageable"
    assert {(move.source, move.target) for move in log} == {(source, target) for source, target, _ in paths}


def test_a_byte_that_the_copy_loses_is_found() -> None:
    heard: list[PathResult] = []
    with virtual_devices(1) as devices:
        devices.on_copy = lambda dst, src, path: dst.view(-1)[7:8].zero_()
        measure_in_process(["cpu:0"], (1024,), 0.2, Progress(done=heard.append))
    assert [result.wrong is not None and "byte 7 of 1,024" in result.wrong for result in heard] == [True, True]
