"""Jobs with everything that a restart must bring back: buffers, an optimizer's state, a schedule, random draws, the
order of the data, an evaluation inside the epoch. `blocks` is one for plans that divide layers or stages."""

from dataclasses import replace

import torch
from torch import nn

import meshwise as mw


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def model_of_blocks():
    return nn.Sequential(nn.Linear(6, 16), *(Block(16) for _ in range(4)), nn.Linear(16, 1))


x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
job = mw.Job(
    name="stateful",
    model=model,
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    data=lambda: (x, x.sum(1, keepdim=True)),
    test=lambda: (x[:32], x[:32].sum(1, keepdim=True)),
    validate_every="5 steps",
    batch_size=16,
    epochs=2,
)
blocks = replace(job, name="blocks", model=model_of_blocks)
