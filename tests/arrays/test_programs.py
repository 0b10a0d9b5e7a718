"""Random programs compute on divided arrays what NumPy computes."""

from __future__ import annotations

import pytest
import torch

from meshwise.arrays.namespace import array_namespace
from meshwise.transfer.virtual import virtual_devices
from tests.arrays.programs import Pair, _compare, run


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_random_programs_are_numpys(places: int) -> None:
    used = set().union(*(run(seed, places) for seed in range(1000 * places, 1000 * places + 60)))
    assert len(used) >= 18


def test_on_strict_devices_nothing_is_mixed() -> None:
    with virtual_devices(3):
        for seed in range(12):
            run(seed, 3)


def test_memory_that_nobody_wrote_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made: torch.Tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(True if made.dtype is torch.bool else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    for seed in range(5000, 5060):
        run(seed, 3)


def test_a_difference_is_seen() -> None:
    xp = array_namespace("2xcpu")
    x = xp.arange(4)
    with pytest.raises(AssertionError, match="NumPy has"):
        _compare(Pair((x + 1).numpy(), x), "here")
