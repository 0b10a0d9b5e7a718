"""Microbatches that are left out of a rehearsal because they repeat: the estimate is that of all."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwise.hardware.words import machine_from_words
from meshwise.planner.estimator import memory_of, rehearser
from meshwise.planner.event_loop import Done, Item
from meshwise.planner.explain import breakdown
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.memory import memory_curve
from meshwise.planner.price import Priced
from meshwise.planner.prices import Prices
from meshwise.planner.simulate import Cost, around, period_of, simulate, within_period
from meshwise.planner.tracer import Tracer
from meshwise.planner.work import Launch, Operation
from meshwise.spec.plan import Plan
from meshwise.training.jobs.gpt import Gpt, GptSize
from meshwise.training.jobs.registry import find_job

MACHINE = machine_from_words("2x8xH100@400Gb")
DOCUMENTS = torch.zeros(128, 128, dtype=torch.int64)
ONE = Priced(1.0, 1.0, 1.0, "model", "compute")
SENT = 128 * 512 * 4  # bytes of a microbatch
AROUND = 6  # of those that run, beside one for each stage
QUICK = Plan(data=2, pipeline=2, accumulate=16)
SLOW = [
    Plan(pipeline=4, shard=2, accumulate=16, recompute="full"),
    Plan(data=4, pipeline=4, accumulate=16, recompute="full"),
    Plan(pipeline=8, accumulate=64, precision="bf16"),
    Plan(pipeline=4, tensor=2, sequence=True, accumulate=32, recompute="selective"),
]


def gpt(layers, width=8192):
    sizes = GptSize(layers, width, 8, 4, 4 * width, context=128)
    return replace(find_job("gpt"), model=lambda: Gpt(sizes), data=(DOCUMENTS, DOCUMENTS), batch_size=64)


@pytest.mark.parametrize("plan", [QUICK, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)])
def test_what_is_left_out_changes_no_figure(plan):
    job = gpt(2 * plan.pipeline)
    short, long = (rehearser(job, MACHINE, brief=brief)(plan) for brief in (True, False))
    assert len(short.traces[0].step.left_out) == plan.accumulate - plan.pipeline - AROUND
    assert not long.traces[0].step.left_out and long.whole is long
    assert len(short.traces[0].step.events) < len(long.traces[0].step.events)
    one, other = short.estimate, long.estimate
    assert one.memory == other.memory
    for name in ("value", "low", "high"):
        assert getattr(one.seconds, name) == pytest.approx(getattr(other.seconds, name), rel=1e-6)
    assert one.parts == pytest.approx(other.parts, abs=1e-6 * other.seconds.value)
    for rank in long.step.ranks:
        ours, theirs = (breakdown(each.step, rank) for each in (short, long))
        assert sum(ours.operators.values()) == pytest.approx(sum(theirs.operators.values()), rel=1e-6)
        assert ours.hidden == pytest.approx(theirs.hidden, rel=1e-6)
    assert [each.step for each in short.whole.traces] == [each.step for each in long.traces]


def test_microbatches_that_follow_each_other_unevenly_are_all_simulated(monkeypatch):
    def uneven(works, *others, **more):
        if works[0].left_out:
            raise NotExtrapolable("unevenly")
        return simulate(works, *others, **more)

    monkeypatch.setattr("meshwise.planner.estimator.simulate", uneven)
    short, long = (rehearser(gpt(4, 512), MACHINE, brief=brief)(QUICK).estimate for brief in (True, False))
    assert short.memory == long.memory
    assert short.seconds.value == pytest.approx(long.seconds.value, rel=1e-9)


def test_no_stage_between_the_first_and_the_last_needs_more_memory_than_the_one_before():
    plan = Plan(pipeline=6, accumulate=24)
    job = replace(gpt(12, 512), batch_size=24)
    brief, whole = (Tracer(job)(plan, "gpu", (), extent) for extent in ("brief", "whole"))
    needed = [memory_of(each, Prices(MACHINE), None) for each in whole]
    for before, after in itertools.pairwise(needed[1:-1]):
        assert before.allocated >= after.allocated and before.reserved >= after.reserved
    assert [each.launches_alone for each in brief] == [False, False, True, True, True, False]
    assert [memory_of(each, Prices(MACHINE), None) for each in (*brief[:2], brief[-1])] == [*needed[:2], needed[-1]]
    alone = Tracer(job)(plan, "gpu", (), "launches")
    assert [list(each.step.launches) for each in alone] == [
        [replace(one, after=mock.ANY) for one in each.step.launches] for each in whole
    ]


def test_what_a_stage_has_sent_does_not_stay_until_the_step_ends():
    plans = [Plan(pipeline=4, accumulate=count) for count in (16, 32)]
    jobs = [replace(gpt(4, 512), batch_size=plan.accumulate) for plan in plans]
    few, many = (rehearser(job, MACHINE)(plan).traces for job, plan in zip(jobs, plans, strict=True))
    for one, other in zip(few, many, strict=True):
        splits = [memory_curve(each.step).peak.split for each in (one, other)]
        assert splits[1]["activations"] - splits[0]["activations"] < SENT  # losses stay


def simulated(ends, host=1.0):
    """One rank whose microbatches end at these times."""
    launches = [Launch(Operation("aten.mm", (), (), 0, 0, 0), microbatch=number) for number in range(len(ends))]
    costs = [Cost(launch, number, ONE, ONE, 0, False, 0, False) for number, launch in enumerate(launches)]
    items = [Item(number, launch, 1.0, host, 0, False) for number, launch in enumerate(launches)]
    pairs = zip(launches, ends, strict=True)
    done = [Done(0, n, launch, end - 1, end - 1, end, False) for n, (launch, end) in enumerate(pairs)]
    return costs, items, done


def test_a_period_is_the_time_from_one_microbatch_to_the_next():
    costs, items, done = simulated([1.0, 2.0, 3.5, 5.0, 6.5, 8.0, 9.5])
    left_out = range(4, 5)
    assert around(costs, left_out) == (2, 3, 5, 6)
    with pytest.raises(NotExtrapolable, match="unevenly"):
        period_of({0: items}, done, {0: (2, 3, 5, 6)})
    assert period_of({0: items}, done, {0: (2, 3, 4, 5)}) == 1.5
    assert [one.end - one.start for one in within_period(done, left_out, 1.5)] == [1.0]


def test_microbatches_for_which_a_host_is_too_slow_are_not_left_out():
    _, items, done = simulated([1.0, 2.0, 3.0, 4.0], host=1.1)
    with pytest.raises(NotExtrapolable, match="a host launches slower"):
        period_of({0: items}, done, {0: (0, 1, 2, 3)})
