"""Classify map tiles in bf16."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def tiles(n, seed):
    g = torch.Generator().manual_seed(seed)
    land = torch.randint(4, (n,), generator=g)
    colours = torch.tensor([[0.2, 0.5, 0.2], [0.1, 0.2, 0.7], [0.6, 0.6, 0.6], [0.7, 0.6, 0.3]])
    return TensorDataset(colours[land][:, :, None, None] + 0.5 * torch.randn(n, 3, 10, 10, generator=g), land)


class TileNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(2 * width, 4)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint_dir", default=str(Path(tempfile.gettempdir()) / "tiles"))
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(2024)
    train_loader = DataLoader(tiles(256, 0), batch_size=32 // accelerator.num_processes, shuffle=True)
    eval_loader = DataLoader(tiles(83, 1), batch_size=16)

    model = TileNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for images, land in train_loader:
            loss = nn.functional.cross_entropy(model(images), land)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = 0
        for images, land in eval_loader:
            with torch.no_grad():
                guess, land = accelerator.gather_for_metrics((model(images).argmax(1), land))
            correct += (guess == land).sum().item()
        accelerator.print(f"epoch {epoch}: accuracy {correct / len(eval_loader.dataset):.4f}")

    accelerator.save_state(args.checkpoint_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
