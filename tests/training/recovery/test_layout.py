"""Every element of a state is written once, by a rank that holds it, and as equally as can be.

Of records/checkpoints.py too.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.records.checkpoints import volume
from meshwise.spec.errors import CheckpointError
from meshwise.training.recovery import tensor_files
from meshwise.training.recovery.tensor_files import SMALL, Held, deal


def whole(*shape: int, dtype: str = "float32") -> Held:
    return Held(dtype, shape, (tuple((0, length) for length in shape),))


def rows(begin: int, end: int, *shape: int) -> Held:
    return Held("float32", shape, (((begin, end), *((0, length) for length in shape[1:])),))


@given(
    ranks=st.integers(1, 5),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
)
def test_every_element_is_written_once_by_a_rank_that_holds_it(ranks: int, cuts: list[tuple[int, int, bool]]) -> None:
    held: list[dict[str, Held]] = [{} for _ in range(ranks)]
    for number, (length, width, shared) in enumerate(cuts):
        for rank in range(ranks):
            begin, end = (0, length) if shared else (length * rank // ranks, length * (rank + 1) // ranks)
            held[rank][f"t{number}"] = rows(begin, end, length, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "SMALL", 40)
        dealt = deal(held)
    for number, (length, width, _) in enumerate(cuts):
        seen = torch.zeros(length, width, dtype=torch.int64)
        for rank, parts in enumerate(dealt):
            for part in parts:
                if part.name == f"t{number}":
                    assert part.box in held[rank][part.name].boxes
                    seen[tuple(slice(*bounds) for bounds in part.box)] += 1
        assert (seen == 1).all()


def test_what_all_hold_is_divided_equally_by_bytes() -> None:
    names = {f"large{n}": whole(4, SMALL) for n in range(4)} | {"a": whole(SMALL), "b": whole(SMALL), "small": whole(3)}
    dealt = deal([names] * 4)
    loads = [sum(4 * volume(part.box) for part in parts) for parts in dealt]
    assert sum(loads) == 4 * sum(math.prod(held.shape) for held in names.values())
    assert max(loads) - min(loads) <= 4 * SMALL + 12
    assert [part.name for part in dealt[0]].count("small") == 1  # buffers and the like: as the first rank has them


def test_a_part_that_lies_in_another_ones_whole_is_not_written_twice() -> None:
    dealt = deal([{"t": rows(0, 4, 8)}, {"t": rows(4, 8, 8)}, {"t": whole(8)}])
    assert [len(parts) for parts in dealt] == [0, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([{"t": rows(0, 4, 8)}, {"t": rows(5, 8, 8)}], "t cannot be saved: the ranks have 7 of its 8 elements"),
        ([{"t": rows(0, 5, 8)}, {"t": rows(4, 8, 8)}], "the ranks have 5 of its 8 elements"),
        (
            [{"t": whole(8)}, {"t": whole(9)}],
            r"dtype float32 and shape \(8,\) on one rank, but float32 and \(9,\) on an",
        ),
        ([{"t": whole(8)}, {"t": whole(8, dtype="int8")}], "dtype float32 and shape .* on one rank, but int8 and"),
    ],
)
def test_a_state_that_is_not_whole_is_not_saved(ranks: list[dict[str, Held]], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        deal(ranks)
