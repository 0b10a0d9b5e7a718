"""What the runs of bench/slurm.py train: a job, and the same as a loop of one's own, which writes its steps down."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import meshwise as mw

EPOCHS, PAUSE = 6, float(os.environ.get("BENCH_PAUSE", "0.05"))
x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = x.sum(1, keepdim=True)


def made() -> nn.Module:
    """A model with what is easily lost, a batch norm's buffers.

    No bias before it: its gradient is nothing but rounding, which Adam would scale up."""
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """With a pause: a step that takes as long as real ones."""
    time.sleep(PAUSE)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


job = mw.Job(
    name="slurm-bench",
    model=made,
    data=lambda: (x, y),
    batch_size=8,
    epochs=EPOCHS,
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9),
)


def own_loop(folder: str) -> None:
    """The same by hand: state and last parameters in `folder`."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    saved = mw.checkpoint(f"{folder}/state", **parts)
    for _ in range(saved.epoch, EPOCHS):
        for batch in loader:
            mean = mw.backward(loss(model, batch))
            read = mw.sum(batch[0].sum())
            if mw.rank() == 0:
                with Path(f"{folder}/steps.jsonl").open("a") as file:
                    line = {"loss": float(mean), "batch": float(read), "rate": scheduler.get_last_lr()[0]}
                    file.write(json.dumps(line) + "\n")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    if mw.rank() == 0:
        torch.save(model.state_dict(), f"{folder}/last.pt")


if __name__ == "__main__":
    import sys

    own_loop(sys.argv[1])
