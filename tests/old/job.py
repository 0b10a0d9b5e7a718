"""The job of the old runs: everything that has state (Adam, a scheduler, dropout, clipping, a ragged last batch)."""

import os
import signal
import time

import torch
from torch import nn

import meshwise as mw

STOP_AT = int(os.environ.get("STOP_AT", "0"))
"""The call of the loss in which rank 0 sends Ctrl-C to the launcher; 0: never."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.drop(torch.relu(self.inner(x))))


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled():
        calls.append(1)
    if len(calls) == STOP_AT and mw.rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)  # the other rank waits for this one: all stop after this step
    return nn.functional.mse_loss(model(batch[0]), batch[1])


calls: list[int] = []
job = mw.Job(
    name="old",
    model=lambda: nn.Sequential(Block(), Block(), nn.Linear(6, 1)),
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.02),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    data=lambda: samples(43, 1),
    test=lambda: samples(13, 2),
    metrics=lambda model, batch: {"error": nn.functional.l1_loss(model(batch[0]), batch[1])},
    clip_norm=0.5,
    batch_size=8,
    epochs=3,
)
