"""For a world of one every collective is a plain return. Several ranks: tests/training/script/test_distribute.py.

Tests transfer/groups.py too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwise.reports.recorder import WIDTH, Recorder, make_current
from meshwise.transfer import collectives
from meshwise.transfer.prefetch import prefetch, to_device
from tests.pool import Pool


@pytest.fixture(autouse=True)
def no_group() -> None:
    assert not dist.is_initialized()


@pytest.mark.parametrize("collective", [collectives.all_reduce, collectives.all_reduce_mean])
def test_a_sum_and_a_mean_over_one_rank_are_the_tensor_itself(collective: Callable[[Any], Any]) -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert collective(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]


def test_a_sum_that_is_begun_is_there_at_once() -> None:
    tensor = torch.tensor(3.0)
    assert collectives.begin_sum(tensor).wait() is tensor


def test_gathering_from_one_rank_gives_one_row() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert collectives.all_gather(tensor).shape == (1, 2, 3)
    assert collectives.all_gather(torch.tensor(5)).tolist() == [5]
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]


def test_rank_0_is_this_one() -> None:
    tensor = torch.tensor(3.0)
    assert collectives.world_size() == 1
    assert collectives.broadcast_object("x") == "x"
    collectives.broadcast_tensors([tensor])
    collectives.barrier()
    assert tensor.item() == 3.0


def on_every_rank() -> Any:
    rank = dist.get_rank()
    own = torch.full((2,), float(rank + 1))
    recorder = Recorder()
    before = make_current(recorder)
    begun = collectives.begin_sum(torch.tensor(rank + 1))
    future = collectives.begin_mean(own.clone())
    broadcast = [torch.tensor(rank + 1.0), torch.nn.Parameter(own.clone())]
    collectives.broadcast_tensors(broadcast)  # type: ignore[arg-type]
    found = {
        "sum": collectives.all_reduce(own.clone()).tolist(),
        "mean": collectives.all_reduce_mean(own.clone()).tolist(),
        "begun": begun.wait().item(),
        "future": future.wait().tolist(),
        "gathered": collectives.all_gather(own).tolist(),
        "objects": collectives.gather_objects((rank, "x")),
        "object": collectives.broadcast_object({"from": rank}),
        "broadcast": [tensor.tolist() for tensor in broadcast],
        "size": collectives.world_size(),
    }
    make_current(before)
    rows, _ = recorder.drain()
    spans = [rows[at : at + WIDTH] for at in range(0, len(rows), WIDTH)]
    named = sorted((number, *recorder.names[code][1:], size) for code, _, _, _, size, number in spans)
    return found | {"spans": named, "forwards": all(start <= end for _, start, end, *_ in spans)}


def test_three_ranks_see_what_one_would_compute_from_all(pool: Callable[[int], Pool]) -> None:
    expected = {
        "sum": [6.0, 6.0],
        "mean": [2.0, 2.0],
        "begun": 6,
        "future": [2.0, 2.0],
        "gathered": [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]],
        "objects": [(0, "x"), (1, "x"), (2, "x")],
        "object": {"from": 0},
        "broadcast": [1.0, [1.0, 1.0]],
        "size": 3,
        "forwards": True,
        "spans": [
            (0, "communication", "all-reduce", 8),
            (1, "communication", "all-reduce", 8),
            (2, "main", "broadcast", 12),
            (3, "main", "all-reduce", 8),
            (4, "main", "all-reduce", 8),
            (5, "main", "all-gather", 24),
            (6, "main", "all-gather", 0),
            (7, "main", "broadcast", 0),
        ],
    }
    for found in pool(3).run(on_every_rank):
        assert found == expected


def test_batches_for_the_cpu_are_passed_on_in_order_and_not_ahead() -> None:
    made: list[int] = []

    def batches() -> Any:
        for i in range(3):
            made.append(i)
            yield torch.tensor(i), f"facts {i}"

    stream = prefetch(batches(), "cpu")
    first, facts = next(stream)
    assert (first.item(), facts, made) == (0, "facts 0", [0])
    assert [facts for _, facts in stream] == ["facts 1", "facts 2"]


def test_a_batch_that_is_where_it_belongs_is_not_copied() -> None:
    batch = {"x": torch.ones(1)}
    assert next(prefetch([(batch, 0)], "cpu"))[0] is batch
    assert to_device(batch, "meta")["x"].device.type == "meta"


def entered_by_a_send_that_is_begun() -> list[str]:
    entered: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "enter", lambda name, group: entered.append(f"{name} {group}") or 0)
        patch.setattr(collectives, "leave", lambda beat: entered.append("over"))
        if dist.get_rank() == 0:
            collectives.begin_send(torch.ones(3), 1)()
        else:
            collectives.receive(torch.zeros(3), 0)
    return entered


def test_who_waits_until_what_it_has_sent_is_taken_says_for_whom(pool: Pool) -> None:
    """A stage that waits so was blamed for the hang of the next one."""
    assert pool(2).run(entered_by_a_send_that_is_begun) == [["send 1/>", "over"], ["receive 0/>", "over"]]
