"""The allocator's rules by hand-made sequences, each counted from c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random

import pytest
from planner.works import computes, gathers, receives, sends, work

from meshwise.planner.allocator import Replayed, device_total, replay, reserved_on, rounded, segment_size, workspace
from meshwise.planner.work import Allocate, Event, Free

MIB = 1 << 20


def sequence(*sizes: int | tuple[int, str], free: tuple[int, ...] = ()) -> list[Event]:
    """Allocations numbered from 0, then what is given back."""
    taken = [size if isinstance(size, tuple) else (size, "main") for size in sizes]
    events: list[Event] = [Allocate(number, size, "temporary", False, on) for number, (size, on) in enumerate(taken)]
    return [*events, *map(Free, free)]


def of(*events: Event, cap: int | None = None) -> Replayed:
    return replay([work(*events)], cap)


@pytest.mark.parametrize(
    ("size", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_blocks(size: int, block: int) -> None:
    assert rounded(size) == block
    assert of(*sequence(size)).allocated == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size) == segment
    assert of(*sequence(size)).reserved == segment


def test_small_ones_share_a_segment_and_not_with_large_ones() -> None:
    assert of(*sequence(*[512] * 4096)).reserved == 2 * MIB
    assert of(*sequence(*[512] * 4097)).reserved == 4 * MIB
    assert of(*sequence(512, 5 * MIB)).reserved == 22 * MIB
    assert of(*sequence(*[5 * MIB] * 4)).reserved == 20 * MIB
    assert of(*sequence(*[5 * MIB] * 5)).reserved == 40 * MIB


def test_a_freed_block_is_used_again_and_stays_reserved() -> None:
    again = of(*sequence(30 * MIB, free=(0,)), Allocate(1, 30 * MIB, "temporary"))
    assert (again.reserved, again.allocated) == (30 * MIB, 30 * MIB)
    both = of(*sequence(30 * MIB, free=(0,)), Allocate(1, 32 * MIB, "temporary"))
    assert (both.reserved, both.allocated) == (62 * MIB, 32 * MIB)


def test_a_stream_does_not_use_what_another_has_freed() -> None:
    other = of(*sequence((30 * MIB, "side"), free=(0,)), Allocate(1, 30 * MIB, "temporary"))
    assert other.reserved == 60 * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_remains() -> None:
    whole = of(*sequence(30 * MIB, free=(0,)), Allocate(1, 29 * MIB, "temporary"))
    assert whole.allocated == 30 * MIB  # 1 MiB remains: it belongs to the block
    split = of(*sequence(30 * MIB, free=(0,)), Allocate(1, 28 * MIB, "temporary"), Allocate(2, 2 * MIB, "temporary"))
    assert (split.allocated, split.reserved) == (30 * MIB, 30 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    found = of(
        *sequence(40 * MIB, 20 * MIB, 30 * MIB, free=(0, 1, 2)),
        Allocate(3, 28 * MIB, "temporary"),  # of the 30, the 40 stays whole
        Allocate(4, 40 * MIB, "temporary"),
        Allocate(5, 20 * MIB, "temporary"),
    )
    assert found.reserved == 90 * MIB


def test_free_neighbours_become_one_in_any_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        events = sequence(6 * MIB, 6 * MIB, 8 * MIB, free=order)
        assert of(*events, Allocate(3, 20 * MIB, "temporary")).reserved == 20 * MIB, order
    held = of(*sequence(6 * MIB, 6 * MIB, 8 * MIB, free=(0, 2)), Allocate(3, 14 * MIB, "temporary"))
    assert held.reserved == 34 * MIB  # 14 MiB are free, but not beside each other


def test_a_cap_gives_cached_segments_back_before_it_fails() -> None:
    events = (*sequence(30 * MIB, 30 * MIB, free=(0, 1)), Allocate(2, 40 * MIB, "temporary"))
    assert of(*events).reserved == 100 * MIB
    capped = of(*events, cap=64 * MIB)
    assert (capped.reserved, capped.retries, capped.failed) == (60 * MIB, 1, False)


def test_a_segment_of_which_a_part_is_used_is_not_given_back() -> None:
    events = (*sequence(6 * MIB, 6 * MIB, free=(0,)), Allocate(2, 10 * MIB, "temporary"))
    assert of(*events, cap=30 * MIB - 1).failed and not of(*events, cap=30 * MIB).failed


def test_what_is_held_comes_first_and_host_memory_is_not_counted() -> None:
    held = (Allocate(0, 30 * MIB, "parameters"), Allocate(1, 1 << 40, "optimizer", on_host=True))
    own = work(Allocate(2, 512, "temporary"), Free(1), Free(2))
    own = type(own)(0, 8, "gpu", held, own.events)
    assert replay([own]).reserved == 32 * MIB
    assert replay([own], first=(workspace("hopper"),)).reserved == 64 * MIB
    assert replay([own], cap=31 * MIB).failed


def test_steps_follow_each_other_on_one_heap() -> None:
    one = work(*sequence(30 * MIB, free=(0,)))
    assert replay([one, one]).reserved == 30 * MIB
    kept = work(Allocate(0, 30 * MIB, "gradients"))
    then = work(Free(0), Allocate(1, 30 * MIB, "gradients"))
    assert replay([kept, then]).reserved == 30 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_keeps_its_sums(seed: int) -> None:
    draw = random.Random(seed)
    events: list[Event] = []
    alive: list[int] = []
    for number in range(400):
        if alive and draw.random() < 0.5:
            events.append(Free(alive.pop(draw.randrange(len(alive)))))
        size = int(2 ** draw.uniform(0, 26))
        events.append(Allocate(number, size, "temporary", False, draw.choice(("main", "side"))))
        alive.append(number)
    live: dict[int, int] = {}
    least = 0
    for event in events:
        if isinstance(event, Allocate):
            live[event.storage] = rounded(event.size)
        elif isinstance(event, Free):
            del live[event.storage]
        least = max(least, sum(live.values()))
    found = of(*events)
    assert least <= found.allocated <= found.reserved and found.reserved % (2 * MIB) == 0
    exact = of(*events, cap=found.reserved)
    assert not exact.failed and exact.retries == 0
    below = of(*events, cap=least - 512)
    assert below.failed
    everything = [*events, *map(Free, live)]
    assert of(*everything, Allocate(-5, 512, "temporary")).reserved == found.reserved


def test_the_device_holds_more_than_the_allocator_s_segments() -> None:
    alone = device_total(10 << 30, work(computes()))
    assert alone.parts["communicators"] == 0 and alone.bytes > 10 << 30 and alone.low >= 10 << 30
    several = work(gathers((0, 1)), gathers((0, 2)), gathers((0, 1)), sends(0, 3), receives(3, 0))
    total = device_total(10 << 30, several)
    assert total.parts["communicators"] == 2 * (1 << 29) + (1 << 28)
    assert total.low < total.bytes == sum(total.parts.values()) < total.high


@pytest.mark.parametrize(("largest", "fits"), [(50, True), (70, True), (79, False), (90, False)])
def test_a_device_gives_cached_segments_back_before_it_is_full(largest: int, fits: bool) -> None:
    """Without its capacity it would hold all three, one beside the other, whatever is used at a time."""
    events: list[Event] = []
    for number, size in enumerate((30, 40, largest)):
        events += [Allocate(number, size << 30, "temporary"), Free(number)]
    own = work(*events)
    capacity = 80 << 30
    assert reserved_on([own], "H100") >= (70 + largest) << 30
    within = reserved_on([own], "H100", capacity)
    assert (device_total(within, own).high <= capacity) == fits
    assert fits or within >= largest << 30
