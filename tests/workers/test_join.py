"""The world of a process, and the group that it enters. Who started it: test_places.py."""

from __future__ import annotations

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.workers.environment import read_world
from meshwise.workers.join import enter_process_group


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0, 1, "")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, World(5, 8, 1, 4, "")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MESHWISE_DEVICE": "cpu"}, World(1, 2, 1, 2, "cpu")),
    ],
)
def test_the_world_is_read_from_the_environment(environment: dict[str, str], world: World) -> None:
    assert read_world(environment) == world


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: a rank lies between 0 and 1."),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 with WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "must be whole numbers"),
        ({"LOCAL_RANK": ""}, "must be whole numbers"),
    ],
)
def test_a_world_that_cannot_be_is_told(environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_world(environment)
    assert says in str(caught.value)


@pytest.mark.parametrize("known", ["MASTER_ADDR", "MASTER_PORT", ""])
def test_ranks_without_a_place_to_meet_are_refused(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if known:
        monkeypatch.setenv(known, "29500")
    with pytest.raises(UsageError, match=r"RANK=1 and WORLD_SIZE=2 are set, and MASTER_.* not: "):
        enter_process_group(World(1, 2, 1, 2, "cpu"))
