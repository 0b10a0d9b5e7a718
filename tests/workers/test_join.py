"""The world of a process, and the group that it enters. Who started it: test_places.py."""

from __future__ import annotations

import os

import pytest
import torch

from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.workers import join
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
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: RANK must be from 0 to 1."),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 with WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one. The launcher must set RANK to a whole number."),
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
    with pytest.raises(
        UsageError, match=r"RANK=1 and WORLD_SIZE=2 are set without MASTER_.*, so rank 0 cannot be found"
    ):
        enter_process_group(World(1, 2, 1, 2, "cpu"))


class Driver:
    """The CUDA of a machine with some GPUs: the driver reads CUDA_VISIBLE_DEVICES once, NVML (a count) each time."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.taken = gpus, ""
        self.kept: list[str] | None = None

    def named(self) -> list[str]:
        every = [str(index) for index in range(self.gpus)]
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        return every if names is None else [name for name in names.split(",") if name in every]

    def shown(self) -> list[str]:
        self.kept = self.named() if self.kept is None else self.kept
        return self.kept

    def take(self, device: torch.device) -> None:
        self.taken = self.shown()[device.index]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """4 GPUs, for ranks that another launcher has started."""
    driver = Driver(4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(driver.named()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(driver.shown()))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", driver.take)
    monkeypatch.setattr(join, "shown_gpus", lambda: len(driver.shown()))
    return driver


@pytest.mark.parametrize("asked", [False, True], ids=["untouched", "asked before"])
@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"), [(None, 0, "0"), (None, 3, "3"), ("2,1", 0, "2"), ("2,1", 1, "1"), ("3", 0, "3")]
)
def test_a_rank_of_another_launcher_takes_a_gpu_of_its_own(
    visible: str | None, local_rank: int, gpu: str, asked: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if asked:
        torch.cuda.is_available()
    world = join._take_device(World(local_rank, 4, local_rank, 4, ""))
    assert driver.taken == gpu
    assert world.device == (f"cuda:{local_rank}" if asked else "cuda:0")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (visible if asked else gpu)


def test_a_rank_without_a_gpu_is_refused_and_one_of_a_machine_without_gpus_is_not(driver: Driver) -> None:
    with pytest.raises(UsageError, match="torch finds only 4 GPUs, so local rank 4 has none"):
        join._take_device(World(4, 8, 4, 8, ""))
    driver.gpus = 0
    assert join._take_device(World(4, 8, 4, 8, "")).device == "cpu"
