"""Builds the models of foreign_table.py that users put together from a package's layers."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


def torchvision_backbone() -> nn.Module:
    """A small convolutional backbone, as torchvision's guide of custom detectors says it."""
    made: Any = nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 16, 3, 2, 1),
            first=nn.ReLU(),
            middle=nn.Conv2d(16, 32, 3, 2, 1),
            second=nn.ReLU(),
            last=nn.Conv2d(32, 32, 3, 2, 1),
        )
    )
    made.out_channels = 32
    return made  # type: ignore[no-any-return]


def counting_fcos(**more: Any) -> nn.Module:
    """FCOS whose head keeps over how much its losses are means."""
    parts = importlib.import_module("torchvision.models.detection.fcos")

    class Counting(parts.FCOSHead):  # type: ignore[misc, name-defined]
        def compute_loss(self, targets: Any, found: Any, anchors: Any, matched: list[Tensor]) -> Any:
            self.foreground = torch.stack([(each >= 0).sum() for each in matched]).sum()
            return super().compute_loss(targets, found, anchors, matched)

    backbone = torchvision_backbone()
    return parts.FCOS(backbone, 5, head=Counting(backbone.out_channels, 1, 5), **more)  # type: ignore[no-any-return]


class ConvTasNet(nn.Module):
    """Speechbrain's encoder, masks and decoder."""

    def __init__(self) -> None:
        super().__init__()
        parts = importlib.import_module("speechbrain.lobes.models.dual_path")
        masks = importlib.import_module("speechbrain.lobes.models.conv_tasnet")
        self.encoder = parts.Encoder(kernel_size=16, out_channels=32)
        self.masks = masks.MaskNet(N=32, B=16, H=32, P=3, X=2, R=1, C=2, norm_type="gLN", causal=False)
        self.decoder = parts.Decoder(32, 1, kernel_size=16, stride=8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        coded = self.encoder(x)
        heard = [self.decoder(coded * mask) for mask in self.masks(coded)]
        found = torch.stack(heard, -1)
        return nn.functional.pad(found, (0, 0, 0, x.shape[1] - found.shape[1]))


class ConformerCTC(nn.Module):
    """Features of a sound to letters."""

    def __init__(self) -> None:
        super().__init__()
        conformer = importlib.import_module("conformer").Conformer
        self.into = nn.Linear(20, 32)
        self.body = conformer(32, depth=2, dim_head=8, heads=4, conv_kernel_size=7, attn_dropout=0.1, ff_dropout=0.1)
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.into(x)))  # type: ignore[no-any-return]


class GraphModel(nn.Module):
    """A network of torch_geometric with a mean over each graph."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        self.pool = importlib.import_module("torch_geometric.nn").global_mean_pool
        models = importlib.import_module("torch_geometric.nn.models")
        self.body = getattr(models, kind)(8, 32, 2, 32, **more)
        self.out = nn.Linear(32, 1)

    def forward(self, batch: Any) -> Tensor:
        return self.out(self.pool(self.body(batch.x, batch.edge_index), batch.batch))  # type: ignore[no-any-return]


def within(place: Tensor, of: Tensor, cutoff: float = 4.0) -> tuple[Tensor, Tensor]:
    """Pairs of atoms of one molecule that are near, and how far apart: what torch_geometric has a C++ package for."""
    far = torch.cdist(place, place)
    near = (far < cutoff) & (of[:, None] == of) & ~torch.eye(len(of), dtype=torch.bool)
    edges = near.nonzero().T
    return edges, (place[edges[0]] - place[edges[1]]).norm(dim=1)


def real_nvp() -> nn.Module:
    """RealNVP of nflows, from whose density one learns."""
    return importlib.import_module("nflows.flows").SimpleRealNVP(4, 32, 2, 1)  # type: ignore[no-any-return]


class Quantized(nn.Module):
    """Images through codes of vector-quantize-pytorch."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1))
        self.quantizer = quantizer
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        coded = self.encoder(x)
        codes, *more = self.quantizer(coded.flatten(2).mT)
        return self.decoder(codes.mT.reshape(coded.shape)), more[1].sum() if len(more) > 1 else 0.0


