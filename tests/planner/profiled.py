"""The operators and collectives of a real step as torch's profiler records them, beside those of the rehearsal."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from torch.profiler import ProfilerActivity, profile

from meshwise.parallel.mesh import divide_work
from meshwise.planner.work import CollectiveOperation, Operation
from meshwise.training.data.order import epoch_order, epoch_slices
from meshwise.training.data.source import read_slices
from meshwise.training.engine.engine import Engine
from meshwise.training.job.run import begun, open_data
from meshwise.training.job.step import train_step
from meshwise.workers.gate import StepGate
from meshwise.workers.join import join

OF_LISTS = ("aten::cat", "aten::stack", "aten::index", "aten::_index_put_impl_", "aten::index_put", "aten::arange")
"""The profiler says no shapes of lists of tensors; of an arange it says those of a tensor that is still empty."""
DTYPES = {"float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "long int": "int64"}
DTYPES |= {"bool": "bool", "int": "int32", "unsigned char": "uint8", "long": "int64"}
WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "unsigned char": 1, "long int": 8}
Call = tuple[str, object, object]
"""(name, shapes, dtypes) of the tensors that an operator takes."""


@contextlib.contextmanager
def steady_step(job, plan):
    """Runs two steps of a job on this rank, and gives what runs the one after: those two are looked at for writes to
    gathered parameters, which costs operators that a steady step has not."""
    world = join().world
    engine = Engine(divide_work(plan, world), StepGate(), lambda text: None)
    data = open_data(job, job.data(), "training set")
    order = epoch_order(job.seed, 0, data.samples)
    steps = epoch_slices(order, job.batch_size, engine.world, plan.accumulate)
    batches = [list(read_slices(data.read, step, 0)) for step in itertools.islice(steps, 2)]
    state = begun(job, plan, engine)
    for _ in range(2):
        train_step(engine, job, state, batches[0])
    try:
        yield lambda: train_step(engine, job, state, batches[-1])
    finally:
        engine.close()


def recorded(job, plan, watch=lambda: lambda: None):
    """Every event of a steady step on this rank: (name, shapes, dtypes, start, end), in the order of their starts.
    watch: is called before the step, and what it gives after it."""
    with steady_step(job, plan) as step, profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        end = watch()
        step()
        end()
    mine = threading_id(found)
    return [
        (e.name(), e.shapes(), e.dtypes(), e.start_ns(), e.end_ns())
        for e in sorted(found.profiler.kineto_results.events(), key=lambda e: (e.start_ns(), -e.end_ns()))
        if e.name() != "[memory]" and e.start_thread_id() == mine
    ]


def threading_id(found):
    """The thread in which the step ran: that of most events."""
    counts = Counter(e.start_thread_id() for e in found.profiler.kineto_results.events())
    return counts.most_common(1)[0][0]


def outermost(events, names):
    """The calls with one of these names that lie in no other of them, in their order. What lies in a call of its own
    name is called by autocast, with what it has cast: it counts in the place of the outer one."""
    inside, open_calls = [[] for _ in events], []
    for place, (name, _, _, start, _) in enumerate(events):
        if name in names:
            while open_calls and events[open_calls[-1]][4] <= start:
                open_calls.pop()
            if open_calls:
                inside[open_calls[-1]].append(place)
            open_calls.append(place)
    nested = {place for found in inside for place in found}
    tops = [place for place, event in enumerate(events) if event[0] in names and place not in nested]

    def leaves(place):
        below = inside[place]
        if any(events[each][0] == events[place][0] for each in below):
            return [leaf for each in below for leaf in leaves(each)]
        return [place]

    kept = (events[leaf] for top in tops for leaf in leaves(top))
    return [
        call(name, zip(shapes, [DTYPES.get(w, "") for w in dtypes], strict=False)) for name, shapes, dtypes, *_ in kept
    ]


def call(name, pairs) -> Call:
    """With the tensors that it takes; nothing of an operator on lists. Numbers are tensors of no dimension to the
    profiler, or nothing: they are left out."""
    if name in OF_LISTS or "_foreach_" in name or name.startswith("fsdp::"):
        return name, "of a list", ""
    found = [(tuple(shape), word) for shape, word in pairs if shape and word]
    return name, tuple(shape for shape, _ in found), tuple(word for _, word in found)


def rehearsed(work) -> list[Call]:
    """The operators of a rehearsed step."""
    whats = [launch.what for launch in work.launches if isinstance(launch.what, Operation)]
    return [call(what.name.replace(".", "::", 1), zip(what.shapes, what.dtypes, strict=True)) for what in whats]


@dataclass
class Difference:
    """Between what was recorded and what was rehearsed. missing and more: of the rehearsal. moved: calls that are
    elsewhere in the order."""

    calls: int
    missing: Counter = field(default_factory=Counter)
    more: Counter = field(default_factory=Counter)
    moved: int = 0

    def __str__(self):
        return f"{self.calls} calls, missing {dict(self.missing)}, more {dict(self.more)}, moved {self.moved}"


def compared(events, work) -> Difference:
    """The recorded events of a rank beside its rehearsed step."""
    ours = rehearsed(work)
    theirs = outermost(events, {name for name, *_ in ours})
    same = sum(block.size for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks())
    missing, more = Counter(theirs) - Counter(ours), Counter(ours) - Counter(theirs)
    return Difference(len(theirs), missing, more, min(len(ours), len(theirs)) - same)


KINDS = {"c10d::allreduce_": "all-reduce", "c10d::broadcast_": "broadcast", "c10d::_allgather_base_": "all-gather"}
KINDS |= {"c10d::_reduce_scatter_base_": "reduce-scatter", "c10d::alltoall_base_": "all-to-all"}
SIZED = {"all-gather": 0, "reduce-scatter": 1}
"""Which argument is the full tensor; the profiler says nothing of lists."""


def recorded_collectives(events):
    """(kind, bytes; 0 where the profiler does not say them) of each collective, how often."""
    found = Counter()
    for name, shapes, dtypes, *_ in events:
        kind = KINDS.get(name)
        if kind is not None:
            place = SIZED.get(kind)
            found[kind, 0 if place is None else math.prod(shapes[place]) * WIDTHS[dtypes[place]]] += 1
    return found


def rehearsed_collectives(work):
    """The same of a rehearsed step."""
    found = [launch.what for launch in work.launches if isinstance(launch.what, CollectiveOperation)]
    return Counter((one.kind, one.size if one.kind in SIZED else 0) for one in found)
