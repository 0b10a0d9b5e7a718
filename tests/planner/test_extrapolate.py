"""Traces replayed from few blocks, against those of all of them: equal event for event."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwise.parallel.schedule import orders
from meshwise.planner import tracer
from meshwise.planner.insertions import Insertions, NotExtrapolable, grown
from meshwise.planner.repeat_microbatches import LEAST, composer, growth_of, with_more
from meshwise.planner.shorter import Stretch
from meshwise.planner.shrink import FEW, depth_of
from meshwise.planner.trace import trace
from meshwise.planner.tracer import Tracer, microbatches_of
from meshwise.planner.work import Allocate, Launch, Operation
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.gpt import Gpt, GptSize
from meshwise.training.jobs.registry import find_job

LAYERS = 2 * FEW + 4


class Block(nn.Module):
    def __init__(self, width, number=0, window=0):
        super().__init__()
        self.norm, self.window = nn.LayerNorm(width), window
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        given = x if not self.window else x.roll(self.window, 1)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(given))))


class Blocks(nn.Module):
    def __init__(self, make, count, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList(make(number) for number in range(count))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


DATA = (torch.zeros(96, 16, dtype=torch.int64),)


def adamw(**how):
    return functools.partial(torch.optim.AdamW, lr=1e-3, **how)


def made(model, **changes):
    def loss(model, batch):
        given = model(batch[0])
        return nn.functional.cross_entropy(given.flatten(0, 1), batch[0].flatten())

    usual = {"name": "deep", "model": model, "loss": loss, "optimizer": adamw(), "data": DATA, "batch_size": 16}
    return Job(**usual | changes)


def blocks(layers=LAYERS, make=Block, width=2048, **changes):
    return made(lambda: Blocks(lambda number: make(width, number), layers, width), **changes)


def grouped(layers=LAYERS, **changes):
    """Three blocks that look beside them, and one that does not."""
    return blocks(4 * layers, lambda width, number: Block(width, window=(number + 1) % 4 and 1), **changes)


def encoder(layers=LAYERS, **changes):
    def model():
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        parts = [nn.Embedding(512, 64), nn.TransformerEncoder(layer, layers), nn.Linear(64, 512)]
        return nn.Sequential(*parts)

    return made(model, **changes)


def llama(layers=LAYERS, **changes):
    transformers = pytest.importorskip("transformers")

    def model():
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
        settings = transformers.LlamaConfig(**sizes, vocab_size=512, num_hidden_layers=layers, use_cache=False)
        return transformers.LlamaForCausalLM(settings)

    def loss(model, batch):
        return model(input_ids=batch[0], labels=batch[0]).loss

    return made(model, loss=loss, **changes)


def bert(layers=LAYERS, **changes):
    transformers = pytest.importorskip("transformers")

    def model():
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 512}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=layers))

    def loss(model, batch):
        return model(input_ids=batch[0], labels=batch[0]).loss

    return made(model, loss=loss, **changes)


def gpt(layers=LAYERS, **changes):
    sizes = GptSize(layers, 1024, 8, 4, 4096, context=128)
    documents = torch.zeros(64, 128, dtype=torch.int64)
    return replace(find_job("gpt"), model=lambda: Gpt(sizes), data=(documents, documents), **changes)


def told(traced):
    """The events of a trace, with storages and streams numbered as they come."""
    storages, streams, found = {}, {}, []
    for events in (traced.first.held, traced.first.events, traced.step.held, traced.step.events):
        found.append("section")
        for event in events:
            if isinstance(event, Launch):
                found.append(replace(event, stream=streams.setdefault(event.stream, len(streams))))
                continue
            number = storages.setdefault(event.storage, len(storages))
            if isinstance(event, Allocate):
                stream = streams.setdefault(event.stream, len(streams))
                found.append((number, event.size, event.category, event.on_host, stream))
            else:
                found.append(number)
    return found


def both(monkeypatch, job, plan, kind="gpu"):
    """What the tracer gives, the trace of the whole, and the plans that the tracer has traced."""
    whole, asked = trace(job, plan, kind), []

    def traced(job, own, *others):
        asked.append(own)
        return trace(job, own, *others)

    monkeypatch.setattr(tracer, "trace", traced)
    found = Tracer(job)(plan, kind)
    return found, whole, asked


def check_equal(found, whole):
    assert len(found) == len(whole)
    for one, other in zip(found, whole, strict=True):
        assert (one.step.rank, one.step.ranks, one.step.kind) == (other.step.rank, other.step.ranks, other.step.kind)
        assert set(one.step.notes) <= set(other.step.notes)
        mine, real = told(one), told(other)
        assert next((pair for pair in zip(mine, real, strict=False) if pair[0] != pair[1]), None) is None
        assert len(mine) == len(real)


def pieces(short, long):
    return [(piece.at, piece.length) for piece in Insertions(short, long, (short, long)).all]


def test_pieces_are_found_where_they_repeat():
    assert pieces([1, 2, 3, 2, 3, 4], [1, 2, 3, 2, 3, 2, 3, 4]) == [(3, 2)]
    assert pieces([1, 2, 2, 3, 5, 5, 6], [1, 2, 2, 2, 3, 5, 5, 5, 6]) == [(2, 1), (6, 1)]
    assert pieces([7, 1, 2, 1, 2, 1, 3], [7, 1, 2, 1, 2, 1, 2, 1, 3]) == [(4, 2)]  # what follows begins as a piece does
    assert pieces([1, 2], [1, 2]) == []


@pytest.mark.parametrize(("short", "long"), [([1, 2], [1, 3, 2]), ([1, 2, 3], [1, 2]), ([1, 1, 2], [1, 1, 3])])
def test_what_does_not_repeat_is_no_piece(short, long):
    with pytest.raises(NotExtrapolable):
        pieces(short, long)


def test_what_grows_grows_on_by_as_much():
    assert grown(10, 14, 5) == 30
    assert grown((1, (2, 3), (2, 3), 4), (1, (2, 3), (2, 3), (2, 3), 4), 3) == (1, *((2, 3),) * 5, 4)
    assert grown((1, *((2, 3),) * 5, 4), (1, *((2, 3),) * 6, 4), -3) == (1, *((2, 3),) * 2, 4)
    with pytest.raises(NotExtrapolable):
        grown(((2, 3),) * 2, ((2, 3),) * 3, -3)
    one = Operation("aten.stack", ((), ()), ("fp32",) * 2, 0, 8, 8, '["aten.stack", [[{"a": 1}, {"a": 1}]]]')
    more = Operation(
        "aten.stack", ((),) * 3, ("fp32",) * 3, 0, 12, 12, '["aten.stack", [[{"a": 1}, {"a": 1}, {"a": 1}]]]'
    )
    most = grown(one, more, 10)
    assert (most.shapes, most.read) == (((),) * 12, 48)
    assert most.call.count("a") == 14
    for short, long in (("a", "b"), (1, "a"), ((1, 2), (1, 5, 2)), ({"a": 1}, {"b": 1})):
        with pytest.raises(NotExtrapolable):
            grown(short, long, 3)


def test_depth_is_that_of_stages():
    whole = Stretch(tuple(f"b{n}" for n in range(24)), 0, 1, 24, (nn.Linear,))
    assert depth_of(Plan(), whole).own == 24
    assert depth_of(Plan(pipeline=2, accumulate=2), whole).own == 12
    assert depth_of(Plan(pipeline=8, accumulate=8), whole) is None  # three blocks each: nothing is gained
    assert depth_of(Plan(zero1=True, data=2), whole) is None  # parameters are dealt out by their sizes
    assert depth_of(Plan(recompute=("b3",)), whole) is None
    part = Stretch(whole.names, 1, 1, 23, whole.kinds)
    assert depth_of(Plan(), part).own == 23
    assert depth_of(Plan(pipeline=2, accumulate=2), part) is None  # a stage would hold another number of them


shallow = functools.partial(blocks, 2)
SHARDED = Plan(shard=4, precision="bf16")
QUICK = [
    (blocks, Plan(), "gpu", {"clip_norm": 1.0}),
    (blocks, Plan(data=2, precision="bf16"), "gpu", {}),
    (blocks, Plan(recompute="selective"), "cpu", {"optimizer": adamw(fused=True)}),
    (blocks, SHARDED, "gpu", {"optimizer": adamw(fused=True), "clip_norm": 1.0}),
    (encoder, Plan(), "gpu", {}),
    (shallow, Plan(accumulate=8), "gpu", {}),
    (shallow, Plan(pipeline=2, accumulate=16), "gpu", {}),
    (functools.partial(blocks, 10, width=64), Plan(pipeline=5, accumulate=16), "gpu", {"clip_norm": 1.0}),
    (functools.partial(blocks, 4, width=64), Plan(pipeline=2, shard=2, accumulate=12), "gpu", {"batch_size": 24}),
    (functools.partial(blocks, 16, width=64), Plan(pipeline=8, shard=2, accumulate=8), "gpu", {"batch_size": 16}),
    (
        functools.partial(blocks, 2, width=64),
        Plan(data=2, pipeline=2, tensor=2, accumulate=16),
        "gpu",
        {"batch_size": 32},
    ),
]
SLOW = [
    (functools.partial(blocks, 16, width=64), Plan(pipeline=8, shard=2, accumulate=9), "gpu", {"batch_size": 18}),
    (
        functools.partial(blocks, 20, width=64),
        Plan(pipeline=10, shard=2, accumulate=10, precision="bf16", recompute="full"),
        "gpu",
        {"batch_size": 20},
    ),
    (functools.partial(blocks, 30, width=64), Plan(pipeline=3, accumulate=4), "gpu", {}),
    (functools.partial(blocks, 5, width=64), Plan(pipeline=5, accumulate=12), "gpu", {"batch_size": 12}),
    (blocks, Plan(shard=2, recompute="full"), "gpu", {"optimizer": adamw(foreach=True), "clip_norm": 1.0}),
    (blocks, Plan(offload=("optimizer",)), "gpu", {}),
    (blocks, Plan(offload=("activations",)), "gpu", {}),
    (blocks, Plan(data=2, accumulate=2, precision="bf16"), "gpu", {"clip_norm": 1.0}),
    (blocks, Plan(data=2, tensor=2), "gpu", {"clip_norm": 1.0}),
    (blocks, Plan(data=2), "cpu", {}),
    (blocks, Plan(shard=2, accumulate=10), "gpu", {}),
    (functools.partial(blocks, 20), Plan(pipeline=2, accumulate=4), "gpu", {}),
    (
        functools.partial(blocks, 4),
        Plan(data=2, pipeline=2, accumulate=16, schedule="gpipe"),
        "gpu",
        {"batch_size": 32},
    ),
    (functools.partial(blocks, 4), Plan(pipeline=4, accumulate=32), "gpu", {"batch_size": 32, "clip_norm": 1.0}),
    (functools.partial(blocks, 20), Plan(pipeline=2, accumulate=16, recompute="full"), "gpu", {}),
    (functools.partial(blocks, 16, width=64), Plan(pipeline=8, accumulate=32), "cpu", {"batch_size": 32}),
    (functools.partial(blocks, 8, width=64), Plan(pipeline=4, accumulate=16, schedule="gpipe"), "gpu", {}),
    (functools.partial(gpt, 6), Plan(pipeline=3, accumulate=16, precision="fp16"), "gpu", {"batch_size": 16}),
    (
        functools.partial(llama, 8),
        Plan(pipeline=4, accumulate=16, tensor=2, sequence=True, precision="bf16", recompute="full"),
        "gpu",
        {},
    ),
    (
        functools.partial(blocks, 8, width=64),
        Plan(pipeline=4, shard=2, accumulate=24, schedule="gpipe"),
        "gpu",
        {"batch_size": 48},
    ),
    (
        functools.partial(blocks, 12, width=64),
        Plan(pipeline=6, shard=2, accumulate=24, recompute="full"),
        "gpu",
        {"batch_size": 48, "clip_norm": 1.0},
    ),
    (
        functools.partial(llama, 12),
        Plan(pipeline=6, shard=2, tensor=2, sequence=True, accumulate=24, precision="bf16", recompute="selective"),
        "gpu",
        {"batch_size": 48},
    ),
    (functools.partial(gpt, 6), Plan(pipeline=6, data=2, accumulate=16), "gpu", {"batch_size": 32}),
    (
        functools.partial(blocks, 16, width=64),
        Plan(data=4, pipeline=8, accumulate=8, recompute="full"),
        "gpu",
        {"batch_size": 32},
    ),
    (functools.partial(blocks, 24, width=64), Plan(pipeline=2, data=2, accumulate=8), "gpu", {}),
    (functools.partial(blocks, 16, width=64), Plan(pipeline=8, shard=2, accumulate=10), "gpu", {"batch_size": 20}),
    (functools.partial(blocks, 60, width=64), Plan(pipeline=5, accumulate=12), "gpu", {"batch_size": 24}),
    (grouped, Plan(shard=2), "gpu", {}),
    (grouped, Plan(), "cpu", {}),
    (llama, SHARDED, "gpu", {}),
    (llama, Plan(tensor=2), "gpu", {}),
    (bert, Plan(shard=2, recompute="full"), "gpu", {}),
    (gpt, Plan(shard=2), "gpu", {}),
    (gpt, Plan(), "cpu", {}),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # of a module that copies another one
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("make", "plan", "kind", "changes"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_replayed_trace_is_that_of_the_whole_event_for_event(monkeypatch, make, plan, kind, changes):
    found, whole, traced = both(monkeypatch, make(**changes), plan, kind)
    assert whole[0].step.events and len(traced) in (1, 2, 3, 4)
    assert plan.pipeline == 1 or microbatches_of(plan) is None or plan not in traced  # else it was not composed of few
    check_equal(found, whole)


def test_stages_of_one_block_are_not_alike_because_those_of_two_are():
    job, plan = blocks(10, width=64, batch_size=12), Plan(pipeline=10, accumulate=12)
    traces = Tracer(job)
    traces(replace(plan, pipeline=5), "gpu")
    check_equal(traces(plan, "gpu"), trace(job, plan, "gpu"))


def test_a_step_that_is_not_made_of_its_microbatches_is_not_composed():
    plan, job = Plan(pipeline=2, accumulate=16), shallow(width=64)
    counts = (LEAST, LEAST + 1)
    short, long = (trace(replace(job, batch_size=n), replace(plan, accumulate=n), "gpu", (), True)[0] for n in counts)

    def actions(count):
        return [(each.forward, each.microbatch) for each in orders("1f1b", 2, count)[0]]

    found = composer(short, growth_of(short, long, actions))(actions(16))
    assert found.step.events
    both = trace(replace(job, batch_size=LEAST), replace(plan, accumulate=LEAST), "gpu", (), True, True)[0]
    other = composer(both, growth_of(both, with_more(both), actions))(actions(16))
    assert told(other) == told(found)  # a third step of one more microbatch says the same
    with pytest.raises(NotExtrapolable):
        with_more(replace(both, more=replace(both.more, held=both.more.held[:-1])))
    more = next(event for event in long.step.events if isinstance(event, Launch) and event.microbatch == 2)
    events = list(long.step.events)
    events.insert(events.index(more), replace(more, after=()))  # what only one microbatch does
    changed = replace(long, step=replace(long.step, events=tuple(events)))
    for one, other in ((short, changed), (short, short)):
        with pytest.raises(NotExtrapolable):
            growth_of(one, other, actions)


REFUSED = [
    (functools.partial(blocks, width=64), Plan(data=2), "several blocks share a bucket"),
    (functools.partial(blocks, width=64), Plan(offload=("optimizer",)), "the state of all lies in one bucket, of few"),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(("make", "plan"), [case[:2] for case in REFUSED], ids=[case[2] for case in REFUSED])
def test_what_is_not_alike_at_every_depth_is_traced_whole(monkeypatch, make, plan):
    found, whole, traced = both(monkeypatch, make(), plan)
    assert len(traced) == 3  # two short ones, and the whole
    check_equal(found, whole)


def test_microbatches_of_a_model_that_reads_values_are_all_traced(monkeypatch):
    def loss(model, batch):
        scale = 2.0 if (batch[0] == 0).all() else 1.0
        return model(batch[0]).square().mean() * scale

    found, whole, traced = both(monkeypatch, shallow(loss=loss), Plan(accumulate=8))
    assert len(traced) == 2
    check_equal(found, whole)


def test_values_that_are_the_same_for_each_batch_are_no_reason_to_trace_all_microbatches(monkeypatch):
    def loss(model, batch):
        places = torch.arange(batch[0].shape[1], device=batch[0].device)
        scale = 2.0 if (places == 0).any() else 1.0
        return model(batch[0]).square().mean() * scale

    found, whole, traced = both(monkeypatch, shallow(loss=loss, width=64), Plan(accumulate=8))
    assert len(traced) == 2
    check_equal(found, whole)


def test_a_model_that_cannot_be_made_shorter_is_traced_whole(monkeypatch):
    class Counts(nn.Module):
        """Its model looks how many blocks it has, in a way that a shorter one has not."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).flatten()[: x.numel()].view_as(x), x.sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Counts() for _ in range(12))

        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return x

    job = made(Model, loss=lambda model, batch: model(batch[0]).mean(), data=(torch.zeros(8, 8),), batch_size=4)
    found, whole, traced = both(monkeypatch, job, Plan())
    assert len(traced) == 2
    check_equal(found, whole)


