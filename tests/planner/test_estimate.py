"""A job under a plan on a machine: seconds and bytes, each with its interval, and no time where none is known.

Of planner/estimator.py and planner/trace.py too.
"""

import dataclasses
import sys

import pytest
import torch

from meshwise.hardware.machines import find_machine
from meshwise.planner import estimator as estimator_module
from meshwise.planner.estimator import rehearser
from meshwise.planner.trace import kinds_of_ranks
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job


def estimator(job, machine, cap=None):
    rehearse = rehearser(job, machine, cap)
    return lambda plan: rehearse(plan).estimate


def test_a_gpu_that_is_not_here_has_time_and_memory():
    rehearse = estimator(find_job("mnist-mlp"), find_machine("2xH100"))
    one, two = rehearse(Plan()), rehearse(Plan(shard=2))
    assert one.seconds is not None and two.seconds is not None
    assert one.seconds.low < one.seconds.value < one.seconds.high
    assert one.memory.total.low < one.memory.total.value < one.memory.total.high
    assert one.memory.capacity == 80 * 1000**3 or one.memory.capacity == 80 * 1024**3
    assert two.memory.categories["parameters"] < 0.6 * one.memory.categories["parameters"]
    assert one.memory.verdict == "fits"
    assert not torch.accelerator.is_available() or torch.cuda.is_available()  # the fake one is gone


@pytest.mark.parametrize(("machine", "said"), [("1xH100", True), ("1xcpu", False)])
def test_recurrent_layers_that_are_taken_apart_are_said(machine, said, monkeypatch):
    monkeypatch.setattr(estimator_module, "MEASURE", 0.0)
    job = Job(
        name="tagger",
        model=lambda: torch.nn.LSTM(4, 4),
        loss=lambda model, batch: model(batch[0])[0].square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=(torch.zeros(8, 3, 4),),
        batch_size=4,
    )
    assert any("cell by cell" in note for note in estimator(job, find_machine(machine))(Plan()).notes) is said


def test_parts_add_up_to_the_step():
    found = estimator(find_job("mnist-cnn"), find_machine("2xA100"))(Plan(data=2))
    assert sum(found.parts.values()) == pytest.approx(found.seconds.value, rel=1e-6)


def test_a_machine_of_unknown_speed_gives_memory_and_no_time():
    machine = find_machine("2xH100")
    unknown = tuple(
        dataclasses.replace(device, peak={}, achievable={}, memory_bandwidth=None, part="?")
        for device in machine.devices
    )
    found = estimator(find_job("mnist-mlp"), dataclasses.replace(machine, devices=unknown))(Plan())
    assert found.seconds is None and "no figure is known" in found.unknown
    assert found.memory.allocated > 0


def test_a_cap_is_what_a_step_may_take():
    rehearse = estimator(find_job("mnist-mlp"), find_machine("1xH100"), cap=1 << 20)
    assert rehearse(Plan()).memory.verdict == "does not fit"


def test_slow_devices_set_the_pace_until_they_take_less():
    machine = find_machine("A100+V100")
    rehearse = estimator(dataclasses.replace(find_job("mnist-cnn"), batch_size=4096), machine)
    even = rehearse(Plan(data=2))
    alone = estimator(dataclasses.replace(find_job("mnist-cnn"), batch_size=4096), find_machine("2xA100"))(Plan(data=2))
    assert even.seconds.value > 1.3 * alone.seconds.value and not alone.balanced
    assert even.balanced[1] == 1 and even.balanced[0] > 1.3
    shared = rehearse(Plan(data=2, shares=even.balanced))
    assert alone.seconds.value < shared.seconds.value < 0.95 * even.seconds.value


def test_memory_is_that_of_the_device_that_is_nearest_to_full():
    small = estimator(find_job("mnist-mlp"), find_machine("A100+V100-PCIe-16GB"))(Plan(data=2))
    assert small.memory.capacity == 16 << 30 and small.memory.rank == 1


def test_ranks_that_cannot_be_brought_together_have_memory_and_no_time(monkeypatch):
    def stuck(steps, prices, interval, merged):
        raise ValueError("the ranks wait for each other forever")

    monkeypatch.setattr("meshwise.planner.estimator.simulate", stuck)
    hook = sys.excepthook
    found = estimator(find_job("mnist-mlp"), find_machine("2xH100"))(Plan(data=2))
    assert found.seconds is None and "wait for each other" in found.unknown
    assert found.memory.allocated > 0 and sys.excepthook is hook


@pytest.mark.parametrize(
    ("plan", "speeds", "ranks"),
    [
        (Plan(data=4), "", [0]),
        (Plan(data=4), "aabb", [0, 2]),
        (Plan(data=4, shares=(2, 1, 1, 2)), "", [0, 1]),
        (Plan(data=2, tensor=2), "aabb", [0, 2]),
        (Plan(data=2, tensor=2), "abab", [0, 1]),
        (Plan(pipeline=2, accumulate=2, tensor=2), "", [0, 2]),
        (Plan(pipeline=2, accumulate=2, tensor=2), "aaab", [0, 1, 2, 3]),
        (Plan(data=2, pipeline=2, accumulate=2), "aabb", [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_one_rank_of_each_kind_is_traced_with_those_that_send_to_it(plan, speeds, ranks):
    assert kinds_of_ranks(plan, speeds) == ranks


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("mnist-mlp", Plan(pipeline=2, tensor=2, accumulate=2)),  # a split tensor travels between worlds
        ("gpt", Plan(shard=2, pipeline=2, accumulate=2)),  # a norm of sharded gradients, in each stage's own world
    ],
    ids=str,
)
def test_stages_are_rehearsed_each_in_a_world_of_its_own(job, plan):
    assert estimator(find_job(job), find_machine("4xH100"))(plan).seconds is not None
