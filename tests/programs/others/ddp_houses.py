"""Regress house prices with a multilayer perceptron."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_houses(n, seed):
    gen = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 8, generator=gen)
    price = features[:, :1] * 2 - features[:, 1:2] * features[:, 2:3] + 0.1 * torch.randn(n, 1, generator=gen)
    return TensorDataset(features, price)


def get_args():
    parser = argparse.ArgumentParser(description="House prices")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="number of houses in each optimizer step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    return parser.parse_args()


def validate(model, loader, device):
    model.eval()
    total = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            total[0] += F.mse_loss(model(x.to(device)), y.to(device), reduction="sum")
            total[1] += len(x)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    args = get_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)

    train_set = make_houses(512, seed=0)
    val_set = make_houses(128, seed=1)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, num_workers=0)
    val_loader = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))

    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    net = DistributedDataParallel(net, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
        error = validate(net, val_loader, device)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch + 1}/{args.epochs} val mse {error:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
