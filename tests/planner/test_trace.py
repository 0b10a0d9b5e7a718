"""The rehearsal's operators are those of the real step, as torch's profiler records them.

Of planner/record.py, planner/work.py, planner/fakes/world.py, torch_compat/fake_device.py,
torch_compat/fake_autocast.py and torch_compat/profiling.py too.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwise.planner.memory import memory_curve
from meshwise.planner.trace import trace
from meshwise.planner.work import Allocate, CollectiveOperation, Free, Launch, Operation
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job
from tests.planner.profiled import steady_step

OF_LISTS = {"aten::cat", "aten::stack", "aten::index"}
"""The profiler says no shapes of lists of tensors."""


def real_step(job, plan):
    """(name, shapes) of each outermost operator that a rehearsal may see, in the second step on this CPU; and how the
    bytes that were allocated rose above those at its begin."""
    kept = {"record_shapes": True, "profile_memory": True}
    with steady_step(job, plan) as step, profile(activities=[ProfilerActivity.CPU], **kept) as found:
        step()
    return found


def outermost(found, names):
    """Events with one of these names that lie in no other of them, in their order."""
    kept = []
    for event in found.events():
        parent = event.cpu_parent
        while parent is not None and parent.name not in names:
            parent = parent.cpu_parent
        if parent is None and event.name in names:
            kept.append((event.name, of_list(event.name) or shapes_in(event.input_shapes)))
    return kept


def shapes_in(shapes):
    return tuple(tuple(shape) for shape in shapes if shape)


def of_list(name):
    return "" if name not in OF_LISTS and "_foreach_" not in name else "of a list"


def rehearsed(work):
    return [
        (name := launch.what.name.replace(".", "::", 1), of_list(name) or shapes_in(launch.what.shapes))
        for launch in work.launches
        if isinstance(launch.what, Operation)
    ]


def risen(found):
    """The peak of the allocator's events above the begin of the profile, in bytes."""
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in found.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    return max(itertools.accumulate(nbytes for _, nbytes in events))


def predicted_rise(work):
    sizes, now, peak = {event.storage: event.size for event in work.held}, 0, 0
    for event in work.events:
        if isinstance(event, Allocate):
            sizes[event.storage] = event.size
            now += event.size
            peak = max(peak, now)
        elif isinstance(event, Free):
            now -= sizes.pop(event.storage)
    return peak


@pytest.mark.parametrize("word", ["mnist-mlp", "mnist-cnn", "gpt"])
@pytest.mark.parametrize("plan", [Plan(), Plan(accumulate=2)], ids=str)
def test_operators_and_memory_are_those_of_the_real_step(word, plan):
    job = find_job(word)
    work = trace(job, plan, "cpu")[0].step
    ours = rehearsed(work)
    found = real_step(job, plan)
    theirs = outermost(found, {name for name, _ in ours})
    missing, more = Counter(theirs) - Counter(ours), Counter(ours) - Counter(theirs)
    assert not missing and not more
    assert risen(found) == pytest.approx(predicted_rise(work), rel=0.05)


def launched(word, plan, rank=0):
    """(name, its launch) of each operator and collective in a later step on a GPU that is not there."""
    work = trace(find_job(word), plan, "gpu")[rank].step
    return [(getattr(one.what, "name", None) or getattr(one.what, "kind", "copy"), one) for one in work.launches]


def test_a_gpu_computes_narrow_where_autocast_says_so():
    found = launched("gpt", Plan(precision="bf16"))
    products = [one.what for name, one in found if name == "aten.mm"]
    assert products and all(set(what.dtypes) == {"bf16"} for what in products)
    assert any(name == "aten._scaled_dot_product_flash_attention" for name, _ in found)
    assert any(name.startswith("aten._foreach_") for name, one in found if one.phase == "optimizer")
    assert all(what.flops == 2 * what.shapes[0][0] * what.shapes[0][1] * what.shapes[1][1] for what in products)


def test_parameters_are_gathered_on_a_stream_of_their_own_that_computing_waits_for():
    found = launched("mnist-mlp", Plan(shard=2))
    gathers = [one for name, one in found if name == "all-gather"]
    assert gathers and all(one.stream != "main" for one in gathers)
    assert any(one.after for _, one in found if one.stream == "main")


def test_a_wait_is_for_something_of_the_same_step():
    """FSDP2 keeps events over the end of a step: the next one waits for nothing that it does not hold itself."""
    for work in (trace(find_job("mnist-mlp"), Plan(shard=2, pipeline=2, accumulate=4))[1].step, *steps("gpt", 2)):
        begun = {place for place, event in enumerate(work.events) if isinstance(event, Launch)}
        waits = [(place, work.events[place].after) for place in begun]
        assert all(before < place and before in begun for place, after in waits for before in after)
        assert any(after for _, after in waits)


def steps(word, shard):
    return [each.step for each in trace(find_job(word), Plan(shard=shard))]


def test_each_stage_reduces_its_norm_among_its_own_ranks():
    """DTensor takes meshes of two ranks for equal, and kept what it knew of the first stage's group."""
    traced = trace(find_job("gpt"), Plan(shard=4, pipeline=2, accumulate=2))
    norms = [
        {
            one.what.ranks
            for one in each.step.launches
            if isinstance(one.what, CollectiveOperation) and len(one.what.ranks) == 4
        }
        for each in traced
    ]
    assert norms == [{(0, 2, 4, 6)}, {(1, 3, 5, 7)}]


