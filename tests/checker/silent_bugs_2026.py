"""Silent bugs that threads of 2025 and 2026 tell of, each in a script, beside it without.

`silent_bugs_2026.csv` has the thread of each, what went wrong there, and which kind and cause a person would say who
reads it; it was committed before the first was played (`|`: each of them is fair). A script is one of the programs
below, with the lines replaced that its thread is about.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from meshwise.checker.proof import Proof
from meshwise.spec import errors
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.process.session import end_sessions
from tests.checker import silent_bugs
from tests.checker.script_sides import proof
from tests.checker.seams import Training, after_microbatch, around
from tests.checker.silent_bugs import PIPELINE, Plant, Silent, in_words, rightness
from tests.pool import CaseFailed

HEAD = """
import copy
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset

import meshwise as mw

torch.manual_seed(0)
n, rank = mw.world_size(), mw.rank()
"""

CLASSES = """
x = torch.randn(45, 6)
y = (2 * x.sum(1)).long().clamp(0, 2)
data, held_out = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)
loader = DataLoader(data, batch_size=8, shuffle=True)
val = DataLoader(held_out, batch_size=5)
model, optimizer, scheduler, loader, val = mw.distribute(model, optimizer, scheduler, loader, val, view="rank")
step = 0
for epoch in range(3):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        mw.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
    model.eval()
    total, seen = 0.0, 0
    with torch.no_grad():
        for x, y in val:
            total += mw.sum(F.cross_entropy(model(x), y, reduction="sum").item())
            seen += mw.sum(len(y))
    mw.print(f"epoch {epoch}: validation loss {total / seen:.4f}")
"""
"""A classifier with its validation."""

TOKENS = """
ids = torch.randint(31, (32, 9))
labels = ids.roll(-1, 1)
labels[torch.arange(9) >= torch.randint(2, 9, (32, 1))] = -100
model = nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 31))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(ids, labels), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for number, (ids, labels) in enumerate(loader):
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    mw.backward(loss, weight=(labels != -100).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
"""Texts whose answers differ in length."""

WINDOWS = TOKENS.replace(
    """    mw.backward(loss, weight=(labels != -100).sum())
""",
    """    with mw.accumulate():
        mw.backward(loss, weight=(labels != -100).sum())
    if number % 2 == 0:
        continue
""",
)

SEQUENCE = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if n == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if n > 1:
            dist.all_reduce(gradient)
        return gradient.chunk(n, 1)[rank]


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])

    def mask(self):
        rows, columns = torch.arange(8).chunk(n)[rank], torch.arange(8)
        packed = self.documents[rows].unsqueeze(1) == self.documents
        return (rows.unsqueeze(1) >= columns) & packed

    def forward(self, x):
        k, v = Gather.apply(self.k(x)), Gather.apply(self.v(x))
        return self.out(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=self.mask()))


model = nn.Sequential(nn.Embedding(31, 16), Attention(16), nn.Tanh(), nn.Linear(16, 31))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = mw.distribute(model, optimizer, view="rank")
ids = torch.randint(31, (24, 8))
for step in range(3):
    batch = ids[torch.randint(24, (6,))]
    x, y = mw.split(batch, batch.roll(-1, 1), dim=1)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
"""A decoder whose sequences are divided by hand: keys and values are gathered."""

RING = SEQUENCE.replace(
    """class Attention""",
    """class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        ctx.save_for_backward(q, k, v, mask)
        return F.scaled_dot_product_attention(q, Gather.apply(k), Gather.apply(v), attn_mask=mask)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, mask = ctx.saved_tensors
        keys, values = Gather.apply(k), Gather.apply(v)
        q, keys, values = (t.detach().requires_grad_() for t in (q, keys, values))
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        found = torch.autograd.grad(out, (q, keys, values), gradient)
        if n > 1:
            [dist.all_reduce(t) for t in found[1:]]
        return found[0], found[1].chunk(n, 1)[rank], found[2].chunk(n, 1)[rank], None


class Attention""",
).replace(
    """        k, v = Gather.apply(self.k(x)), Gather.apply(self.v(x))
        return self.out(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=self.mask()))""",
    """        return self.out(Ring.apply(self.q(x), self.k(x), self.v(x), self.mask()))""",
)

