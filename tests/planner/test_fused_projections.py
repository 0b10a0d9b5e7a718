"""A projection that holds queries, keys and values in one weight is cut in the rehearsal as in the run, in every layout
that models have: what a rank computes and sends is what a run's rank 0 does.

Of parallel/layout.py and parallel/layout.py too.
"""

import contextlib
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, MptConfig, MptForCausalLM

from meshwise.parallel import tensor
from meshwise.planner.trace import trace
from meshwise.planner.work import CollectiveOperation
from meshwise.spec.plan import Plan
from meshwise.torch_compat import collective_calls
from meshwise.training.job.job import Job
from tests.planner.profiled import compared, recorded
from tests.planner.test_equal_to_profiler import UNKNOWN, unexplained

WIDTH, HEADS, KEYS, EACH, WORDS = 16, 4, 2, 4, 32
"""EACH: features of a head. KEYS: heads of keys, where they are fewer than those of queries."""


def nanogpt(made):
    q, k, v = made.split(WIDTH, dim=2)
    return [each.view(*each.shape[:2], HEADS, EACH).transpose(1, 2) for each in (q, k, v)]


def timm(made):
    return made.reshape(*made.shape[:2], 3, HEADS, EACH).permute(2, 0, 3, 1, 4).unbind(0)


def megatron(made):
    """Of each head its queries, keys and values, one after the other."""
    return [each.transpose(1, 2) for each in made.view(*made.shape[:2], HEADS, 3 * EACH).chunk(3, -1)]


def grouped(made):
    """Fewer keys than queries, as llm-foundry and Phi-3 pack them."""
    parts = made.split([WIDTH, KEYS * EACH, KEYS * EACH], dim=2)
    return [each.unflatten(2, (-1, EACH)).transpose(1, 2) for each in parts]


WAYS = {"nanogpt": nanogpt, "timm": timm, "megatron": megatron, "gqa": grouped}


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEYS) * EACH if way == "gqa" else 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = WAYS[self.way](self.qkv(x))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.way == "gqa")
        return self.proj(seen.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.norm, self.attention, self.between = nn.LayerNorm(WIDTH), Attention(way), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.between(x))


def own(way):
    blocks = nn.Sequential(Block(way), Block(way))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=WORDS, n_positions=8))


def mpt():
    return MptForCausalLM(MptConfig(d_model=WIDTH, n_heads=HEADS, n_layers=2, max_seq_len=8, vocab_size=WORDS))


LAYOUTS = (*WAYS, "gpt2", "mpt")


def job_of(layout):
    made = {"gpt2": gpt2, "mpt": mpt}.get(layout, lambda: own(layout))

    def loss(model, batch):
        given = model(batch)
        given = getattr(given, "logits", given)
        return F.cross_entropy(given.flatten(0, 1), batch.flatten())

    words = torch.randint(WORDS, (16, 8), generator=torch.Generator().manual_seed(0))
    return Job(layout, made, loss, lambda ps: optim.AdamW(ps), lambda: words, batch_size=4)


@contextlib.contextmanager
def cuts_noted():
    """How `tensor` cuts each parameter, by its name, from the body on."""
    found, real = {}, tensor.cuts_of

    def noting(model, *args, **kwargs):
        cuts = real(model, *args, **kwargs)
        found.update({name: str(cuts.get(id(p))) for name, p in model.named_parameters()})
        return cuts

    with patch.object(tensor, "cuts_of", noting):
        yield found


def run_of(layout, plan):
    """Runs in a worker: the cuts, and the events and collectives of the second step."""
    calls = []
    with cuts_noted() as cuts:
        events = recorded(job_of(layout), plan, lambda: collective_calls.watch(calls.append, lambda: None))
    return cuts, events, Counter((call.kind, call.bytes) for call in calls)


PLANS = {
    "data": Plan(data=2),
    "shard": Plan(shard=2),
    "tensor": Plan(tensor=2),
    "sequence": Plan(tensor=2, sequence=True),
    "context": Plan(context=2),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "axis", [axis if plan.tensor > 1 else pytest.param(axis, marks=pytest.mark.slow) for axis, plan in PLANS.items()]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rehearsal_is_the_run(layout, axis, pool):
    plan = PLANS[axis]
    cuts, events, calls = pool(2).run(run_of, layout, plan)[0]
    with cuts_noted() as rehearsed_cuts:
        found = trace(job_of(layout), plan, "cpu")[0]
    assert rehearsed_cuts == cuts
    whats = [launch.what for launch in found.step.launches if isinstance(launch.what, CollectiveOperation)]
    assert Counter((one.kind, one.size) for one in whats) == calls
    difference = compared(events, found.step)
    left = [{call for call in side if call[0] not in UNKNOWN} for side in unexplained(difference, plan)]
    assert left == [set(), set()], difference
