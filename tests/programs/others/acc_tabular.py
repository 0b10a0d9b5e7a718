"""Predict churn from a table of customers."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def customers(n, seed):
    g = torch.Generator().manual_seed(seed)
    numbers, plan = torch.randn(n, 7, generator=g), torch.randint(5, (n,), generator=g)
    churn = (numbers[:, 0] + 0.7 * (plan == 2) - 0.7 * (plan == 4) + 0.3 * numbers[:, 1] > 0).float()
    return TensorDataset(numbers, plan, churn)


class ChurnModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.plan = nn.Embedding(5, 6)
        self.layers = nn.Sequential(nn.Linear(13, dim), nn.LayerNorm(dim), nn.SiLU(), nn.Linear(dim, 1), nn.Flatten(0))

    def forward(self, numbers, plan):
        return self.layers(torch.cat([numbers, self.plan(plan)], dim=1))


def f1_score(guess, truth):
    both = (guess & truth).sum()
    return (2 * both / (guess.sum() + truth.sum()).clamp(min=1)).item()


def main(args):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(args.seed)
    train_loader = DataLoader(customers(384, 0), batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(customers(130, 1), batch_size=64)

    model = ChurnModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2 * len(train_loader)], gamma=0.1)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.5, device=accelerator.device))

    for epoch in range(args.epochs):
        model.train()
        for numbers, plan, churn in train_loader:
            loss = criterion(model(numbers, plan), churn)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

        model.eval()
        guesses, truths = [], []
        for numbers, plan, churn in eval_loader:
            with torch.no_grad():
                scores = model(numbers, plan)
            scores, churn = accelerator.gather_for_metrics((scores, churn))
            guesses.append(scores > 0)
            truths.append(churn > 0.5)
        score = f1_score(torch.cat(guesses), torch.cat(truths))
        accelerator.print(f"epoch {epoch}: f1 {score:.4f} on {len(torch.cat(truths))} customers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=8)
    main(parser.parse_args())
