"""The checker against every order that there is: races are exactly the accesses that no path of waits orders.

Of checker/races/order.py and checker/races/memory.py too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshwise.checker.races.checker import Checker, Race, Touch
from meshwise.checker.races.memory import MOST_STRIDED, Access, Region, ShadowMemory, have_common_bytes, region_of
from meshwise.torch_compat.gpu_trace import HOST, Lane

LANES = [(0, 0), (0, 7), (1, 0)]
DEFAULT, SIDE, OTHER = LANES


def dense(lo: int, hi: int) -> Region:
    return Region(lo, hi, hi - lo)


WHOLE = dense(0, 64)


def touch(region: Region, writes: bool, block: int = 0, size: int = 64) -> Touch:
    return Touch(block, size, region, writes, "x")


@dataclass
class Graph:
    """All that happens, and what it waits for directly."""

    after: list[set[int]] = field(default_factory=list)
    last: dict[Lane, int] = field(default_factory=dict)
    accesses: list[tuple[int, Lane, Region, bool, int]] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)

    def add(self, lane: Lane, also: int | None = None) -> int:
        waits = {self.last[each] for each in {lane, HOST} if each in self.last}  # the host launches everything
        self.after.append(waits | (set() if also is None else {also}))
        self.last[lane] = len(self.after) - 1
        return self.last[lane]

    def is_before(self, one: int, other: int) -> bool:
        left, seen = [other], set[int]()
        while left:
            node = left.pop()
            if node == one:
                return True
            left += self.after[node] - seen
            seen |= self.after[node]
        return False


def bytes_of(region: Region) -> set[int]:
    starts = [0]
    for step, count in region.outer:
        starts = [at + step * i for at in starts for i in range(count)]
    return {region.lo + at + i for at in starts for i in range(region.run)}


regions = st.one_of(
    st.builds(lambda lo, n: dense(lo, lo + n), st.integers(0, 20), st.integers(1, 12)),
    st.builds(
        lambda lo, item, rows, step: region_of(lo, item, (rows, 1), (step, 1)),
        st.integers(0, 10),
        st.integers(1, 2),
        st.integers(2, 4),
        st.integers(2, 4),
    ),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.sampled_from([*LANES, HOST]), regions, st.booleans()),
        st.tuples(st.just("record"), st.sampled_from(LANES), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.sampled_from([*LANES, HOST]), st.integers(0, 2)),
        st.tuples(st.just("synchronize"), st.sampled_from(LANES)),
    ),
    max_size=30,
)


def run(program: list[Any]) -> tuple[list[Race], Graph]:
    races, graph = list[Race](), Graph()
    checker = Checker(races.append, forgive=False)
    for number, (kind, lane, *rest) in enumerate(program):
        if kind == "touch":
            region, writes = rest
            node = graph.add(lane)
            graph.accesses.append((node, lane, region, writes, number))
            checker.touch(lane, [touch(region, writes)], number)
        elif kind == "record":
            checker.order.record(rest[0], lane)
            graph.events[rest[0]] = graph.add(lane)
        elif kind == "wait":
            checker.order.wait(rest[0], lane)
            graph.add(lane, graph.events.get(rest[0]))
        else:
            checker.order.await_stream(lane)
            graph.add(HOST, graph.last.get(lane))
    return races, graph


@given(steps)
def test_an_access_races_where_no_path_of_waits_orders_it_after_all_earlier_ones(program: list[Any]) -> None:
    races, graph = run(program)
    wanted = {
        (first[4], second[4])
        for first, second in itertools.combinations(graph.accesses, 2)
        if (first[3] or second[3])
        and bytes_of(first[2]) & bytes_of(second[2])
        and not graph.is_before(first[0], second[0])
    }
    found = {(race.earlier.where, race.later.where) for race in races}
    assert found <= wanted
    assert {later for _, later in found} == {later for _, later in wanted}


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), max_size=3)


@given(shapes, shapes, st.integers(0, 12), st.integers(1, 3), st.integers(1, 3))
def test_views_overlap_where_they_share_a_byte(one: Any, other: Any, apart: int, item: int, thing: int) -> None:
    first = region_of(20, item, [n for n, _ in one], [s for _, s in one])
    second = region_of(20 + apart, thing, [n for n, _ in other], [s for _, s in other])
    assert first is not None and second is not None
    assert have_common_bytes(first, second) == bool(bytes_of(first) & bytes_of(second))
    assert have_common_bytes(second, first) == bool(bytes_of(first) & bytes_of(second))


def test_columns_of_a_big_matrix_share_bytes_only_where_they_overlap() -> None:
    left, right, more = (region_of(4 * at, 4, (8192, n), (8192, 1)) for at, n in ((0, 4096), (4096, 4096), (0, 4097)))
    assert left and right and more and have_common_bytes(more, right) and not have_common_bytes(left, right)


def test_the_bytes_of_a_view_are_those_of_its_elements() -> None:
    assert region_of(100, 4, (3, 5), (5, 1)) == dense(100, 160)
    assert region_of(100, 4, (5, 3), (1, 5)) == dense(100, 160)  # transposed
    assert region_of(100, 4, (3, 7), (0, 1)) == dense(100, 128)  # expanded
    assert region_of(100, 4, (3, 2), (5, 1)) == Region(100, 148, 8, ((20, 3),))
    assert region_of(100, 4, (), ()) == dense(100, 104)
    assert region_of(100, 4, (3, 0), (1, 1)) is None


def raced(*program: Any) -> list[Race]:
    races: list[Race] = []
    checker = Checker(races.append)
    for step in program:
        step(checker)
    return races


def on(lane: Lane, writes: bool, region: Region = WHOLE, where: str = "") -> Any:
    return lambda checker: checker.touch(lane, [touch(region, writes)], where)


def test_what_one_missing_wait_causes_is_told_once() -> None:
    halves = [dense(0, 32), dense(32, 64)]
    writes = [on(DEFAULT, True, half) for half in halves]
    assert len(raced(*writes, *(on(SIDE, False, half) for half in halves))) == 1


def freed_while_used(*between: Any, again: Lane = DEFAULT) -> list[Race]:
    return raced(
        lambda checker: checker.allocate(0, DEFAULT),
        on(DEFAULT, True),
        lambda checker: checker.order.record(1, DEFAULT),
        lambda checker: checker.order.wait(1, SIDE),
        on(SIDE, False),
        *between,
        lambda checker: checker.free(0, "train.py:7"),
        lambda checker: checker.allocate(0, again),
        on(again, True),
    )


def test_memory_that_is_freed_while_another_stream_uses_it_races_with_the_next_tensor() -> None:
    (race,) = freed_while_used()
    assert race.freed == "train.py:7" and race.earlier.lane == SIDE and race.later.lane == DEFAULT


def test_memory_whose_other_stream_is_recorded_is_freed_in_time() -> None:
    assert not freed_while_used(lambda checker: checker.record_stream(0, SIDE))


def test_memory_that_goes_to_another_stream_has_been_waited_for() -> None:
    assert not freed_while_used(again=(0, 9))


def test_memory_that_went_back_to_the_device_has_been_waited_for() -> None:
    assert not raced(
        on(SIDE, True),
        lambda checker: checker.free(0, "train.py:7"),
        lambda checker: checker.release(),
        on(DEFAULT, True),
    )


def test_a_smaller_block_in_freed_memory_races_too() -> None:
    (race,) = raced(
        lambda checker: checker.allocate(0, DEFAULT),
        on(SIDE, True),
        lambda checker: checker.free(0, "train.py:7"),
        lambda checker: checker.allocate(32, DEFAULT),
        lambda checker: checker.touch(DEFAULT, [touch(dense(32, 48), True, 32, 16)], ""),
    )
    assert race.freed == "train.py:7"


def test_columns_that_are_written_one_by_one_do_not_pile_up() -> None:
    memory = ShadowMemory()
    for column in range(3 * MOST_STRIDED):
        region = region_of(column, 1, (10, 1), (1000, 1))
        assert region is not None
        memory.add(Access(DEFAULT, column, True, region, None, "", ""), lambda each: each.lane == DEFAULT)
    assert sum(map(len, memory._cells)) < 3 * MOST_STRIDED + 2
