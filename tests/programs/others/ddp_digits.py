"""Classify small digit images with a convolutional network."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, train=True):
        g = torch.Generator().manual_seed(0)
        shapes = torch.randn(10, 1, 8, 8, generator=g)
        n = 320 if train else 80
        g.manual_seed(int(train) + 1)
        self.targets = torch.randint(10, (n,), generator=g)
        self.images = shapes[self.targets] + 0.8 * torch.randn(n, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class Trainer:
    def __init__(self, model, train_loader, test_loader, optimizer, scheduler, device):
        self.device = device
        self.model = DDP(model.to(device))
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_fn = nn.CrossEntropyLoss()

    def run_batch(self, images, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(images), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        self.model.train()
        for images, targets in self.train_loader:
            self.run_batch(images.to(self.device), targets.to(self.device))
        self.scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} lr {self.scheduler.get_last_lr()[0]:.4f} accuracy {self.evaluate():.3f}")
        dist.barrier()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = 0
        for images, targets in self.test_loader:
            scores = self.model.module(images.to(self.device))
            correct += (scores.argmax(1).cpu() == targets).sum().item()
        return correct / len(self.test_loader.dataset)

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)
        if dist.get_rank() == 0:
            torch.save(self.model.module.state_dict(), Path(tempfile.gettempdir()) / "digits.pt")


def main(epochs=3, batch_size=32):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_set = Digits()
    train_loader = DataLoader(train_set, batch_size=batch_size // world_size, sampler=DistributedSampler(train_set))
    Trainer(model, train_loader, DataLoader(Digits(train=False), 40), optimizer, scheduler, device).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
