"""Predict rain from yesterday's weather."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def load_weather(days, seed):
    g = torch.Generator().manual_seed(seed)
    yesterday = torch.randn(days, 10, generator=g)
    rain = (yesterday[:, 0] + yesterday[:, 1] * yesterday[:, 2] > 0).float().unsqueeze(1)
    return TensorDataset(yesterday, rain)


def build_model():
    return nn.Sequential(
        nn.Linear(10, 48),
        nn.LayerNorm(48),
        nn.SiLU(),
        nn.Linear(48, 48),
        nn.SiLU(),
        nn.Linear(48, 1),
    )


def shard(dataset, rank, world_size):
    order = torch.randperm(len(dataset)).tolist()
    return Subset(dataset, order[rank::world_size])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="global batch size")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(args.seed + rank)

    train_set, val_set = load_weather(384, seed=0), load_weather(100, seed=1)
    model = DDP(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        loader = DataLoader(shard(train_set, rank, world_size), batch_size=args.batch_size // world_size)
        model.train()
        for yesterday, rain in loader:
            loss = criterion(model(yesterday.to(device)), rain.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        yesterday, rain = val_set[rank::world_size]
        with torch.no_grad():
            hits = ((model.module(yesterday.to(device)) > 0) == (rain.to(device) > 0.5)).sum()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {hits.item()} of {len(val_set)} days right")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
