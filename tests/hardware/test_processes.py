"""Links and collectives measured between ranks: every path is there, agreed, checked, and what is done is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from meshwise.hardware.measure.processes import measure_hosts, measure_processes, measure_ranks, paths_between
from meshwise.hardware.measure.result import PathResult, Progress, listeners, sent_over
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.machine import Machine
from meshwise.spec.timings import Timings, fitted
from meshwise.transfer.groups import group_of
from tests.pool import Pool

pytestmark = pytest.mark.usefixtures("processes")

SIZES = (1024, 16384)
SHARES = [WorkerSlot("cpu", None, (), 1)] * 2
COLLECTIVES = ["all-reduce", "send-receive", "broadcast", "all-gather", "reduce-scatter", "all-to-all"]


def named(result: PathResult) -> str:
    return f"{result.operation} {result.source} {result.target}".strip()


def test_two_workers_measure_what_lies_between_them_and_tell_of_each_path() -> None:
    heard: list[PathResult] = []
    words: list[str] = []
    results = measure_processes(SHARES, SIZES, 1.0, progress=Progress(words.append, heard.append))
    links = ["copy cpu:0 cpu:1", "copy cpu:1 cpu:0"]
    assert [named(result) for result in results] == links + COLLECTIVES
    assert heard == results
    assert words[0] == "copy cpu:0 -> cpu:1, gloo, 1.0 KiB"
    for result in results:
        timings = result.timings
        assert (result.wrong, result.path, result.ranks) == (None, "gloo", 2)
        assert timings.sizes == SIZES or (result.note and timings.sizes == SIZES[:1])
        assert all(0 < s <= p95 <= p99 for s, p95, p99 in zip(timings.seconds, timings.p95, timings.p99, strict=True))
        assert len(timings.in_step) == len(timings.sizes) and all(each > 0 for each in timings.in_step)


def of_three(budget: float) -> list[PathResult]:
    return measure_ranks([f"cpu:{rank}" for rank in range(3)], SIZES, budget)


def test_three_ranks_have_the_same_results(pool: Callable[[int], Pool]) -> None:
    first, *others = pool(3).run(of_three, 1.0)
    assert others == [first, first]
    results = first
    assert len({named(result) for result in results}) == len(results) == 6 + len(COLLECTIVES)
    assert {r.ranks for r in results if r.operation == "copy"} == {2}
    assert {r.ranks for r in results if r.operation in COLLECTIVES} == {3}
    assert all(result.wrong is None for result in results)
    for result in results:  # sizes of parts are whole bytes
        assert all(0 <= asked - size < 12 for asked, size in zip(SIZES, result.timings.sizes, strict=False))


def test_a_budget_that_is_spent_stops_a_path_after_its_first_size_and_says_so(pool: Callable[[int], Pool]) -> None:
    results = pool(3).run(of_three, 0.0)[0]
    assert all(len(result.timings.sizes) == 1 for result in results)
    assert results[0].note.startswith("copy cpu:0 -> cpu:1, gloo: stopped after 1.0 KiB; 16.0 KiB would take")


def with_a_fault() -> list[tuple[str, str | None, int]]:
    """Every all_to_all_single swaps two parts on rank 1."""
    right = dist.all_to_all_single

    def swapped(out: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        result = right(out, *arguments, **more)
        if dist.get_rank() == 1:
            out.copy_(out.roll(len(out) // 2))
        return result

    with mock.patch.object(dist, "all_to_all_single", swapped):
        results = measure_ranks(["cpu:0", "cpu:1"], SIZES, 1.0, ("collectives",))
    return [(result.operation, result.wrong, len(result.timings.sizes)) for result in results]


def test_a_path_that_corrupts_is_named_and_the_others_go_on(pool: Callable[[int], Pool]) -> None:
    for results in pool(2).run(with_a_fault):
        assert [operation for operation, _, _ in results] == COLLECTIVES
        for operation, wrong, sizes in results:
            if operation == "all-to-all":
                assert sizes == 1
                assert wrong == "all-to-all, gloo, 1.0 KiB: on rank 1, the data of rank 0 is wrong from byte 0"
            else:
                assert wrong is None


def in_a_group() -> list[str]:
    group = group_of([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    return [named(r) for r in measure_ranks(["node0", "node1"], SIZES[:1], 0.2, ("links",), group=group)]


def test_a_group_of_ranks_measures_without_the_others(pool: Callable[[int], Pool]) -> None:
    found = pool(4).run(in_a_group)
    links = ["copy node0 node1", "copy node1 node0"]
    assert found == [[], links, [], links]


def test_what_was_measured_before_a_rank_died_is_known(own_fork_server: None) -> None:
    heard: list[PathResult] = []

    def kill_one(text: str) -> None:
        if text.startswith("broadcast"):
            own = sorted(workers() - others, key=lambda worker: (worker.create_time(), worker.pid))
            own[-1].kill()  # after their server and rank 0

    others = workers()
    with pytest.raises(WorkerFailed) as error:
        measure_processes(SHARES, SIZES, 1.0, ("collectives",), Progress(kill_one, heard.append))
    assert error.value.rank == 1
    assert [result.operation for result in heard][:2] == ["all-reduce", "send-receive"]


def test_a_ctrl_c_keeps_what_is_done_and_leaves_nobody_over(own_fork_server: None) -> None:
    heard: list[PathResult] = []

    def press(result: PathResult) -> None:
        heard.append(result)
        raise KeyboardInterrupt

    others = workers()
    with pytest.raises(KeyboardInterrupt):
        measure_processes(SHARES, SIZES, 1.0, ("collectives",), Progress(done=press))
    assert [result.operation for result in heard] == ["all-reduce"]
    assert workers() == others


def workers() -> set[psutil.Process]:
    """Those that this process has started and that run: of the tests' pools, and of what is measured."""
    return {p for p in psutil.Process().children(recursive=True) if "meshwise.workers" in p.cmdline()}


