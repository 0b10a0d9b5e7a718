"""Forecast the next value of a wave with a GRU."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, n, seed, length=20):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length + 1.0)
        freq, phase = torch.rand(n, 1, generator=g) * 0.5 + 0.1, torch.rand(n, 1, generator=g) * 6
        self.series = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, length + 1, generator=g)

    def __len__(self):
        return len(self.series)

    def __getitem__(self, idx):
        return self.series[idx, :-1, None], self.series[idx, -1:]


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.gru(x)
        return self.out(h[-1])


def train(args):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    train_data, val_data = Waves(320, seed=10), Waves(96, seed=11)
    train_sampler = DistributedSampler(train_data, shuffle=True)
    val_sampler = DistributedSampler(val_data, shuffle=False)
    train_loader = DataLoader(train_data, batch_size=args.batch_size // world_size, sampler=train_sampler)
    val_loader = DataLoader(val_data, batch_size=24, sampler=val_sampler)

    model = DDP(Forecaster().to(device))
    criterion = nn.SmoothL1Loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = float("inf")
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

        model.eval()
        error, n = 0.0, 0
        with torch.no_grad():
            for x, y in val_loader:
                error += (model(x.to(device)) - y.to(device)).abs().sum().item()
                n += len(x)
        if rank == 0:
            print(f"epoch {epoch}: val mae {error / n:.4f}")
            if error / n < best:
                best = error / n
                torch.save(model.module.state_dict(), Path(tempfile.gettempdir()) / "waves_best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="summed over all GPUs")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
