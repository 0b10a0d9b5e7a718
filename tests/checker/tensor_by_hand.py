"""Tensor and sequence parallel by hand, in a decoder whose ranks have the same samples, as Megatron divides one."""

from __future__ import annotations

from tests.checker.strangers import changed

HEAD = """import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
"""
ONE_AXIS = """
def group():
    return None


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


"""
"""All ranks divide the layers."""

TWO_AXES = """from torch.distributed.device_mesh import init_device_mesh

mesh = None


def axis(name):
    global mesh
    if mesh is None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh[name]


def group():
    return axis("tp").get_group()


def size():
    return 2 if mw.world_size() == 4 else 1


def rank():
    return axis("tp").get_local_rank() if size() > 1 else 0


"""
"""Two ranks divide the layers, and two of these the samples."""

MODEL = '''class CopyToRegion(torch.autograd.Function):
    """Identity; its backward adds up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if size() > 1:
            dist.all_reduce(g, group=group())
        return g


class ReduceFromRegion(torch.autograd.Function):
    """Adds up; its backward is the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if size() > 1:
            dist.all_reduce(x, group=group())
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ColumnParallelLinear(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.bias = nn.Parameter(torch.zeros(outer))

    def forward(self, x):
        w = CopyToRegion.apply(self.weight).chunk(size(), 0)[rank()]
        b = CopyToRegion.apply(self.bias).chunk(size(), 0)[rank()]
        return F.linear(CopyToRegion.apply(x), w, b)


class RowParallelLinear(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.bias = nn.Parameter(torch.randn(outer) / 4)

    def forward(self, x):
        w = CopyToRegion.apply(self.weight).chunk(size(), 1)[rank()]
        return ReduceFromRegion.apply(F.linear(x, w)) + self.bias


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise, self.fall = ColumnParallelLinear(width, 4 * width), RowParallelLinear(4 * width, width)

    def forward(self, x):
        return x + self.fall(F.gelu(self.rise(self.norm(x))))


class Words(nn.Module):

    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(words, width))

    def forward(self, ids):
        own = CopyToRegion.apply(self.table).chunk(size(), 0)[rank()]
        start = rank() * len(own)
        theirs = (ids < start) | (ids >= start + len(own))
        found = F.embedding((ids - start).masked_fill(theirs, 0), own).masked_fill(theirs[..., None], 0.0)
        return ReduceFromRegion.apply(found)


class Decoder(nn.Module):
    def __init__(self, width=16, words=24):
        super().__init__()
        self.words, self.place = Words(words, width), nn.Parameter(torch.randn(6, width) / 4)
        self.first, self.second = Feed(width), Feed(width)
        self.last, self.out = nn.LayerNorm(width), nn.Parameter(torch.randn(words, width) / 4)

    def forward(self, ids):
        x = self.words(ids) + self.place
        return F.linear(self.last(self.second(self.first(x))), self.out)


model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randint(24, (48, 7))), batch_size=8, shuffle=True, drop_last=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (ids,) in loader:
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
'''

POSITIONS = """def gathered(x):
    if size() == 1:
        return x.clone()
    parts = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(parts, x.contiguous(), group=group())
    return torch.cat(parts, 1)


def scattered(x):
    if size() == 1:
        return x.clone()
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group())
    return x.chunk(size(), 1)[rank()].contiguous()


class GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, g):
        return scattered(g)


class ScatterPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, g):
        return gathered(g)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(size(), 1)[rank()].contiguous()

    @staticmethod
    def backward(ctx, g):
        return gathered(g)


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, g):
        return g.chunk(size(), 1)[rank()].contiguous()


class PartNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], CopyToRegion.apply(self.scale), CopyToRegion.apply(self.shift))


class ColumnParallelLinear"""
SEQUENCE = changed(
    MODEL,
    ("class ColumnParallelLinear", POSITIONS),
    ("F.linear(CopyToRegion.apply(x), w, b)", "F.linear(GatherPositions.apply(x), w, b)"),
    (
        "ReduceFromRegion.apply(F.linear(x, w)) + self.bias",
        "ScatterPositions.apply(F.linear(x, w)) + CopyToRegion.apply(self.bias)",
    ),
    ("self.norm = nn.LayerNorm(width)", "self.norm = PartNorm(width)"),
    ("x = self.words(ids) + self.place", "x = Cut.apply(self.words(ids) + self.place)"),
    ("self.last(self.second(self.first(x)))", "self.last(Join.apply(self.second(self.first(x))))"),
)
"""Between the layers each rank has a part of the positions."""

LOOPED = changed(
    SEQUENCE,
    ("CopyToRegion.apply(self.scale), CopyToRegion.apply(self.shift)", "self.scale, self.shift"),
    (
        "    optimizer.step()\n",
        """    for norm in (model.first.norm, model.second.norm) if size() > 1 else ():
        for p in (norm.scale, norm.shift):
            dist.all_reduce(p.grad.to_local(), group=group())
    optimizer.step()
""",
    ),
)
"""The gradients of norms, of which each rank has those of its positions, are added up in the loop."""