def quantized(kind: str, **more: Any) -> nn.Module:
    """kind: a class of vector_quantize_pytorch."""
    package = importlib.import_module("vector_quantize_pytorch")
    made = package.FSQ([8, 5, 5], dim=32) if kind == "FSQ" else getattr(package, kind)(32, 16, **more)
    return Quantized(made)


def click_model(kind: str) -> nn.Module:
    """A model of deepctr-torch for six categories and four numbers."""
    inputs, models = (importlib.import_module(f"deepctr_torch.{name}") for name in ("inputs", "models"))
    columns = [inputs.SparseFeat(f"c{n}", 20, embedding_dim=8) for n in range(6)]
    columns += [inputs.DenseFeat(f"n{n}", 1) for n in range(4)]
    return getattr(models, kind)(columns, columns, dnn_hidden_units=(64, 32), device="cpu")  # type: ignore[no-any-return]


class NeuralODE(nn.Module):
    """Where torchdiffeq's solver of a network's differential equation ends."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        solve = importlib.import_module("torchdiffeq").odeint
        times = torch.linspace(0, 1, 5, dtype=x.dtype)
        return self.out(solve(lambda time, state: self.speed(state), x, times, method="rk4")[-1])  # type: ignore[no-any-return]


def actor_critic() -> nn.Module:
    """PPO's policy of stable-baselines3."""
    spaces = importlib.import_module("gymnasium").spaces
    policies = importlib.import_module("stable_baselines3.common.policies")
    seen, acted = spaces.Box(-9, 9, (6,)), spaces.Box(-1, 1, (2,))
    return policies.ActorCriticPolicy(seen, acted, lambda left: 3e-4, net_arch=[32, 32])  # type: ignore[no-any-return]


class Spiking(nn.Module):
    """Leaky neurons of snntorch over ten steps."""

    def __init__(self) -> None:
        super().__init__()
        snn = importlib.import_module("snntorch")
        self.into, self.first = nn.Linear(8, 64), snn.Leaky(beta=0.9)
        self.out, self.last = nn.Linear(64, 5), snn.Leaky(beta=0.9)

    def forward(self, x: Tensor) -> Tensor:
        first, last, seen = self.first.init_leaky(), self.last.init_leaky(), []
        for _ in range(10):
            spikes, first = self.first(self.into(x), first)
            _, last = self.last(self.out(spikes), last)
            seen.append(last)
        return torch.stack(seen).mean(0)


class Liquid(nn.Module):
    """The last state of a closed-form continuous-time network of ncps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = importlib.import_module("ncps.torch").CfC(6, 32, return_sequences=False, backbone_units=32)
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0])  # type: ignore[no-any-return]


class SoftMixture(nn.Module):
    """Experts of soft-moe-pytorch between two layers."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 5)
        self.body = importlib.import_module("soft_moe_pytorch").SoftMoE(
            32, seq_len=12, num_experts=4, expert_mult=2, **more
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.out((x + self.body(x)).mean(1))  # type: ignore[no-any-return]


def byol() -> nn.Module:
    """BYOL around a small network, without random augmentations."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    package: Any = importlib.import_module("byol_pytorch.byol_pytorch")
    # torch's SyncBatchNorm, which the package takes where there are ranks, has no CPU form, and the option for that
    # does not reach the predictor
    package.MaybeSyncBatchnorm = lambda unused=None: nn.BatchNorm1d
    made = package.BYOL(
        net,
        32,
        projection_size=32,
        projection_hidden_size=64,
        augment_fn=nn.Identity(),
        use_simplicial_embeddings=False,
    )
    return made  # type: ignore[no-any-return]


def bayesian() -> nn.Module:
    """Layers of torchbnn, whose weights are drawn in each forward."""
    layers = importlib.import_module("torchbnn")
    more = {"prior_mu": 0, "prior_sigma": 0.1}
    return nn.Sequential(
        layers.BayesLinear(in_features=8, out_features=32, **more),
        nn.ReLU(),
        layers.BayesLinear(in_features=32, out_features=5, **more),
    )
