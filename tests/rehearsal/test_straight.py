"""Rough estimates: from some blocks of a deep model, against those of all of them."""

import functools

import pytest
import torch
from torch import nn

from meshwise.machine.words import machine_from_words
from meshwise.rehearsal import straight
from meshwise.rehearsal.estimator import estimator
from meshwise.rehearsal.shorter import Stretch
from meshwise.rehearsal.straight import Rough, depths
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.training.job import Job


def llama(layers=8):
    transformers = pytest.importorskip("transformers")

    def model():
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
        settings = transformers.LlamaConfig(**sizes, vocab_size=512, num_hidden_layers=layers, use_cache=False)
        return transformers.LlamaForCausalLM(settings)

    return made(model, lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss)


def encoder(layers=8):
    def model():
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        parts = [nn.Embedding(512, 64), nn.TransformerEncoder(layer, layers), nn.Linear(64, 512)]
        return nn.Sequential(*parts)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())

    return made(model, loss)


def made(model, loss, **changes):
    return Job(
        **{
            "name": "deep",
            "model": model,
            "loss": loss,
            "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
            "data": (torch.zeros(32, 64, dtype=torch.int64),),
            "batch_size": 16,
        }
        | changes
    )


def both(job, plan, words="8xH100"):
    machine = machine_from_words(words)
    whole = estimator(job, machine)
    return Rough(job, machine, None, whole)(plan), whole(plan)


SHARDED = Plan(shard=4, precision="bf16", recompute="full")
SLOW = (
    Plan(precision="bf16"),
    Plan(tensor=2),
    Plan(zero1=True, data=2),
    Plan(shard=2, pipeline=2, accumulate=4),
    Plan(data=2, accumulate=2),
    SHARDED,
)
CASES = [
    (encoder, Plan(data=2, accumulate=2)),
    (encoder, SHARDED),
    *(pytest.param(llama, plan, marks=pytest.mark.slow) for plan in SLOW),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # of a module that copies another one
@pytest.mark.parametrize(("make", "plan"), CASES)
def test_what_some_blocks_say_is_what_all_of_them_say(make, plan):
    rough, whole = both(make(8 * plan.pipeline), plan)
    assert rough.rough and not whole.rough
    for end in ("value", "low", "high"):
        assert getattr(rough.seconds, end) == pytest.approx(getattr(whole.seconds, end), rel=0.01)
    assert rough.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.005)
    assert rough.memory.total.low <= whole.memory.total.value <= rough.memory.total.high
    assert rough.memory.rank == whole.memory.rank
    assert sum(rough.memory.categories.values()) == pytest.approx(rough.memory.allocated, rel=1e-6)


def test_the_peak_is_found_where_it_is_at_the_depth_in_question():
    """Of few blocks the most is with the logits, of many at the end of the backward: gradients outgrow activations."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x):
            return x + self.linear(x)

    job = made(
        lambda: nn.Sequential(*(Block() for _ in range(30)), nn.Linear(512, 100_000)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.zeros(64, 512),),
    )
    rough, whole = both(job, Plan())
    assert rough.rough
    assert rough.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.005)


def test_depths_are_those_of_stages():
    whole = Stretch(tuple(f"b{n}" for n in range(24)), 0, 1, 24, (nn.Linear,))
    assert depths(Plan(), whole) == (3, 4, 21.0)
    assert depths(Plan(pipeline=2, accumulate=2), whole) == (4, 6, 10.0)
    assert depths(Plan(pipeline=2, shard=2, accumulate=2), whole) == (6, 8, 9.0)
    assert depths(Plan(pipeline=8, accumulate=8), whole) is None  # three blocks each: nothing is gained
    part = Stretch(whole.names, 1, 1, 23, whole.kinds)
    assert depths(Plan(), part) == (3, 4, 20.0)
    assert depths(Plan(pipeline=2, accumulate=2), part) is None  # a stage would hold another number of them


def test_a_model_that_cannot_be_made_shorter_is_rehearsed_whole(monkeypatch):
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

    job = made(Model, lambda model, batch: model(batch[0]).mean(), data=(torch.zeros(8, 8),), batch_size=4)
    tried = []
    monkeypatch.setattr(straight, "at_depth", lambda *a, real=straight.at_depth: tried.append(a) or real(*a))
    rough, whole = both(job, Plan())
    assert tried and rough == whole and not rough.rough


def test_a_plan_that_cannot_run_is_refused_as_the_whole_model_refuses_it():
    with pytest.raises(PlanError):
        both(encoder(), Plan(expert=2, data=1))
