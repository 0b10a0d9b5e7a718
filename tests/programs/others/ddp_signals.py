"""Detect events in sensor signals, in mixed precision."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    event = torch.randint(2, (n,), generator=g)
    x = torch.randn(n, 2, 64, generator=g)
    start = torch.randint(48, (n,), generator=g)
    inside = (torch.arange(64) >= start[:, None]) & (torch.arange(64) < start[:, None] + 16)
    x[:, 0] += 1.5 * inside * event[:, None]
    return TensorDataset(x, event.float())


class Detector(nn.Module):
    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(2, width, 9, padding=4),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv1d(width, width, 9, padding=4),
            nn.GELU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, 1)

    def forward(self, x):
        return self.fc(self.dropout(self.conv(x).amax(2))).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, local_rank if kind == "cuda" else 0)
    torch.manual_seed(6)

    train_set, test_set = signals(320, seed=0), signals(96, seed=1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))

    model = DDP(Detector().to(device))
    torch.manual_seed(6 + dist.get_rank())
    optimizer = torch.optim.NAdam(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, event in train_loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = criterion(model(x.to(device)), event.to(device))
            loss.backward()
            optimizer.step()

        model.eval()
        hits = torch.zeros((), device=device)
        for x, event in test_loader:
            with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16):
                hits += ((model(x.to(device)) > 0) == (event.to(device) > 0.5)).sum()
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: detected {hits.item() / len(test_set):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
