"""Segment discs in noisy images."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Discs(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        yx = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
        centre = torch.rand(size, 2, 1, 1, generator=g) * 10 + 3
        radius = torch.rand(size, 1, 1, generator=g) * 2 + 2
        self.masks = (((yx - centre) ** 2).sum(1) < radius**2).float().unsqueeze(1)
        self.images = self.masks + 0.5 * torch.randn(size, 1, 16, 16, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "mask": self.masks[index]}


def unet(width=12):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2),
        nn.GELU(),
        nn.ConvTranspose2d(width, width, 2, stride=2),
        nn.GELU(),
        nn.Conv2d(width, 1, 1),
    )


def iou(model, loader, device):
    overlap = torch.zeros(2, device=device)
    model.eval()
    with torch.inference_mode():
        for batch in loader:
            pred = model(batch["image"].to(device)) > 0
            mask = batch["mask"].to(device) > 0.5
            overlap += torch.stack([(pred & mask).sum(), (pred | mask).sum()])
    dist.all_reduce(overlap)
    return (overlap[0] / overlap[1].clamp(min=1)).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.0)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    train_set, val_set = Discs(192, seed=0), Discs(49, seed=1)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=24 // world_size, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, list(range(rank, len(val_set), world_size))), batch_size=25)
    model = DDP(unet().to(device))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        model.train()
        for batch in train_loader:
            image, mask = batch["image"].to(device), batch["mask"].to(device)
            optimizer.zero_grad()
            loss = criterion(model(image), mask) / world_size
            loss.backward()
            optimizer.step()
        score = iou(model.module, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs} val IoU {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
