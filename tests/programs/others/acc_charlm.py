"""A character model on a short text, with accumulated gradients."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "it was the best of times, it was the worst of times, it was the age of wisdom and of foolishness; " * 27


class Blocks(Dataset):
    def __init__(self, text, size=16):
        self.vocab = sorted(set(TEXT))
        self.ids = torch.tensor([self.vocab.index(c) for c in text])
        self.size = size

    def __len__(self):
        return (len(self.ids) - 1) // self.size

    def __getitem__(self, i):
        block = self.ids[i * self.size : (i + 1) * self.size + 1]
        return {"input_ids": block[:-1], "labels": block[1:]}


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.head(self.gru(self.embed(input_ids))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--train_batch_size", type=int, default=4, help="of one forward, over all processes")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=0.05)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(0)
    cut = 128 * 16 + 1
    train_set, eval_set = Blocks(TEXT[:cut]), Blocks(TEXT[cut:])
    train_dl = DataLoader(train_set, batch_size=args.train_batch_size // accelerator.num_processes, shuffle=True)
    eval_dl = DataLoader(eval_set, batch_size=8)
    model = CharGRU(len(train_set.vocab))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"])
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_dl:
            with torch.no_grad():
                logits = model(batch["input_ids"])
            token_losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
            losses.append(accelerator.gather_for_metrics(token_losses))
        perplexity = torch.cat(losses).mean().exp().item()
        accelerator.print(f"epoch {epoch}: perplexity {perplexity:.3f}")


if __name__ == "__main__":
    main()