def test_what_a_worker_reports_reaches_its_launcher_as_it_was() -> None:
    timings = fitted([8, 64], [1e-5, 1e-5], [2e-5, 2e-5], [3e-5, 3e-5])
    assert timings.bandwidth == math.inf
    sent: list[dict[str, Any]] = []
    channel = mock.Mock()
    channel.send = lambda kind, **facts: sent.append(json.loads(json.dumps({"kind": kind, **facts})))
    result = PathResult("all-reduce", "", "", "nccl", 8, Timings((8,), (1.0,), 0.0, 8.0, 0.0), "wrong", "note")
    events = ["copy, gloo", PathResult("copy", "cpu:0", "cpu:1", "gloo", 2, timings), result]
    worker = sent_over(channel)
    worker.starts(events[0])
    worker.done(events[1])
    worker.done(events[2])
    worker.found([Machine("here", ())])
    received: list[object] = []
    hear = listeners(Progress(received.append, received.append, received.append)).message
    for message in [{"kind": "done"}, *sent]:
        hear(0, message)
    assert received == [*events, [Machine("here", ())]]


def test_one_rank_has_nothing_to_measure() -> None:
    assert measure_ranks(["cpu:0"], SIZES, 1.0) == []


def test_every_collective_is_measured_by_its_backend() -> None:
    paths = paths_between(["cuda:0", "cuda:1"], "nccl", ("collectives",))
    assert [(path.operation, path.path) for path in paths] == [(name, "nccl") for name in COLLECTIVES]


def test_what_cannot_be_measured_is_said_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="Did you mean 'links'"):
        measure_processes(SHARES, SIZES, 1.0, ("link",))


def test_between_hosts_needs_a_launcher() -> None:
    with pytest.raises(UsageError, match="only this one takes part"):
        measure_hosts(SIZES, 1.0)
