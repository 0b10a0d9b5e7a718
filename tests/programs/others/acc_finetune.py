"""Fine-tune a sequence classifier with a linear schedule."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, lr_lambda)


def sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (n, 12), generator=g)
    return TensorDataset(tokens, (tokens.sum(1) // 80) % 4)


class GRUClassifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(40, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 4)

    def forward(self, tokens):
        return self.out(self.norm(self.gru(self.embedding(tokens))[0].mean(1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--total_batch_size", type=int, default=32)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    batch_size = args.total_batch_size // accelerator.num_processes
    train_loader = DataLoader(sequences(320, 0), shuffle=True, batch_size=batch_size)
    eval_loader = DataLoader(sequences(70, 1), batch_size=20)
    model = GRUClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=len(train_loader) * args.num_epochs,
    )
    scheduler = accelerator.prepare(scheduler)

    for epoch in range(args.num_epochs):
        model.train()
        for tokens, label in train_loader:
            loss = nn.functional.cross_entropy(model(tokens), label)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        hits = []
        for tokens, label in eval_loader:
            with torch.no_grad():
                guess = model(tokens).argmax(-1)
            guess, label = accelerator.gather_for_metrics((guess, label))
            hits.append((guess == label).float())
        lr = scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).mean().item():.3f} lr {lr:.1e}")


if __name__ == "__main__":
    main()