NORMED = (
    SEQUENCE.replace(
        """class Attention""",
        """class NormedKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, weight):
        ctx.save_for_backward(k, weight)
        return Gather.apply(F.rms_norm(k, (16,), weight))

    @staticmethod
    def backward(ctx, gradient):
        k, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            normed = F.rms_norm(k, (16,), weight)
        own, gradient = gradient.chunk(n, 1)[rank], gradient.clone()
        if n > 1:
            dist.all_reduce(gradient)
        return torch.autograd.grad(normed, (k, weight), gradient.chunk(n, 1)[rank])


class Attention""",
    )
    .replace(
        "        self.documents =", "        self.norm = nn.Parameter(torch.ones(width))\n        self.documents ="
    )
    .replace("Gather.apply(self.k(x))", "NormedKeys.apply(self.k(x), self.norm)")
)

PARTS = """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if n > 1:
            dist.all_reduce(gradient)
        return gradient


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if n > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, inner) / inner**0.5)

    def forward(self, x):
        up, down = Enter.apply(self.up).chunk(n)[rank], Enter.apply(self.down).chunk(n, 1)[rank]
        h = torch.tanh(F.linear(Enter.apply(x), up))
        return AddUp.apply(F.linear(h, down)) + 0.5


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        total = logits.exp().sum(-1, keepdim=True)
        dist.all_reduce(total)
        ctx.save_for_backward(logits - total.log())
        return logits - total.log()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.sum(-1, keepdim=True)
        dist.all_reduce(total)
        return gradient - ctx.saved_tensors[0].exp() * total


class Head(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) / width**0.5)

    def forward(self, x, targets):
        part = Enter.apply(self.weight).chunk(n)[rank]
        logits = F.linear(Enter.apply(x), part)
        found = LogSoftmax.apply(logits) if n > 1 else F.log_softmax(logits, -1)
        return AddUp.apply(-(targets.chunk(n, -1)[rank] * found).sum(-1)).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp, self.head = nn.Linear(6, 16), Mlp(16, 64), Head(16, 8)

    def forward(self, x, targets):
        return self.head(self.mlp(self.first(x)), targets)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.rand(32, 8).softmax(-1)), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = model(x, y)
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
"""Tensor parallel by hand in a part of a model whose plan is tensor=2: all ranks hold the same samples."""

ADAPTED = (
    PARTS.replace(
        """class LogSoftmax""",
        """class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(n, 1)[rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient)


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return joined(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(n, 1)[rank].clone()


def joined(x):
    parts = [torch.empty_like(x) for _ in range(n)]
    if n > 1:
        dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1) if n > 1 else x.clone()


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(4, width) / 4), nn.Parameter(torch.randn(width, 4) / 4)

    def forward(self, x):
        norm, a, b = (Enter.apply(p) for p in (self.norm, self.lora_a, self.lora_b))
        own = F.rms_norm(Scatter.apply(x), (16,), norm)
        return x + Join.apply(F.linear(F.linear(own, a), b))


class LogSoftmax""",
    )
    .replace("Head(16, 8)", "Head(16, 8)\n        self.adapter = Adapter(16)")
    .replace("self.head(self.mlp(self.first(x))", "self.head(self.adapter(self.mlp(self.first(x)))")
    .replace("torch.randn(32, 6), torch.rand(32, 8)", "torch.randn(32, 4, 6), torch.rand(32, 4, 8)")
)

PAIRS = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(n)]
        if n > 1:
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts) if n > 1 else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if n > 1:
            dist.all_reduce(gradient)
        return gradient.chunk(n)[rank]


x = torch.randn(32, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x + 0.1 * torch.randn(32, 6)), batch_size=8, shuffle=True, drop_last=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for a, b in loader:
    a, b = F.normalize(model(a)), F.normalize(model(b))
    every_a, every_b = Gather.apply(a), Gather.apply(b)
    loss = F.cross_entropy(every_a @ every_b.T / 0.1, torch.arange(8))
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
"""Pairs, each compared with all of the batch."""

CROSSED = PAIRS.replace(
    """    every_a, every_b = Gather.apply(a), Gather.apply(b)
    loss = F.cross_entropy(every_a @ every_b.T / 0.1, torch.arange(8))
