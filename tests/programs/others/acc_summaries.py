"""Train a sequence model to keep every second token."""

import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH = 20, 12


def documents(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (n, LENGTH), generator=g)
    return TensorDataset(tokens, tokens[:, ::2])


class Summarizer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.token = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(LENGTH, dim) * 0.1)
        self.queries = nn.Parameter(torch.randn(LENGTH // 2, dim) * 0.1)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, VOCAB))

    def forward(self, tokens):
        memory = self.token(tokens) + self.position
        queries = self.queries.expand(len(tokens), -1, -1)
        return self.out(self.attention(queries, memory, memory, need_weights=False)[0])


def evaluate(accelerator, model, loader):
    model.eval()
    hits = []
    for tokens, summary in loader:
        with torch.inference_mode():
            guess = model(tokens).argmax(-1)
        guess, summary = accelerator.gather_for_metrics((guess, summary))
        hits.append((guess == summary).float())
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16, help="of one forward, over all processes")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(13)
    train_loader = DataLoader(documents(384, 0), args.batch_size // accelerator.num_processes, shuffle=True)
    eval_loader = DataLoader(documents(60, 1), 20)
    model = Summarizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        running, count = 0.0, 0
        for tokens, summary in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), summary.flatten())
                running += accelerator.reduce(loss.detach(), reduction="mean").item()
                count += 1
                loss = loss / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: train loss {running / count:.4f} token accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
