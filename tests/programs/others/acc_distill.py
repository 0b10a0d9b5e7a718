"""Distil a wide random network into a narrow one, through its features."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.classifier = nn.Linear(width, 5)

    def forward(self, x):
        features = self.features(x)
        return self.classifier(features), features


def make_data(n, seed):
    g = torch.Generator().manual_seed(77)
    planes = torch.randn(16, 5, generator=g)
    x = torch.randn(n, 16, generator=g.manual_seed(seed))
    return TensorDataset(x, (x @ planes).argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=2.0)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    teacher = Net(64).to(accelerator.device).eval().requires_grad_(False)
    train_loader = DataLoader(make_data(320, 1), batch_size=32 // accelerator.num_processes, shuffle=True)
    eval_loader = DataLoader(make_data(75, 2), batch_size=25)

    student = Net(16)
    adapter = nn.Linear(16, 64).to(accelerator.device)
    optimizer = torch.optim.AdamW(list(student.parameters()) + list(adapter.parameters()), lr=3e-3)
    student, optimizer, train_loader, eval_loader = accelerator.prepare(student, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        student.train()
        for x, y in train_loader:
            with torch.no_grad():
                target, target_features = teacher(x)
            logits, features = student(x)
            soft = F.kl_div(
                F.log_softmax(logits / args.temperature, 1),
                F.softmax(target / args.temperature, 1),
                reduction="batchmean",
            )
            loss = F.cross_entropy(logits, y) + soft + F.mse_loss(adapter(features), target_features)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        student.eval()
        hits = []
        for x, y in eval_loader:
            with torch.no_grad():
                guess, y = accelerator.gather_for_metrics((student(x)[0].argmax(1), y))
            hits.append(guess == y)
        accelerator.print(f"epoch {epoch}: student accuracy {torch.cat(hits).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
