"""Estimate the energy demand of buildings."""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def buildings(n=448):
    g = torch.Generator().manual_seed(12)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    demand = 3 * x[:, 0].abs() + x[:, 1] * x[:, 2] + x[:, 3] ** 2 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, demand.unsqueeze(1))


class DemandModel(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output_dir", default=tempfile.gettempdir())
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(3)
    train_set, val_set = random_split(buildings(), [320, 128], generator=torch.Generator().manual_seed(9))
    train_loader = DataLoader(train_set, batch_size=args.batch_size // accelerator.num_processes, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=32)

    model = DemandModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    criterion = nn.HuberLoss()

    for epoch in range(args.epochs):
        model.train()
        for x, demand in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), demand)
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        absolute, count = 0.0, 0
        with torch.no_grad():
            for x, demand in val_loader:
                absolute += (model(x) - demand).abs().sum().item()
                count += demand.numel()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: validation mae {absolute / count:.4f}")

    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    accelerator.save(state, Path(args.output_dir) / "energy.pt")


if __name__ == "__main__":
    main()
