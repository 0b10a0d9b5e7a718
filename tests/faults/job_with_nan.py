"""A job of which two samples have no number as their label, and the loop by hand that leaves their batches out."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import meshwise as mw
from meshwise.training.data.order import epoch_order

SAMPLES, BATCH, EPOCHS, BAD = 160, 16, 2, (5, 77)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Block(nn.Module):
    """One of several that are alike, as a pipeline divides them; what it has seen is no part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum()
        return x + torch.tanh(self.linear(x))


def deep_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 1))


x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
y[[*BAD]] = float("nan")
job = mw.Job(
    name="nan",
    model=model,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    data=lambda: (x, y),
    batch_size=BATCH,
    epochs=EPOCHS,
)

deep = replace(job, model=deep_model)


def by_hand(
    leave_out: Callable[[int, int], bool] = lambda epoch, batch: False, job: mw.Job = job
) -> tuple[list[float], nn.Module]:
    """The losses and the model after a loop in float64 that leaves out batches with a NaN, and those of `leave_out`."""
    torch.manual_seed(job.seed)
    net = job.model().double()
    optimizer = job.optimizer(net.parameters())
    scheduler, losses = job.scheduler(optimizer), []
    for epoch in range(EPOCHS):
        for number, indices in enumerate(epoch_order(job.seed, epoch, SAMPLES).split(BATCH)):
            if y[indices].isnan().any() or leave_out(epoch, number):
                continue
            value = loss(net, (x[indices].double(), y[indices].double()))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(value.item())
    return losses, net