def test_bytes_of_collectives_are_those_of_the_plan():
    parameters = sum(p.numel() for p in find_job("mnist-mlp").model().parameters())
    sums = [one.what.size for name, one in launched("mnist-mlp", Plan(data=2)) if name == "all-reduce"]
    assert sum(sums) == 4 * parameters
    shared = [one.what.size for name, one in launched("mnist-mlp", Plan(shard=4)) if name == "reduce-scatter"]
    assert parameters * 4 <= sum(shared) <= parameters * 4 * 1.05  # padded to equal parts


def test_a_stage_after_another_knows_what_it_is_sent():
    plan = Plan(pipeline=2, accumulate=4)
    sent = [one.what for name, one in launched("mnist-mlp", plan) if name == "send"]
    received = [one.what for name, one in launched("mnist-mlp", plan, rank=1) if name == "receive"]
    assert len(received) == 4
    assert [(what.size, what.ranks) for what in sent] == [(what.size, what.ranks) for what in received]


def test_a_shard_steps_on_dtensors_and_a_replica_does_not():
    found = {plan: trace(find_job("mnist-mlp"), plan, "cpu")[0].step.dtensors for plan in (Plan(data=2), Plan(shard=2))}
    assert list(found.values()) == [False, True]


def test_the_optimizer_of_a_shard_steps_its_part_alone():
    """What DTensor computes on whole shapes, to know what a whole tensor would give, no rank does."""
    traced = trace(find_job("gpt"), Plan(shard=4), "gpu")[0]
    whole = sum(math.prod(parameter.shape) for parameter in find_job("gpt").model().parameters())
    for work in (traced.first, traced.step):
        steps = [one.what for one in work.launches if "_foreach_addcdiv" in getattr(one.what, "name", "")]
        assert steps
        for step in steps:
            elements = sum(math.prod(shape) for shape in step.shapes)
            assert elements <= 3 * (whole // 4 + 4 * 128 * len(step.shapes))  # uneven rows
            assert step.written == pytest.approx(4 * elements / 3, rel=0.01)
        assert memory_curve(work).peak.phase == "backward"


def test_what_dtensor_asks_for_the_shape_of_a_result_is_not_the_programs():
    """Parameters of the whole size appeared in optimizer and clipping, with their memory."""
    job = replace(find_job("gpt"), optimizer=partial(torch.optim.AdamW, fused=True))
    first, step = (
        {
            shape
            for launch in work.launches
            if launch.phase == "optimizer" and isinstance(launch.what, Operation)
            for shape in launch.what.shapes
        }
        for traced in trace(job, Plan(shard=2), "gpu")
        for work in (traced.first, traced.step)
    )
    assert (257, 128) not in first | step  # the embedding, of which each rank has a half
    assert (129, 128) in first & step


def test_a_loss_over_classes_reads_one_value_a_row():
    work = trace(find_job("mnist-mlp"), Plan(), "gpu")[0].step
    there, back = (
        next(launch.what for launch in work.launches if launch.what.name == f"aten.nll_loss_{way}")
        for way in ("forward", "backward")
    )
    rows, classes = there.shapes[0]
    assert there.read < rows * classes * 4 <= back.written
    assert back.read < rows * classes * 4


def test_convolutions_know_their_layout():
    images, labels = torch.zeros(8, 3, 8, 8), torch.zeros(8, 4, 6, 6)

    def job(layout):
        def loss(model, batch):
            return (model(batch[0].to(memory_format=layout)) - batch[1]).square().mean()

        return Job(
            name="images",
            model=lambda: torch.nn.Conv2d(3, 4, 3).to(memory_format=layout),
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=(images, labels),
            batch_size=4,
        )

    assert {what.layout for what in convolutions(job(torch.contiguous_format))} == {""}
    assert {what.layout for what in convolutions(job(torch.channels_last))} == {"channels_last"}


def convolutions(job):
    launches = trace(job, Plan(), "gpu")[0].step.launches
    return [one.what for one in launches if "convolution" in getattr(one.what, "name", "")]


def test_products_that_a_program_lets_be_tf32_are_written_down_so():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        work = trace(find_job("mnist-mlp"), Plan(), "gpu")[0].step
    finally:
        torch.set_float32_matmul_precision(before)
    products = [launch.what for launch in work.launches if launch.what.name in ("aten.mm", "aten.addmm")]
    assert products and all(set(one.dtypes) == {"tf32"} for one in products)
    others = {word for launch in work.launches for word in launch.what.dtypes if launch.what not in products}
    assert "tf32" not in others


def test_a_rehearsal_leaves_torch_as_it_was():
    torch.utils._device._device_constructors.cache_clear()
    trace(find_job("mnist-mlp"), Plan(), "gpu")
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"


def test_a_shard_that_reduces_each_microbatch_keeps_its_part_of_gradients_alone():
    job = replace(find_job("mlp"), batch_size=32)
    steps = {each: trace(job, Plan(shard=4, accumulate=4, reduce_each=each), "gpu")[0].step for each in (False, True)}
    scattered = {each: Counter(launch.what.kind for launch in step.launches
                               if isinstance(launch.what, CollectiveOperation))["reduce-scatter"]
                 for each, step in steps.items()}  # fmt: skip
    assert scattered[True] == 4 * scattered[False] > 0
    gradients = sum(p.nbytes for p in job.model().parameters())
    peaks = {each: memory_curve(step).peak.bytes for each, step in steps.items()}
    assert peaks[False] - peaks[True] > gradients / 4
