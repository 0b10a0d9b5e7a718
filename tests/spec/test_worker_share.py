"""A worker's share of a host, in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.worker_share import WorkerShare, core_ranges


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((7, 4, 5, 1), "1,4-5,7"), ((0, 1), "0-1")]
)
def test_cores_are_written_as_ranges(cores: tuple[int, ...], text: str) -> None:
    assert core_ranges(cores) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_core_once(cores: set[int]) -> None:
    named = []
    for piece in filter(None, core_ranges(tuple(cores)).split(",")):
        first, _, last = piece.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(cores)


def test_a_cpu_worker_has_no_index_in_its_name() -> None:
    assert WorkerShare("cpu", None, (0,), 1).name == "cpu"
    assert WorkerShare("cuda", 0, (), 1).name == "cuda:0"
