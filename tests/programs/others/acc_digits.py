"""Classify digit images."""

import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class DigitImages(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(0)
        shapes = torch.randn(10, 1, 10, 10, generator=g)
        g.manual_seed(seed)
        self.labels = torch.randint(10, (n,), generator=g)
        self.pixels = shapes[self.labels] + torch.randn(n, 1, 10, 10, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "label": self.labels[index]}


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3)
        self.conv2 = nn.Conv2d(12, 24, 3)
        self.norm = nn.LayerNorm(24)
        self.fc = nn.Linear(24, 10)

    def forward(self, pixel_values):
        x = torch.relu(self.conv1(pixel_values))
        x = torch.relu(self.conv2(x))
        return self.fc(self.norm(x.flatten(2).amax(2)))


def get_dataloaders(accelerator, batch_size):
    train = DataLoader(DigitImages(256, 1), shuffle=True, batch_size=batch_size // accelerator.num_processes)
    test = DataLoader(DigitImages(90, 2), shuffle=False, batch_size=30)
    return train, test


def training_function(args):
    accelerator = Accelerator()
    set_seed(args.seed)
    train_dataloader, test_dataloader = get_dataloaders(accelerator, args.batch_size)
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, test_dataloader = accelerator.prepare(model, optimizer, test_dataloader)

    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_dataloader:
            images = batch["pixel_values"].to(accelerator.device)
            labels = batch["label"].to(accelerator.device)
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        correct, seen = 0, 0
        for batch in test_dataloader:
            with torch.no_grad():
                guesses = model(batch["pixel_values"]).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["label"]))
            correct += (guesses == labels).sum().item()
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: {100 * correct / seen:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())
