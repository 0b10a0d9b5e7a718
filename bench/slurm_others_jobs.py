"""What bench/slurm_others.py has other tools train: as bench/slurm_jobs.py does, by Lightning, and by torchrun with a
snapshot (as in PyTorch's tutorial on fault tolerance: model, optimizer and epoch, once an epoch).

    srun python slurm_others_jobs.py lightning FOLDER USR1
    srun torchrun … slurm_others_jobs.py snapshot FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from slurm_jobs import EPOCHS, loss, made, x, y
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 8


def _tell(folder: Path, mean: float) -> None:
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"loss": mean}) + "\n")


def snapshot(folder: Path) -> None:
    """The tutorial's loop."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(made())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, BATCH // size, sampler=sampler)
    first, path = 0, folder / "snapshot.pt"
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            mean = loss(model, batch)
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                _tell(folder, mean.item())
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    if rank == 0:
        torch.save(model.module.state_dict(), folder / "last.pt")
    dist.destroy_process_group()


def lightning(folder: Path, signal_name: str) -> None:
    """A Trainer that requeues its own job on a signal."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = made()

        def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
            mean = loss(self.model, batch)
            if self.global_rank == 0:
                _tell(folder, float(mean.detach()))
            return mean

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    torch.manual_seed(0)
    there = "SLURM_JOB_ID" in os.environ
    requeue = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.Signals["SIG" + signal_name])
    size = int(os.environ.get("SLURM_NTASKS", "4"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size // int(os.environ.get("SLURM_NNODES", "1")),
        num_nodes=int(os.environ.get("SLURM_NNODES", "1")),
        strategy="ddp",
        max_epochs=EPOCHS,
        plugins=[requeue if there else LightningEnvironment()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(x, y), BATCH // size, shuffle=True))
    if trainer.global_rank == 0:
        torch.save(module.model.state_dict(), folder / "last.pt")


if __name__ == "__main__":
    {"lightning": lightning, "snapshot": snapshot}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
