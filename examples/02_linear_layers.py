"""Tutorial 2 as a job: three linear layers, cross entropy, SGD at 0.001, 10 epochs. Nothing in it knows about devices.

meshwise run examples/02_linear_layers.py:job --devices 2xcpu
"""

import torch
from torch import nn

import meshwise as mw


def samples(seed: int, count: int = 4_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten clouds of points, each with its label."""
    centres = 0.2 * torch.randn(10, 1000, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    return centres[labels] + torch.randn(count, 1000, generator=draw), labels


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(1) == labels).float().mean()}


job = mw.Job(
    name="linear-layers",
    model=network,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
    data=lambda: samples(1),
    test=lambda: samples(2, 1_000),
    metrics=accuracy,
    batch_size=32,
    epochs=10,
)
