"""Classify documents by topic, with warm-up, accumulation and clipping."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Documents(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.topic = torch.randint(4, (n,), generator=g)
        self.words = torch.randint(100, (n, 14), generator=g)
        own = torch.rand(n, 14, generator=g) < 0.35
        self.words = torch.where(own, self.words % 25 + 25 * self.topic[:, None], self.words)

    def __len__(self):
        return len(self.topic)

    def __getitem__(self, i):
        return {"words": self.words[i], "topic": self.topic[i]}


class TopicTransformer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(100, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 4)

    def forward(self, words):
        return self.out(self.encoder(self.embed(words)).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16, help="of one forward, over all processes")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--warmup_steps", type=int, default=3)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(5)
    train_loader = DataLoader(Documents(256, 0), args.batch_size // accelerator.num_processes, shuffle=True)
    eval_loader = DataLoader(Documents(99, 1), 16)
    model = TopicTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ticks = args.epochs * len(train_loader) // args.accumulate
    warmup = args.warmup_steps * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(t / warmup, (ticks - t) / (ticks - warmup)))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    torch.manual_seed(5 + accelerator.process_index)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["words"]), batch["topic"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        hits = []
        for batch in eval_loader:
            with torch.no_grad():
                guess = model(batch["words"]).argmax(1)
            guess, topic = accelerator.gather_for_metrics((guess, batch["topic"]))
            hits.append(guess == topic)
        hits = torch.cat(hits)
        accelerator.print(f"epoch {epoch}: {int(hits.sum())} of {len(hits)} topics right")


if __name__ == "__main__":
    main()