def test_a_plan_that_cannot_run_is_refused_as_the_whole_model_refuses_it():
    with pytest.raises(PlanError):
        Tracer(encoder(12))(Plan(expert=2, data=1), "gpu")


class Between(Blocks):
    """It keeps, or uses, what one of its blocks gives, or gives another input to the second half of them."""

    def __init__(self, what, make=Block):
        super().__init__(lambda number: make(64, number), 12, 64)
        self.what = what

    def forward(self, tokens):
        x, kept = self.embedding(tokens), []
        for number, block in enumerate(self.blocks):
            x = block(x)
            kept += [x] * (self.what == "keeps" and number == 7)
            x = x.exp() if self.what == "changes" and number == 7 else x
            if self.what == "starts anew" and number == 5:
                kept, x = [x], self.embedding(tokens)
        return self.head(x + sum(each.sin() for each in kept))


class Numbered(Block):
    def __init__(self, width, number):
        super().__init__(width)
        self.layer_idx = number

    def forward(self, x):
        x = super().forward(x)
        return x.sin() if self.layer_idx % 6 == 5 else x


BETWEEN = [(word, Block) for word in ("keeps", "changes", "starts anew")] + [("", Numbered)]


@pytest.mark.parametrize(("what", "make"), BETWEEN, ids=["keeps", "changes", "starts anew", "by number"])
def test_what_happens_at_one_block_alone_is_not_replayed(monkeypatch, what, make):
    """Short models have it behind all their blocks, or not at all: their traces alone do not tell."""
    found, whole, traced = both(monkeypatch, made(lambda: Between(what, make)), Plan())
    assert len(traced) in (1, 2)  # at most one short one, which ends there, and the whole
    check_equal(found, whole)
