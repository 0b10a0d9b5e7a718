"""Constructors that do more than draw parameters in a row: what a replay must get right, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.checker.models_to_check import bert, gpt2, llama, vit
from tests.parallel.zoo import ZOO


class Computing(nn.Module):
    """Initialisers that compute from tensors; buffers and plain tensors; values that are copied from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(8, 8)
        nn.init.orthogonal_(self.square.weight)
        self.wide = nn.Linear(8, 300)
        nn.init.trunc_normal_(self.wide.weight, std=0.02)
        self.back = nn.Linear(300, 8)
        self.back.weight.data.copy_(self.wide.weight.data.t())
        self.back.bias.data = torch.ones(8) * 3
        self.twin = copy.deepcopy(self.square)
        self.embed = nn.Embedding(10, 4, padding_idx=2)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.embed.weight
        self.sparse = nn.init.sparse_(nn.Parameter(torch.empty(10, 10)), 0.3)
        self.dirac = nn.init.dirac_(nn.Parameter(torch.empty(3, 3, 3)))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm, self.rnn = nn.BatchNorm1d(3), nn.GRU(3, 4)
        self.attend = nn.MultiheadAttention(8, 2)
        self.register_buffer("frequencies", 1 / 10 ** torch.arange(4.0))
        self.same = self.frequencies
        self.given = torch.tensor([1.0, 2.0])
        self.several: list[Any] = [torch.arange(3), {"drawn": torch.randn(2)}]
        self.order = torch.randperm(10)


class Seeding(nn.Module):
    """Generators that are set, put back, and the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(20))
        before = torch.get_rng_state()
        torch.manual_seed(7)
        self.b = nn.Parameter(torch.randn(5, 5) * 0.3)
        torch.set_rng_state(before)
        self.c = nn.Parameter(torch.rand(4))
        own = torch.Generator().manual_seed(3)
        self.d = nn.Parameter(torch.randn(20, generator=own))
        own.manual_seed(4)
        self.e = nn.Parameter(torch.rand(20, generator=own))
        own.manual_seed(torch.initial_seed())  # each rank's
        self.f, begun = nn.Parameter(torch.rand(7, generator=own)), own.get_state()
        self.g = nn.Parameter(torch.rand(20, generator=own))
        own.set_state(begun)
        self.h = nn.Parameter(torch.rand(5, generator=own))
        torch.manual_seed(11)


class Looking(nn.Module):
    """A constructor that goes by values: of a range, of parameters, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
        self.weight = nn.Parameter(torch.randn(300))
        self.scale = self.weight.std().item()
        self.over = torch.ones(5, 5).triu().nonzero()
        if (self.weight > 0).any():
            self.more = nn.Parameter(torch.randn(int((self.weight > 0).sum())))


class Halved(nn.Module):
    """Converted, and filled anew by its own pass over its parts, as transformers do it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.to(torch.float64)


class Trying(nn.Module):
    """Tries its layers on drawn numbers, as speechbrain's CRDNN does: batch norms keep what they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.layers(torch.randn(32, 8))


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    **{name: case.make for name, case in ZOO.items()},
    "computing": Computing,
    "seeding": Seeding,
    "looking": Looking,
    "halved": Halved,
    "trying": Trying,
}

OF_TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}
MAKERS = CONSTRUCTORS | OF_TRANSFORMERS


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors that are plain attributes, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        found |= {f"{name}.{own}": p for own, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        found |= {f"{name}.{own}": b for own, b in module.named_buffers(recurse=False, remove_duplicate=False)}
        found |= {f"{name}.{own}": v for own, v in vars(module).items() if isinstance(v, torch.Tensor)}
        for own, value in vars(module).items():
            if isinstance(value, list) and own == "several":
                found |= {f"{name}.{own}.0": value[0], f"{name}.{own}.1": value[1]["drawn"]}
    return found
