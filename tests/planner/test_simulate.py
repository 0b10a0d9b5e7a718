"""A step is played as streams, hosts and groups allow, and its time is told apart by kind; counted by hand.

Of planner/event_loop.py, planner/simulate.py, planner/prices.py and planner/explain.py too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planner.works import FREE, Given, computes, gathers, receives, sends, work

from meshwise.hardware.words import machine_from_words
from meshwise.planner.explain import KINDS, breakdown
from meshwise.planner.prices import Overlap, Prices, missing, overlap_of
from meshwise.planner.simulate import Step, simulate
from meshwise.planner.work import Copy, Event, Launch, Operation, Work
from meshwise.spec.errors import UsageError


def step_of(*works: Work, overlap: Overlap | None = FREE, **given: object) -> Step:
    return simulate(works, Given(**given), overlap=overlap)  # type: ignore[arg-type]


def kinds(step: Step, rank: int = 0) -> dict[str, float]:
    found = breakdown(step, rank)
    assert sum(found.kinds.values()) == pytest.approx(step.seconds)
    assert sum(found.phases.values()) == pytest.approx(step.seconds)
    return {kind: seconds for kind, seconds in found.kinds.items() if seconds > 1e-12}


def test_a_stream_does_one_thing_after_the_other_and_two_share_the_device() -> None:
    assert step_of(work(computes(), computes(), computes())).seconds == 3
    assert step_of(work(computes(), computes(stream="side"))).seconds == pytest.approx(2)


def test_communication_under_computing_is_hidden_and_the_rest_exposed() -> None:
    hidden = step_of(work(gathers((0, 1)), computes(), computes()))
    assert hidden.seconds == 2 and kinds(hidden) == {"computing": 2} and breakdown(hidden, 0).hidden == 1
    exposed = step_of(work(gathers((0, 1)), computes(after=(0,))))
    assert exposed.seconds == 2 and kinds(exposed) == {"computing": 1, "communication": 1}
    half = step_of(work(gathers((0, 1)), computes(), computes(after=(0,))), seconds={"all-gather": 1.5})
    assert half.seconds == pytest.approx(2.5) and kinds(half) == pytest.approx({"computing": 2, "communication": 0.5})


def test_what_overlaps_slows_each_other_for_as_long_as_it_does() -> None:
    step = step_of(work(gathers((0, 1)), computes(), computes()), overlap=Overlap(1.25, 2.0))
    # Both at once: the gather at half its speed needs 2 s, in which computing does 1.6 s of its 2 s.
    assert step.seconds == pytest.approx(2.4)
    ends = {one.place: one.end for one in step.done[0]}
    assert ends == pytest.approx({0: 2.0, 1: 1.25, 2: 2.4})
    alone = step_of(work(gathers((0, 1)), computes(after=(0,))), overlap=Overlap(1.25, 2.0))
    assert alone.seconds == 2


def test_collectives_of_one_tier_share_its_links_and_those_of_two_do_not() -> None:
    same = work(gathers((0, 1), "one"), gathers((0, 2), "two"))
    assert step_of(same).seconds == 2
    two = work(gathers((0, 1), "one"), gathers((0, 8), "two"), ranks=16)
    assert step_of(two, words="2x8xH100").seconds == 1


def test_a_collective_begins_when_its_last_simulated_rank_has_come() -> None:
    early, late = work(gathers((0, 1)), computes(after=(0,))), work(computes(), gathers((0, 1), after=(0,)), rank=1)
    step = step_of(early, late)
    assert step.seconds == 3
    assert kinds(step, 0) == {"waiting": 1, "communication": 1, "computing": 1}
    assert kinds(step, 1) == {"computing": 1, "communication": 1, "idle": 1}
    alone = step_of(early)  # the other rank is taken to be there
    assert alone.seconds == 2


def test_collectives_of_a_group_are_paired_in_the_order_of_the_hosts() -> None:
    one = work(gathers((0, 1), "a"), gathers((0, 1), "b", after=(0,)), computes(after=(1,)))
    other = work(gathers((0, 1), "a"), computes(after=(0,)), gathers((0, 1), "b", after=(1,)), rank=1)
    assert step_of(one, other).seconds == 4


def test_a_pipeline_of_two_stages_has_the_bubble_of_its_schedule() -> None:
    # Two microbatches, forwards and backwards of a second each, messages at once: 1F1B ends after 2 (m + p - 1) s.
    free = {"send": 0.0, "receive": 0.0}
    first = work(
        computes("aten.f0", phase="forward", microbatch=0),
        sends(0, 1, after=(0,)),
        computes("aten.f1", phase="forward", microbatch=1),
        sends(0, 1, after=(2,)),
        receives(1, 0),
        computes("aten.b0", phase="backward", microbatch=0, after=(4,)),
        receives(1, 0),
        computes("aten.b1", phase="backward", microbatch=1, after=(6,)),
    )
    last = work(
        receives(0, 1),
        computes("aten.f0", after=(0,)),
        computes("aten.b0"),
        sends(1, 0, after=(2,)),
        receives(0, 1),
        computes("aten.f1", after=(4,)),
        computes("aten.b1"),
        sends(1, 0, after=(6,)),
        rank=1,
    )
    step = step_of(first, last, seconds=free)
    assert step.seconds == 6
    assert kinds(step, 0) == pytest.approx({"computing": 4, "waiting": 2})
    assert kinds(step, 1) == pytest.approx({"computing": 4, "waiting": 1, "idle": 1})
    slow = step_of(first, last, seconds={"send": 0.5, "receive": 0.5})
    assert slow.seconds > 6.5


def test_a_message_takes_its_time_once() -> None:
    step = step_of(work(sends(0, 1)), work(receives(0, 1), computes(after=(0,)), rank=1))
    assert step.seconds == 2 and kinds(step, 1) == {"communication": 1, "computing": 1}
    there = step_of(work(sends(0, 1)), work(computes(), computes(), receives(0, 1, after=(1,)), rank=1))
    assert there.seconds == 2
    unseen = step_of(work(receives(0, 1), computes(after=(0,)), rank=1))  # whose sender is not simulated
    assert unseen.seconds == 2


def test_a_host_that_launches_slowly_is_what_the_step_takes() -> None:
    quick = {"aten.mm": 0.1}
    step = step_of(work(*[computes()] * 10), seconds=quick, launch=0.5)
    assert step.seconds == pytest.approx(10 * 0.5 + 0.1)
    assert kinds(step) == pytest.approx({"computing": 1.0, "launches": 4.1})
    ahead = step_of(work(*[computes()] * 10), launch=0.5)
    assert ahead.seconds == pytest.approx(0.5 + 10) and kinds(ahead) == pytest.approx(
        {"computing": 10, "launches": 0.5}
    )


def test_a_host_that_waits_launches_nothing_meanwhile() -> None:
    step = step_of(work(computes(blocks=True), computes()), launch=0.5)
    assert step.seconds == pytest.approx(0.5 + 1 + 0.5 + 1)


def test_a_processor_is_its_own_host_and_waits_for_what_it_receives() -> None:
    cpu = {"words": "2xcpu"}
    overlapped = work(computes(), gathers((0, 1)), computes(), computes(after=(1,)), kind="cpu", ranks=2)
    assert step_of(overlapped, **cpu).seconds == 3
    blocking = work(computes(), gathers((0, 1), "main"), computes(), kind="cpu", ranks=2)
    assert step_of(blocking, **cpu).seconds == 3 and kinds(step_of(blocking, **cpu))["communication"] == 1
    received = work(receives(0, 1), computes(after=(0,)), rank=1, ranks=2, kind="cpu")
    assert step_of(received, **cpu).seconds == 2


def test_copies_overlap_with_everything_but_copies_of_their_way() -> None:
    out, back = Launch(Copy(8, "host"), "out"), Launch(Copy(8, "device"), "back")
    assert step_of(work(out, back, computes(), gathers((0, 1)))).seconds == 1
    assert step_of(work(out, Launch(Copy(8, "host"), "other"))).seconds == 2
    alone = step_of(work(out, computes(after=(0,))))
    assert kinds(alone) == {"copies": 1, "computing": 1}


def test_every_kind_is_told() -> None:
    step = step_of(work(gathers((0, 1), phase="forward"), computes("aten.add", phase="forward", after=(0,))))
    found = breakdown(step, 0)
    assert set(found.kinds) == set(KINDS) and found.operators == {"aten.add": 1}
    assert found.phases == {("forward", "communication"): 1, ("forward", "computing"): 1}


def test_the_interval_adds_errors_of_one_factor_and_squares_those_of_several() -> None:
    one = step_of(work(computes(), computes(), computes()), spread=1.2)
    assert (one.low, one.high) == (pytest.approx(2.5), pytest.approx(3.6))
    both = step_of(work(gathers((0, 1)), computes(after=(0,))), spread=1.2)
    assert both.high == pytest.approx(2 + math.hypot(0.2, 0.2)) and both.low < both.seconds
    assert both.factors == pytest.approx({"compute": 0.2, "memory": 0, "communication": 0.2, "launch": 0})
    hidden = step_of(work(gathers((0, 1)), computes(), computes()), spread=1.2)
    assert hidden.factors["communication"] == 0
    quick = simulate([work(computes())], Given(spread=1.2), interval=False)
    assert quick.low == quick.seconds == quick.high


def test_ranks_that_call_different_collectives_are_named() -> None:
    one = work(gathers((0, 1)), gathers((0, 1), kind="all-reduce"))
    other = work(gathers((0, 1)), rank=1)
    with pytest.raises(ValueError, match=r"wait for each other.*rank 0 waits in all-reduce of 2 ranks \(event 1\)"):
        step_of(one, other)
    with pytest.raises(ValueError, match="each rank must have one trace"):
        step_of(one, one)


def test_what_has_no_price_is_said_in_place_of_a_time() -> None:
    machine = machine_from_words("V100-SXM2-32GB")
    product = Operation("aten.mm", ((64, 64), (64, 64)), ("bf16", "bf16"), 2 * 64**3, 8192, 8192)
    unpriced = work(Launch(product), Launch(product), ranks=1)
    assert missing([unpriced], Prices(machine)) == (
        "no figure is known for aten.mm in bf16 on V100-SXM2-32GB (2 times)",
    )
    with pytest.raises(UsageError, match="meshwise bench --save"):
        simulate([unpriced], machine)
    with pytest.raises(UsageError, match="this machine has 1 device, but the plan needs 8"):
        simulate([work(computes())], machine)


def test_a_machine_prices_what_is_alike_once() -> None:
    machine = machine_from_words("8xH100")
    product = Operation("aten.mm", ((4096, 4096), (4096, 4096)), ("bf16",), 2 * 4096**3, 1 << 26, 1 << 25)
    step = simulate([work(*[Launch(product)] * 100)], machine)
    assert 100 * 2 * 4096**3 / 989.5e12 < step.seconds < 100 * 2 * 4096**3 / 400e12
    assert step.low < step.seconds < step.high
    known = {"H100-SXM": {product: 1e-3}.get}
    measured = simulate([work(*[Launch(product)] * 100)], Prices(machine, known))
    assert measured.seconds == pytest.approx(0.1, rel=0.001)
    assert 1 <= overlap_of(machine.devices[0], -1).compute < overlap_of(machine.devices[0]).compute


def test_the_interval_is_never_narrower_than_what_no_price_knows() -> None:
    step = step_of(work(computes()), overlap=None)
    assert step.factors["step"] > 0.09 * step.seconds and step.high > 1.09 * step.seconds > 1.18 * step.low


def test_the_interval_tells_what_overlap_may_cost() -> None:
    step = step_of(work(gathers((0, 1)), computes(), computes()), overlap=None)
    assert step.factors["overlap"] > 0 and step.high > step.seconds > step.low
    assert step_of(work(computes()), overlap=None).factors["overlap"] == 0


def test_unequal_devices_wait_for_the_slower_one() -> None:
    fast, slow = machine_from_words("H100-SXM").devices[0], machine_from_words("A100-SXM-80GB").devices[0]
    links = machine_from_words("2xH100").links
    machine = replace(machine_from_words("2xH100"), devices=(fast, replace(slow, name="cuda:1")), links=links)
    product = Operation("aten.mm", ((8192, 8192), (8192, 8192)), ("bf16",), 2 * 8192**3, 1 << 28, 1 << 27)
    works = [
        work(Launch(product), gathers((0, 1), kind="all-reduce", after=(0,)), rank=rank, ranks=2) for rank in (0, 1)
    ]
    step = simulate(works, machine)
    found = breakdown(step, 0)
    assert found.kinds["waiting"] > 0.5 * found.kinds["computing"]
    assert breakdown(step, 1).kinds["waiting"] == 0


def launches_and_overlaps() -> Work:
    """A step of which some is held up by the host, some by the device, with gathers ahead."""
    events: list[Event] = []
    for layer in range(6):
        gathered = len(events)
        events.append(gathers((0, 1), phase="forward"))
        events += [computes("aten.mm", after=(gathered,)), *[computes("aten.add")] * 5, computes("aten.mm")]
        if layer == 3:
            events.append(computes("aten.sum", blocks=True))
    return work(*events)


@pytest.mark.parametrize("launch", [0.0, 0.01, 0.3, 2.0])
def test_operators_played_as_one_take_as_long_as_one_by_one(launch: float) -> None:
    seconds = {"aten.add": 0.05, "aten.sum": 0.1, "all-gather": 0.7}
    given, slowed = Given(seconds, launch), Overlap(1.2, 1.2)
    for overlap in (FREE, slowed):
        one, merged = (
            simulate([launches_and_overlaps()], given, overlap=overlap, interval=False, merged=way)
            for way in (False, True)
        )
        assert merged.seconds == pytest.approx(one.seconds, rel=1e-12)
        assert breakdown(merged, 0).kinds == pytest.approx(breakdown(one, 0).kinds, rel=1e-12)
        assert (len(merged.done[0]) < len(one.done[0])) is (launch < 1)
    factors = [simulate([launches_and_overlaps()], given, overlap=slowed, merged=way).factors for way in (False, True)]
    assert factors[0] == factors[1]


def test_a_processor_s_operators_played_as_one() -> None:
    own = work(computes(), computes(), gathers((0, 1)), computes(), computes(after=(2,)), kind="cpu", ranks=2)
    steps = [simulate([own], Given(words="2xcpu"), overlap=FREE, merged=way).seconds for way in (False, True)]
    assert steps == [4, 4]
