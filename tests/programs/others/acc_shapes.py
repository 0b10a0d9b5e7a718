"""Recognize shapes in small pictures."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.kind = torch.randint(3, (n,), generator=g)
        self.pictures = 0.6 * torch.randn(n, 1, 12, 12, generator=g)
        for i, kind in enumerate(self.kind.tolist()):
            r, c = torch.randint(7, (2,), generator=g).tolist()
            if kind == 0:
                self.pictures[i, 0, r : r + 5, c : c + 5] += 1.5
            elif kind == 1:
                self.pictures[i, 0, r : r + 5, c + 2] += 3
            else:
                self.pictures[i, 0, r + 2, c : c + 5] += 3

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return {"image": self.pictures[i], "label": self.kind[i]}


def conv_block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


def build_model():
    return nn.Sequential(conv_block(1, 12), conv_block(12, 24), nn.Flatten(), nn.Linear(24 * 9, 3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--batch-size", type=int, default=12, help="over all processes")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(30)
    train_loader = DataLoader(
        Shapes(192, seed=0), batch_size=args.batch_size // accelerator.num_processes, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(Shapes(70, seed=1), batch_size=14)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        accelerator.wait_for_everyone()
        model.eval()
        network = accelerator.unwrap_model(model)
        correct = total = 0
        for batch in test_loader:
            with torch.no_grad():
                guess = network(batch["image"]).argmax(1)
            guess, label = accelerator.gather_for_metrics((guess, batch["label"]))
            correct += (guess == label).sum().item()
            total += label.numel()
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.3f}")


if __name__ == "__main__":
    main()
