"""Under null collectives nothing moves, shapes are right and everything is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives
from meshwise.transfer.null import Counted, null_collectives
from tests.pool import Pool

EVERYONE = tuple(range(8))


def test_one_process_plays_a_rank_of_eight() -> None:
    tensor = torch.arange(16.0).view(8, 2)
    with null_collectives(world_size=8, rank=3) as counts:
        assert (collectives.world_size(), collectives.own_rank()) == (8, 3)
        assert collectives.all_reduce(tensor) is tensor
        assert collectives.all_gather(tensor).shape == (8, 8, 2)
        assert collectives.reduce_scatter(tensor).equal(tensor[3:4])
        assert collectives.begin_all_to_all(tensor)().shape == (8, 2)
        assert collectives.all_to_all(tensor, send=[1] * 8, receive=[2] * 8).shape == (16, 2)
        assert collectives.broadcast(tensor, 7) is tensor
        assert collectives.gather(tensor, target=2) is None
        gathered = collectives.gather(tensor, target=3)
        assert gathered is not None and gathered.shape == (8, 8, 2)
        assert collectives.scatter(tensor).shape == (8, 2)
        collectives.send(tensor, 4)
        assert collectives.receive(tensor, 2) is tensor
        collectives.barrier()
    assert counts == [
        Counted("all-reduce", 64, EVERYONE),
        Counted("all-gather", 512, EVERYONE),
        Counted("reduce-scatter", 64, EVERYONE),
        Counted("all-to-all", 64, EVERYONE),
        Counted("all-to-all", 64, EVERYONE),
        Counted("broadcast", 64, EVERYONE),
        Counted("gather", 512, EVERYONE),
        Counted("gather", 512, EVERYONE),
        Counted("scatter", 512, EVERYONE),
        Counted("send", 64, (3, 4)),
        Counted("receive", 64, (2, 3)),
        Counted("barrier", 0, EVERYONE),
    ]
    assert collectives.world_size() == 1


def test_what_the_rest_of_meshwise_calls_is_counted_too() -> None:
    with null_collectives(world_size=4) as counts:
        assert collectives.mean_future(torch.ones(2)).wait().tolist() == [0.25, 0.25]
        assert collectives.begin_sum(torch.ones(2))().tolist() == [1.0, 1.0]
        assert collectives.gather_tensors(torch.ones(2)).shape == (4, 2)
        assert collectives.gather_objects("x") == ["x"] * 4
        assert collectives.broadcast_object("x") == "x"
        collectives.broadcast_tensors([torch.ones(2), torch.ones(3)])
    assert [(count.kind, count.bytes) for count in counts] == [
        ("all-reduce", 8),
        ("all-reduce", 8),
        ("all-gather", 32),
        ("broadcast", 20),
    ]


def test_a_group_counts_its_own_ranks() -> None:
    with null_collectives(world_size=8, rank=5) as counts:
        group = collectives.group_of([4, 5, 7])
        assert (collectives.world_size(group), collectives.own_rank(group)) == (3, 1)
        collectives.all_reduce(torch.ones(1), group=group)
        collectives.send(torch.ones(1), 2, group)
        collectives.all_reduce(torch.ones(1), group=collectives.group_of([5]))
    assert counts == [Counted("all-reduce", 4, (4, 5, 7)), Counted("send", 4, (5, 7))]


def test_blocks_may_be_nested() -> None:
    with null_collectives(2) as outer, null_collectives(3) as inner:
        collectives.barrier()
    assert (len(outer), [count.ranks for count in inner]) == (0, [(0, 1, 2)])


def test_shapes_are_right_for_tensors_without_data() -> None:
    with null_collectives(4):
        assert collectives.all_gather(torch.empty(5, device="meta")).shape == (4, 5)
        assert collectives.reduce_scatter(torch.empty(8, 5, device="meta")).shape == (2, 5)


def played_inside_a_run() -> tuple[int, int, int]:
    with null_collectives(100, rank=7):
        played = collectives.world_size()
        collectives.all_reduce(torch.ones(1))  # alone: the other rank is not asked
    return played, collectives.world_size(), dist.get_world_size()


def test_a_rank_of_a_real_run_may_play_another_world(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(played_inside_a_run) == [(100, 2, 2)] * 2


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_cannot_be_is_refused(size: int, rank: int) -> None:
    with pytest.raises(UsageError, match="there is no such rank"), null_collectives(size, rank):
        pass


def test_a_group_of_a_world_that_is_over_has_no_ranks_to_talk_to() -> None:
    with null_collectives(2):
        group = collectives.group_of([0, 1])
    with pytest.raises(UsageError, match="made under null_collectives"):
        collectives.all_reduce(torch.ones(1), group=group)
