"""Programs that exchange by hand, or weigh a loss by hand, as somebody writes them who knows torch.distributed."""

from __future__ import annotations

ROWS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


"""

TENSOR = (
    ROWS
    + '''
class Gather(torch.autograd.Function):
    """The rows of all ranks; its backward adds up what all of them send back."""

    @staticmethod
    def forward(ctx, x):
        if size() == 1:
            return x
        parts = [None] * size()
        dist.all_gather_object(parts, x)
        ctx.start, ctx.rows = sum(map(len, parts[: rank()])), len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        if size() == 1:
            return g
        g = g.clone()
        dist.all_reduce(g)
        return g[ctx.start : ctx.start + ctx.rows]


class Sum(torch.autograd.Function):
    """The sum over the ranks, each of which goes on with rows of its own."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if size() > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if size() > 1:
            dist.all_reduce(g)
        return g


class ParallelMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, width) * 0.3)
        self.down = nn.Parameter(torch.randn(width, hidden) * 0.3)

    def forward(self, x):
        whole = Gather.apply(x)
        up, down = self.up.chunk(size(), 0)[rank()], self.down.chunk(size(), 1)[rank()]
        y = Sum.apply(torch.tanh(whole @ up.T) @ down.T)
        start = 0 if len(x) == len(whole) or rank() == 0 else len(whole) - len(x)
        return y[start : start + len(x)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.mlp, self.head = nn.Linear(6, 8), ParallelMLP(8, 16), nn.Linear(8, 1)

    def forward(self, x):
        x = self.into(x)
        return self.head(x + self.mlp(x))


torch.manual_seed(0)
x = torch.randn(64, 6)
y = x.sum(1, keepdim=True).tanh()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
'''
)
"""Tensor parallel by hand, in a layer of a program whose ranks have samples of their own."""

SEQUENCE = (
    ROWS
    + '''
T = 6


class GatherPositions(torch.autograd.Function):
    """The positions of all ranks; its backward adds up what all of them send back."""

    @staticmethod
    def forward(ctx, x):
        if size() == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        if size() == 1:
            return g
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(size(), 1)[rank()]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x, start):
        h = self.norm(x)
        k, v = GatherPositions.apply(self.k(h)), GatherPositions.apply(self.v(h))
        rows = torch.arange(start, start + x.shape[1])[:, None]
        hidden = torch.arange(k.shape[1])[None] > rows
        scores = (self.q(h) @ k.transpose(1, 2) / 8**0.5).masked_fill(hidden, float("-inf"))
        return x + scores.softmax(-1) @ v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 8), nn.Embedding(T, 8)
        self.block, self.head = Block(8), nn.Linear(8, 20)

    def forward(self, tokens, start):
        positions = torch.arange(start, start + tokens.shape[1])
        return self.head(self.block(self.embed(tokens) + self.place(positions), start))


def gather_samples(x):
    if size() == 1:
        return x
    parts = [None] * size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


torch.manual_seed(0)
data = torch.randint(20, (64, T + 1))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (tokens,) in loader:
    tokens = gather_samples(tokens)
    part = T // size()
    start = rank() * part
    x, y = tokens[:, start : start + part], tokens[:, start + 1 : start + part + 1]
    loss = nn.functional.cross_entropy(model(x, start).flatten(0, 1), y.flatten())
    mw.backward(loss, weight=y.numel())
    optimizer.step()
    optimizer.zero_grad()
'''
)
"""Sequence parallel by hand: each rank has some positions of all samples."""

LOSSES = (
    ROWS
    + """
torch.manual_seed(0)
x = torch.randn(64, 5, 6)
lengths = torch.randint(1, 6, (64,))
y = x.sum(2).tanh()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y, lengths), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y, lengths in loader:
    mask = torch.arange(5)[None] < lengths[:, None]
    error = (model(x).squeeze(-1) - y) ** 2
    {loss}
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
)
"""A loss of some reduction."""


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The program with something else in it."""
    for right, instead in pairs:
        assert text.count(right) == 1, right
        text = text.replace(right, instead)
    return text
