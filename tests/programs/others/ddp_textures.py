"""A residual network for textures."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(5, (n,), generator=g)
    xs = torch.arange(12.0)
    waves = torch.stack([torch.sin((k + 1) * 0.6 * xs)[:, None] * torch.cos(k * 0.5 * xs) for k in range(5)])
    images = waves[kind].unsqueeze(1).repeat(1, 3, 1, 1) + torch.randn(n, 3, 12, 12, generator=g)
    return TensorDataset(images * (1 + torch.rand(n, 1, 1, 1, generator=g)), kind)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + x)


class TinyResNet(nn.Module):
    def __init__(self, width=16, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width), nn.MaxPool2d(2), Block(width))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("-b", "--batch-size", type=int, default=8, help="total batch size of all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(11)

    train_set, val_set = textures(160, seed=0), textures(60, seed=1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    model = DDP(TinyResNet().to(device), device_ids=[gpu] if torch.cuda.is_available() else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            loss = F.cross_entropy(model(images.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                images, target = val_set.tensors
                top1 = (model.module(images.to(device)).argmax(1).cpu() == target).float().mean() * 100
            print(f"Epoch: [{epoch}] * Acc@1 {top1.item():.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
