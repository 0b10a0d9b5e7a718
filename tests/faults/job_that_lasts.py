"""A job without an end of its own, whose steps take as long as SOAK_PAUSE says, in seconds: for bench/soak.py."""

import os
import time

import torch
from torch import nn

import meshwise as mw

PAUSE = float(os.environ.get("SOAK_PAUSE", "0"))


def loss(model, batch):
    time.sleep(PAUSE)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def model():
    # a bias before a batch norm has no gradient but rounding, which Adam scales up
    return nn.Sequential(nn.Linear(6, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))


x = torch.randn(480, 6, generator=torch.Generator().manual_seed(0))
job = mw.Job(
    name="lasts",
    model=model,
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    data=lambda: (x, x.sum(1, keepdim=True)),
    batch_size=24,
    epochs=100_000,
)
