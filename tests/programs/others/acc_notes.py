"""Train a language model on notes of different lengths."""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

VOCAB, IGNORE = 40, -100


class Notes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 18, (n,), generator=g).tolist()
        self.notes = [torch.randint(3, (k,), generator=g).cumsum(0) % VOCAB for k in lengths]

    def __len__(self):
        return len(self.notes)

    def __getitem__(self, i):
        return self.notes[i]


def collate(notes):
    return {
        "input_ids": pad_sequence([n[:-1] for n in notes], batch_first=True),
        "labels": pad_sequence([n[1:] for n in notes], batch_first=True, padding_value=IGNORE),
    }


class NoteLM(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        return self.head(self.lstm(self.embed(input_ids))[0])


def loss_sum(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(99)
    world = accelerator.num_processes
    train_loader = DataLoader(Notes(256, 0), batch_size=args.batch_size // world, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(Notes(64, 1), batch_size=32 // world, collate_fn=collate)
    model = NoteLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            tokens = accelerator.reduce((batch["labels"] != IGNORE).sum(), reduction="sum")
            loss = loss_sum(model(batch["input_ids"]), batch["labels"]) * world / tokens
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        totals = torch.zeros(2, device=accelerator.device)
        for batch in eval_loader:
            with torch.no_grad():
                total = loss_sum(model(batch["input_ids"]), batch["labels"])
            totals += torch.stack([total, (batch["labels"] != IGNORE).sum()])
        total, tokens = accelerator.reduce(totals, reduction="sum").tolist()
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(total / tokens):.3f} over {int(tokens)} tokens")


if __name__ == "__main__":
    main()