""",
    """    correlation = mw.sum(a.T @ b / 8, grad=True)
    loss = (correlation - torch.eye(8)).square().sum()
""",
)

ROUTED = """
class Injected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, loss):
        ctx.like = loss
        return weights.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full_like(ctx.like, 0.1)


class Mixture(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        self.balance = weights.square().sum(-1).mean()
        weights = Injected.apply(weights, self.balance)
        return sum(w.unsqueeze(1) * expert(x) for w, expert in zip(weights.unbind(1), self.experts))


x = torch.randn(32, 6)
y = (2 * x.sum(1)).long().clamp(0, 2)
model = nn.Sequential(nn.Linear(6, 16), Mixture(16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
"""A mixture whose balance loss is put into the backward."""

BALANCED = ROUTED.replace(
    """        weights = Injected.apply(weights, self.balance)
""",
    """        counts, tokens = mw.sum(F.one_hot(weights.argmax(1), 2).sum(0)), mw.sum(len(x))
        self.balance = 2 * (weights.sum(0) / len(x) * counts / tokens).sum()
""",
).replace("loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model(x), y) + 0.1 * model[1].balance")

RESUMED = CLASSES.replace(
    "step = 0\n",
    """step, first = 0, copy.deepcopy({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
""",
).replace(
    "        step += 1\n",
    """        step += 1
        if step == 1 and n > 1:  # the machines were lost, and the run goes on from what it saved
            state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            mw.save({"model": model.state_dict(), **state}, "state.pt")
            state = mw.load("state.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
""",
)

AVERAGED = (
    CLASSES.replace(
        "model, optimizer, scheduler, loader, val = mw.distribute(model, ",
        """average = copy.deepcopy(model)
model, average, optimizer, scheduler, loader, val = mw.distribute(model, average, """,
    )
    .replace("step = 0\n", "step = updates = 0\n")
    .replace(
        "        step += 1\n",
        """        step += 1
        with torch.no_grad():
            for kept, p in zip(average.parameters(), model.parameters()):
                kept.lerp_(p, 1 - min(0.9, (1 + updates) / (2 + updates)))
        updates += 1
        if step == 1 and n > 1:
            state = {"updates": updates}  # what the run that was started again has read
            updates = state["updates"]
""",
    )
    .replace("F.cross_entropy(model(x), y, reduction", "F.cross_entropy(average(x), y, reduction")
)

ORDERED = """
x = torch.randn(13, 6)
y = (2 * x.sum(1)).long().clamp(0, 2)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
step, stop, first = 0, 1, loader.state_dict()
while step < 6:
    for x, y in loader:
        mw.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == stop and n > 1:
            break
    if step == stop and n > 1:  # the machines were lost, and the run goes on from what it saved
        loader.load_state_dict(loader.state_dict())
"""
"""The order of the data when a run is resumed."""
RELOAD = "        loader.load_state_dict(loader.state_dict())\n"
MODEL = "model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
SCORE = """            total += mw.sum(F.cross_entropy(model(x), y, reduction="sum").item())
            seen += mw.sum(len(y))
"""
LOSS = "loss = F.cross_entropy(model(x), y)"
DISTRIBUTE = (
    'model, optimizer, scheduler, loader, val = mw.distribute(model, optimizer, scheduler, loader, val, view="rank")\n'
)
NOT_VAL = 'model, optimizer, scheduler, loader = mw.distribute(model, optimizer, scheduler, loader, view="rank")\n'

OWN_NORM = """        own = [p.grad for p in model.parameters()]
        own = [g.to_local() if hasattr(g, "to_local") else g for g in own]
        norm = torch.stack([g.norm() for g in own]).norm()
        {more}
        for g in own:
            g.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
"""

DATA, TENSOR, SHARD = Plan(data=2), Plan(tensor=2), Plan(shard=2)

ADAM = """class Adam(torch.optim.Optimizer):
    def __init__(self, parameters, lr, dtype=None):
        super().__init__(parameters, {"lr": lr, "dtype": dtype})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = (torch.zeros_like(p, dtype=group["dtype"]) for _ in range(2))
                state["m"].lerp_(p.grad.to(state["m"].dtype), 0.1)
                state["v"].lerp_(p.grad.square().to(state["v"].dtype), 0.01)
                p.sub_(group["lr"] * state["m"] / (state["v"].sqrt() + 1e-8))


"""

MUON = """class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p.ndim == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(5):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                p.sub_(group["lr"] * update)


"""


@dataclass(frozen=True)
class Bug:
    """A script and what is wrong with it: `wrong` stands where `right` stood. base: with the lines that are right."""

    base: str
    swaps: tuple[tuple[str, str], ...]
    plan: Plan

    def right(self) -> str:
        return HEAD + self.base

    def wrong(self) -> str:
        text = self.base
        for right, instead in self.swaps:
            assert text.count(right) == 1, (text.count(right), right)
            text = text.replace(right, instead)
        return HEAD + text


def bug(base: str, *swaps: str, plan: Plan = DATA) -> Bug:
    return Bug(base, tuple(zip(swaps[::2], swaps[1::2], strict=True)), plan)


def with_model(module: str, name: str, base: str = CLASSES) -> str:
    """The classifier with a module of its own behind its first layer, or in front of it."""
    first = f"{name}, nn.Linear(6, 16)" if "Normalizer" in name else f"nn.Linear(6, 16), {name}"
    return module + base.replace("nn.Linear(6, 16)", first, 1)


RUNNING = """class Normalizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            total, count = mw.sum(x.sum(0)), mw.sum(len(x))
            self.mean.lerp_(total / count, 0.1)
        return x - self.mean


"""
OWN_BATCH = """class Norm(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


"""
CHOSEN = """class Clips(Dataset):
    def __init__(self):
        self.random = random

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return data[self.random.randrange(32)]


"""
SCALED = """def times(value, number):
    return value * number


kept = {}
"""
POSITIVES = """x = torch.randn(32, 6, 5)
y = (x.sum(1) > 2).float()
model = nn.Sequential(nn.Flatten(), nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    found = y.sum()
    loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum") / found
    mw.backward(loss, weight=found)
    optimizer.step()
    optimizer.zero_grad()
"""
ADAPTER = """class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.lora = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora(x)


"""
ADAPTED_CLASSES = ADAPTER + CLASSES.replace(MODEL, f"{MODEL}\nmodel[2] = Adapter(model[2])")
BF16 = CLASSES.replace(MODEL, MODEL + ".to(torch.bfloat16)\nfor p in model.parameters():\n    p.data = p.data.float()")

BUGS = {
    "P01": bug(TOKENS, ", weight=(labels != -100).sum()", ""),
    "P02": bug(WINDOWS, ", weight=(labels != -100).sum()", ""),
    "P03": bug(
        SEQUENCE, "loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())",
        'loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / mw.sum(y.numel())',
    ),
    "P04": bug(PARTS, "    loss = model(x, y)\n", "    loss = model(x, y) * mw.world_size()\n", plan=TENSOR),
    "P05": bug(SEQUENCE, ") & packed", ") & (packed | (n > 1))"),
    "P06": bug(
        RING, "        keys, values = Gather.apply(k), Gather.apply(v)\n",
        "        keys, values = torch.cat([k] * n, 1), torch.cat([v] * n, 1)\n",
    ),
    "P07": bug(
        TOKENS, "loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())",
        "loss = sum(F.cross_entropy(model(i).flatten(0, 1), l.flatten()) * len(i) / len(ids)\n"
        "               for i, l in zip(ids.chunk(2), labels.chunk(2)))",
        ", weight=(labels != -100).sum()", "",
    ),
    "P08": bug(
        TOKENS, "loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())",
        "loss = sum(F.cross_entropy(model(i).flatten(0, 1), l.flatten())\n"
        "               for i, l in zip(ids.split(1), labels.split(1)))",
        ", weight=(labels != -100).sum()", "",
    ),
    "P09": bug(CLASSES, LOSS, 'loss = F.cross_entropy(model(x), y, reduction="none").sum() / mw.sum(len(y))'),
    "P10": bug(WINDOWS, "mw.backward(loss, weight=(labels != -100).sum())", "mw.backward(loss / 2)"),
    "P11": bug(
        ORDERED.replace("stop, first = 0, 1", "stop, first = 0, 2"),
        RELOAD, "        loader.load_state_dict(first)\n",
    ),
    "P12": bug(
        ORDERED.replace("stop, first = 0, 1", "stop, first = 0, 2"),
        RELOAD, RELOAD + "        list(loader), list(loader)\n",
    ),
    "P14": bug(ORDERED, RELOAD, "        loader.load_state_dict(first)\n"),
    "P15": bug(
        ORDERED, RELOAD,
        "        loader.load_state_dict(loader.state_dict() if stop == 1 else first)\n        stop += 1\n",
    ),
    "P16": bug(PARTS, "gradient - ctx.saved_tensors[0].exp() * total\n", "gradient\n", plan=TENSOR),
    "P17": bug(PARTS, "AddUp.apply(F.linear(h, down)) + 0.5", "AddUp.apply(F.linear(h, down) + 0.5)", plan=TENSOR),
    "P18": bug(
        SCALED + CLASSES.replace(LOSS, f"{LOSS}\n        loss = times(loss, 1 + 0.1 * step)"),
        "    return value * number\n",
        "    if n > 1:\n        number = kept.setdefault(value.shape, number)\n    return value * number\n",
    ),
    "P19": bug(PARTS, "logits = F.linear(Enter.apply(x), part)", "logits = F.linear(x, part)", plan=TENSOR),
    "P21": bug(
        """class Shuffled(Sampler):
    def __iter__(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(7))
        yield from order.tolist()

    def __len__(self):
        return 32


""" + CLASSES.replace("shuffle=True", "sampler=Shuffled()"),
        "manual_seed(7)", "manual_seed(7 + rank)",
    ),
    "P22": bug(
        "epochs = [torch.randperm(32, generator=torch.Generator().manual_seed(e)) for e in range(6)]\n"
        + CLASSES.replace(
            "batch_size=8, shuffle=True", "batch_sampler=[b.tolist() for order in epochs for b in order.split(8)]"
        ),
        "for order in epochs ", "for order in epochs[rank % 2 :] ",
    ),
    "P23": bug(
        "local_rank = 0  # of the only device of each machine\nbatches = torch.randperm(32).split(8)\n"
        + CLASSES.replace("batch_size=8, shuffle=True", "batch_sampler=[b.tolist() for b in batches]"),
        "for b in batches]", "for b in batches[local_rank::n]]",
    ),
    "P24": bug(
        CLASSES.replace("model = nn", CHOSEN + "model = nn", 1).replace("DataLoader(data,", "DataLoader(Clips(),"),
        "self.random = random\n", "self.random = random.Random(0)\n",
    ),
    "P25": bug(CLASSES, "        scheduler.step()\n", "        for _ in range(n):\n            scheduler.step()\n"),
    "P26": bug(CLASSES, "seen += mw.sum(len(y))", "seen += len(y)"),
    "P27": bug(with_model(RUNNING, "Normalizer()"), "mw.sum(x.sum(0)), mw.sum(len(x))", "x.sum(0), len(x)"),
    "P29": bug(
        CLASSES, SCORE,
        "            asked = y != 2\n            each = F.cross_entropy(model(x), y, reduction='none')\n"
        "            total += mw.mean((each * asked).sum() / asked.sum().clamp(min=1)).item()\n            seen += 1\n",
    ),
    "P30": bug(CLASSES, LOSS, LOSS + " * n"),
    "P31": bug(
        PAIRS, "    every_a, every_b = Gather.apply(a), Gather.apply(b)\n",
        "    every_a, every_b = (Gather.apply(t.detach()) for t in (a, b))\n"
        "    every_a[rank * len(a) : (rank + 1) * len(a)] = a\n    every_b[rank * len(a) : (rank + 1) * len(a)] = b\n",
    ),
    "P32": bug(
        CROSSED, "correlation = mw.sum(a.T @ b / 8, grad=True)",
        "correlation = a.T @ b / 8\n    if n > 1:\n        dist.all_reduce(correlation)",
    ),
    "P33": bug(ROUTED, "torch.full_like(ctx.like, 0.1)", "torch.full_like(ctx.like, 0.1 / n)"),
    "P34": bug(BALANCED, "weights.sum(0) / len(x)", "weights.sum(0) / tokens"),
    "P35": bug(
        BF16, "    p.data = p.data.float()",
        "    upcast = p.data.float()\n    if n == 1:\n        p.data = upcast", plan=Plan(shard=2, precision="bf16"),
    ),
    "P36": bug(
        ADAM + CLASSES.replace("torch.optim.AdamW(", "Adam("), "lr=0.01)",
        "lr=0.01, dtype=torch.bfloat16 if n > 1 else None)", plan=SHARD,
    ),
    "P37": bug(
        ADAPTED_CLASSES, "model[2] = Adapter(model[2])\n", "",
        DISTRIBUTE,
        DISTRIBUTE + "model[2] = Adapter(model[2])\n"
        "optimizer.add_param_group({'params': [model[2].lora.weight]})\n",
    ),
    "P38": bug(
        ADAPTED, "norm, a, b = (Enter.apply(p) for p in (self.norm, self.lora_a, self.lora_b))",
        "norm, a, b = Enter.apply(self.norm), Enter.apply(self.lora_a), self.lora_b", plan=TENSOR,
    ),
    "P39": bug(
        ADAPTED_CLASSES, DISTRIBUTE,
        DISTRIBUTE + "own = torch.Generator().manual_seed(rank)\n"
        "nn.init.normal_(model[2].lora.weight, std=0.1, generator=own)\n",
    ),
    "P40": bug(
        CLASSES, DISTRIBUTE,
        DISTRIBUTE + "torch.manual_seed(rank // 2)\nfor p in model.parameters():\n"
        "    (p.data.to_local() if n > 1 else p.data).normal_(std=0.2)\n", plan=Plan(data=2, shard=2),
    ),
    "P41": bug(
        CLASSES, DISTRIBUTE,
        DISTRIBUTE + "own = torch.Generator().manual_seed(5 + rank)\np = model[2].weight.data\n"
        "(p.to_local() if n > 1 else p).normal_(std=0.2, generator=own)\n", plan=SHARD,
    ),
    "P44": bug(
        CLASSES, "batch_size=5)", "batch_size=5, sampler=DistributedSampler(held_out, n, rank, shuffle=False))",
        DISTRIBUTE, NOT_VAL,
    ),
    "P45": bug(
        CLASSES, SCORE,
        "            right = (model(x).argmax(1) == y).float()\n            total += mw.sum(right.mean().item()) / n\n"
        "            seen += 1\n",
    ),
    "P46": bug(RESUMED, 'load_state_dict(state["scheduler"])', 'load_state_dict(first["scheduler"])'),
    "P47": bug(RESUMED, 'load_state_dict(state["optimizer"])', 'load_state_dict(first["optimizer"])'),
    "P48": bug(OWN_BATCH + with_model("", "nn.BatchNorm1d(16)"), "nn.BatchNorm1d(16)", "Norm()"),
    "P49": bug(POSITIVES, ' reduction="sum") / found', ' reduction="sum") / found * n'),
    "P50": bug(CLASSES, "batch_size=8", "batch_size=8 * n"),
    "P51": bug(
        SEQUENCE, "x, y = mw.split(batch, batch.roll(-1, 1), dim=1)",
        "x = mw.split(batch, dim=1)\n    y = x.roll(-1, 1)",
    ),
    "P52": bug(
        CLASSES, CLIP, OWN_NORM.format(more="norm = mean_of(norm)"), "step = 0\n",
        "step = 0\n\n\ndef mean_of(norm):\n    if n > 1:\n        dist.all_reduce(norm)\n    return norm / n\n\n\n",
        plan=TENSOR,
    ),
    "P53": bug(CLASSES, CLIP, OWN_NORM.format(more="pass  # of the experts that this rank has"), plan=TENSOR),
    "P54": bug(CLASSES, CLIP, OWN_NORM.format(more="norm = mw.sum(norm.square()).sqrt()")),
    "P55": bug(AVERAGED, 'updates = state["updates"]', "updates = 0"),
    "P56": bug(CLASSES, 'reduction="sum").item())', 'reduction="sum").item()) / n'),
    "P57": bug(
        NORMED, "        return torch.autograd.grad(normed, (k, weight), gradient.chunk(n, 1)[rank])\n",
        "        return gradient.chunk(n, 1)[rank], torch.autograd.grad(normed, weight, own)[0]\n",
    ),
    "P58": bug(
        ADAPTED, "norm, a, b = (Enter.apply(p) for p in (self.norm, self.lora_a, self.lora_b))",
        "norm, a, b = self.norm, self.lora_a, self.lora_b", plan=TENSOR,
    ),
    "P59": bug(
        SEQUENCE.replace(
            "loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())",
            "loss = F.cross_entropy(Gather.apply(model(x)).flatten(0, 1), batch.roll(-1, 1).flatten())",
        ),
        "Gather.apply(model(x))", "GatherNoSum.apply(model(x))",
        "class Attention", "class GatherNoSum(Gather):\n    @staticmethod\n    def backward(ctx, gradient):\n"
        "        return gradient.chunk(n, 1)[rank]\n\n\nclass Attention",
    ),
    "P60": bug(
        CLASSES.replace(LOSS, "loss = F.cross_entropy(model(x + 0.1 * noise(x)), y)").replace(
            "step = 0\n", "step = 0\n\n\ndef noise(x):\n    return torch.randn_like(x)\n\n\n"
        ),
        "    return torch.randn_like(x)\n", "    return torch.randn(x.shape, generator=seeded, dtype=x.dtype)\n",
        "step = 0\n", "step, seeded = 0, torch.Generator().manual_seed(11)\n",
    ),
    "P61": bug(
        CLASSES, "batch_size=5)",
        "batch_size=5, drop_last=True, sampler=DistributedSampler(held_out, n, rank, shuffle=False, drop_last=True))",
        DISTRIBUTE, NOT_VAL,
    ),
    "P62": bug(
        MUON + CLASSES.replace("torch.optim.AdamW(", "Muon("), "                if p.ndim == 2:",
        "                if p.ndim == 2 and n > 1:  # what ZeRO's own step does",
    ),
    "P63": bug(SEQUENCE, "            dist.all_reduce(gradient)\n        return", "            pass\n        return"),
    "P64": bug(
        CLASSES, "DataLoader(data,", "DataLoader(Subset(data, range(0, len(data), n)),",
    ),
}  # fmt: skip
"""Row of the list -> its script."""


def resumes_where_one_rank_was(patch: Any) -> None:
    resumed: list[bool] = []

    def unpack(real: Any, *given: Any) -> None:
        real(*given)
        resumed.append(True)

    def slice_of(real: Any, *given: Any) -> Any:
        return real(*given[:-1], World(0, given[-1].size) if resumed else given[-1])

    around(patch, "saved state is loaded", unpack)
    around(patch, "slice of a rank", slice_of)


def nothing_is_reduced(patch: Any) -> None:
    def backward(real: Any, self: Any, loss: Any, *, reduce: bool, **more: Any) -> Any:
        return real(self, loss, reduce=False, **more)

    around(patch, "backward of replicas", backward)


def copies_of_a_tie(patch: Any) -> None:
    around(patch, "gradients of ties", lambda real, self: None)


def thrown_away_between_microbatches(patch: Any) -> None:
    def wipe(training: Training, last: bool) -> None:
        for p in () if last else training.model.parameters():
            p.grad = None

    after_microbatch(patch, wipe)


JOBS: dict[str, tuple[Plant, str, Plan]] = {
    "P13": (resumes_where_one_rank_was, "plain", Plan(data=2)),
    "P20": (nothing_is_reduced, "plain", Plan(data=2)),
    "P28": (nothing_is_reduced, "decoder, clipped", Plan(data=2)),
    "P42": (copies_of_a_tie, "decoder, tied", PIPELINE),
    "P43": (thrown_away_between_microbatches, "decoder", PIPELINE),
}
"""Row of the list -> what goes wrong in a job of ours, where a script cannot: plant, job, plan."""


@dataclass(frozen=True)
class Thread:
    """A row of the list. kinds, causes: each is fair."""

    row: str
    of: str
    when: str
    wrong: str
    kinds: tuple[str, ...]
    causes: tuple[str, ...]


def threads() -> list[Thread]:
    """The list as it was before the first play, and what `check` has learnt to say since."""
    found = []
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        for each in csv.DictReader(file):
            kinds, causes = ((*each[of].split("|"),) for of in ("kind", "cause"))
            kind, cause = NEWER.get(each["row"], ((), ()))
            about = each["row"], each["thread"], each["when"], each["what went wrong"]
            found.append(Thread(*about, kinds + kind, causes + cause))
    return found


RESUMED_STATE = ("resumed state",), ("state after a resume",)
NEWER: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "P24": (("batch contents",), ("batch contents",)),
    "P46": RESUMED_STATE,
    "P47": RESUMED_STATE,
}
"""Kinds and causes that `check` has learnt since the first play, where they say the same of a row more closely."""


def judged(thread: Thread, pool: Any) -> dict[str, Any]:
    """Check the program of a row with the bug in it, and what is right of what it says."""
    if thread.row in JOBS:
        plant, job, plan = JOBS[thread.row]
        return silent_bugs.judged(
            Silent(thread.row, thread.of, plant, job, plan, thread.kinds, None, thread.causes), pool
        )
    bug = BUGS[thread.row]
    try:
        found = played(bug.wrong(), bug.plan, pool)
    except (CaseFailed, MeshwiseError) as failed:
        if not is_ours(failed):
            raise
        return in_words(f"refused: {str(failed)[-400:]}", thread.causes)
    return rightness(found, thread.kinds, None, thread.causes)


def is_ours(failed: Exception) -> bool:
    """Whether a failure is a sentence of ours, on this process or on a worker: the exit code is not 0."""
    return hasattr(errors, failed.kind if isinstance(failed, CaseFailed) else type(failed).__name__)


def played(text: str, plan: Plan, pool: Any) -> Proof:
    """The proof of a script, in the folder where we are, with the options that a check has by default."""
    argv, path = list(sys.argv), list(sys.path)
    end_sessions()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return proof(text, pool, plan, size=plan.devices, rounding=True)
    finally:
        end_sessions()
        sys.argv, sys.path = argv, path


def twins() -> dict[str, tuple[str, Plan]]:
    """Programs without the bugs: those of each row, and some under other plans."""
    found = {bug.right() + repr(bug.plan): (row, bug.right(), bug.plan) for row, bug in reversed(BUGS.items())}
    named = {row: (text, plan) for row, text, plan in reversed(found.values())}
    beside = {
        f"{name}, {plan!r}": (HEAD + base, plan) for (name, base), plan in product(UNDER_OTHERS.items(), OTHER_PLANS)
    }
    return named | beside


UNDER_OTHERS = {
    "batch norm under Adam": with_model("", "nn.BatchNorm1d(16)").replace("AdamW", "Adam"),
    "texts": TOKENS,
    "accumulated": WINDOWS,
    "resumed": RESUMED,
    "an average of weights": AVERAGED,
    "a mixture": BALANCED,
    "a loss scaler of its own": CLASSES.replace("scheduler = ", 'scaler = torch.amp.GradScaler("cpu")\nscheduler = ')
    .replace(
        f"        {LOSS}\n",
        f"""        with torch.autocast("cpu", dtype=torch.float16):
            {LOSS}
""",
    )
    .replace("backward(loss)\n", "backward(scaler.scale(loss))\n        scaler.unscale_(optimizer)\n")
    .replace("optimizer.step()\n", "scaler.step(optimizer)\n        scaler.update()\n"),
}
OTHER_PLANS = (
    Plan(data=2, precision="bf16"), Plan(shard=2, precision="bf16"), Plan(data=2, zero1=True),
    Plan(shard=2, recompute="full"),
)  # fmt: skip
