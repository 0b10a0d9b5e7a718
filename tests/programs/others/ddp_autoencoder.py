"""An autoencoder of small images, with its reconstruction error."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Stripes(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        phase = torch.rand(size, 1, 1, 1, generator=g) * 6.28
        grid = torch.arange(8.0).view(1, 1, 1, 8).expand(size, 1, 8, 8)
        self.images = torch.sin(grid + phase) * 0.5 + 0.5 + 0.05 * torch.randn(size, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class AutoEncoder(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.LeakyReLU(), nn.Linear(32, 64))

    def encode(self, images):
        return self.encoder(images)

    def decode(self, codes):
        return self.decoder(codes).view(-1, 1, 8, 8)

    def forward(self, images):
        return self.decode(self.encode(images))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=1e-3)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(5)

    train_set, test_set = Stripes(256, seed=0), Stripes(64, seed=1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // dist.get_world_size(), sampler=sampler)
    model = DDP(AutoEncoder().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images in loader:
            images = images.to(device)
            codes = model.module.encode(images)
            loss = nn.functional.mse_loss(model.module.decode(codes), images) + args.sparsity * codes.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                images = test_set.images.to(device)
                error = nn.functional.mse_loss(model.module(images), images)
            print(f"epoch {epoch}: reconstruction {error.item():.5f}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), Path(tempfile.gettempdir()) / "autoencoder.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
