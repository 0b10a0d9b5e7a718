"""Places of a namespace, in words, and by the speed of their devices. Also for arrays/dtensor.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import meshwise as mw
from meshwise.spec.machine import Device

XP = mw.array_namespace("2xcpu")


@pytest.mark.parametrize(
    "devices, names",
    [
        ("3xcpu", ("cpu:0", "cpu:1", "cpu:2")),
        ("cpu", ("cpu:0",)),
        (["cpu:0", "cpu:1"], ("cpu:0", "cpu:1")),
        (["cpu", "cpu"], ("cpu:0", "cpu:1")),
        (torch.device("cpu"), ("cpu:0",)),
    ],
)
def test_devices_in_words(devices: object, names: tuple[str, ...]) -> None:
    assert mw.array_namespace(devices).devices == names


def test_parts_by_the_speed_of_devices() -> None:
    machine = mw.Machine("mine", (Device("cpu:0", "a", memory_rate=3e9), Device("cpu:1", "b", memory_bandwidth=1e9)))
    assert XP.ones(8, sharding=XP.shard(0, weights=machine)).sharding.sizes == (6, 2)
    unknown = dataclasses.replace(machine, devices=machine.devices[:1])
    with pytest.raises(mw.UsageError, match="the memory speed of cpu:1 is not known"):
        XP.shard(weights=unknown)


def test_a_dtensor_is_of_ranks() -> None:
    with pytest.raises(mw.UsageError, match="works only over several ranks"):
        XP.ones(3).to_dtensor(None)
    with pytest.raises(mw.UsageError, match="takes a DTensor"):
        XP.from_dtensor(torch.ones(3))


def test_on_strict_virtual_devices_no_two_places_are_mixed() -> None:
    with mw.virtual_devices(2):
        xp = mw.array_namespace("2xcpu")
        x, y = xp.ones((4, 3)), xp.ones((4, 3), sharding=xp.shard(1))
        assert [str(mw.device_of(part)) for part in x.shards] == ["cpu:0", "cpu:1"]
        z = (x + y) * x.sum() - 2 ** xp.sqrt(y)
        assert [str(mw.device_of(part)) for part in z.shards] == ["cpu:0", "cpu:1"]
        assert float(z.var()) == 0
    with mw.virtual_devices(1), pytest.raises(mw.UsageError, match="but only 1 are open"):
        mw.array_namespace("2xcpu")
