"""Sort point clouds by shape."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class PointClouds(Dataset):
    def __init__(self, n, seed, points=24):
        g = torch.Generator().manual_seed(seed)
        self.shape = torch.arange(n) % 3
        cloud = torch.randn(n, points, 3, generator=g)
        cloud[self.shape == 0] /= cloud[self.shape == 0].norm(dim=2, keepdim=True)
        cloud[self.shape == 1, :, 2] *= 0.1
        self.cloud = cloud + 0.1 * torch.randn(n, points, 3, generator=g)

    def __len__(self):
        return len(self.shape)

    def __getitem__(self, i):
        return self.cloud[i], self.shape[i]


class PointNet(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3))

    def forward(self, cloud):
        return self.head(self.local(cloud).amax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=24, help="over all processes")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(10)
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    train_set, test_set = PointClouds(288, seed=0), PointClouds(66, seed=1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=10)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=11)

    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for cloud, shape in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(cloud), shape))
            optimizer.step()

        model.eval()
        right = 0
        for cloud, shape in test_loader:
            with torch.no_grad():
                guess, shape = accelerator.gather_for_metrics((model(cloud).argmax(1), shape))
            right += (guess == shape).sum().item()
        accelerator.print(f"epoch {epoch}: {right}/{len(test_set)}")


if __name__ == "__main__":
    main()
