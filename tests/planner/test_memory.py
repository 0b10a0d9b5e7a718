"""Memory over a step: categories, rounding, the host apart, the first moment of the peak, and broken sequences."""

from __future__ import annotations

import pytest
from planner.works import computes, work

from meshwise.planner.memory import memory_curve
from meshwise.planner.work import Allocate, Event, Free, Work


def with_held(*events: Event, kind: str = "cpu") -> Work:
    return Work(0, 1, kind, (Allocate(0, 1000, "parameters"), Allocate(1, 2000, "optimizer", True)), events)


STEP = (
    Allocate(2, 300, "activations"),
    computes(phase="forward", module="layers.0"),
    Allocate(3, 400, "temporary"),
    computes(phase="backward", module="layers.0", microbatch=1),
    Free(2),
    Allocate(4, 700, "gradients"),
    Free(3),
    Allocate(5, 5000, "temporary", True),
    Free(5),
)


def test_the_curve_tells_what_is_allocated_after_each_event() -> None:
    curve = memory_curve(with_held(*STEP))
    assert curve.places.tolist() == [-1, 0, 2, 4, 5, 6]
    assert curve.total.tolist() == [1000, 1300, 1700, 1400, 2100, 1700]
    assert curve.peak.bytes == 2100 and curve.peak.place == 5
    assert curve.peak.split == {"parameters": 1000, "gradients": 700, "temporary": 400}


def test_the_peak_is_where_the_memory_was_taken_for() -> None:
    peak = memory_curve(with_held(*STEP[:5])).peak
    assert (peak.bytes, peak.phase, peak.module, peak.microbatch) == (1700, "backward", "layers.0", 1)
    first = memory_curve(with_held(computes())).peak
    assert (first.bytes, first.place) == (1000, -1)


def test_the_host_is_counted_apart() -> None:
    host = memory_curve(with_held(*STEP), on_host=True)
    assert host.total.tolist() == [2000, 7000, 2000]
    assert host.peak.split == {"optimizer": 2000, "temporary": 5000}


def test_a_gpu_s_bytes_are_those_of_its_blocks() -> None:
    curve = memory_curve(with_held(*STEP, kind="gpu"))
    assert curve.total.tolist() == [1024, 1536, 2048, 1536, 2560, 2048]


def test_what_was_never_taken_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match="event 0: storage 7 is freed but was never allocated"):
        memory_curve(work(Free(7)))
    with pytest.raises(ValueError, match="event 1: storage 2 is allocated twice without being freed"):
        memory_curve(work(Allocate(2, 1, "input"), Allocate(2, 1, "input")))
    again = work(Allocate(2, 4096, "input"), Free(2), Allocate(2, 512, "input"))
    assert memory_curve(again).total.tolist() == [0, 4096, 0, 512]
