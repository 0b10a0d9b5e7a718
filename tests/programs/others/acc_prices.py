"""Fine-tune a price model on tabular data."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=0.02)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def table(rows, seed):
    g = torch.Generator().manual_seed(seed)
    columns = torch.randn(rows, 12, generator=g)
    price = columns[:, :3].sum(1) + columns[:, 3].sin() * 2
    return TensorDataset(columns, price)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        return x + self.layers(x)


def main():
    args = parse_args()
    accelerator = Accelerator()
    set_seed(args.seed)

    train_dataset, eval_dataset = table(384, seed=1), table(77, seed=2)
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=args.per_device_train_batch_size)
    eval_dataloader = DataLoader(eval_dataset, batch_size=args.per_device_eval_batch_size)

    model = nn.Sequential(nn.Linear(12, 32), Residual(32), Residual(32), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    for epoch in range(args.num_train_epochs):
        model.train()
        for columns, price in train_dataloader:
            loss = F.mse_loss(model(columns), price)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        errors = []
        for columns, price in eval_dataloader:
            with torch.no_grad():
                predictions = model(columns)
            predictions, price = accelerator.gather_for_metrics((predictions, price))
            errors.append((predictions - price).square())
        accelerator.print(f"epoch {epoch}: eval mse {torch.cat(errors).mean().item():.4f}")


if __name__ == "__main__":
    main()
