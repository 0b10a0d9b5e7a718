"""Tag the words of sentences with their parts of speech."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, WORDS, TAGS = 0, 50, 6


class Sentences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            words = torch.randint(1, WORDS, (int(torch.randint(2, 16, (), generator=g)),), generator=g)
            self.items.append({"words": words, "tags": (words + words.roll(1)) % TAGS})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    width = max(len(item["words"]) for item in items)
    words = torch.zeros(len(items), width, dtype=torch.long)
    tags, mask = torch.zeros_like(words), torch.zeros(len(items), width)
    for row, item in enumerate(items):
        n = len(item["words"])
        words[row, :n], tags[row, :n], mask[row, :n] = item["words"], item["tags"], 1.0
    return {"words": words, "tags": tags, "mask": mask}


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim, padding_idx=PAD)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(2 * dim, TAGS)

    def forward(self, words):
        return self.classify(self.lstm(self.embed(words))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(42)
    per_device = args.batch_size // accelerator.num_processes
    train_loader = DataLoader(Sentences(256, 0), batch_size=per_device, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(Sentences(64, 1), batch_size=16, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            logits = model(batch["words"])
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["tags"], reduction="none")
            loss = (losses * batch["mask"]).sum() / batch["mask"].sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        counts = torch.zeros(2, device=accelerator.device)
        for batch in eval_loader:
            with torch.no_grad():
                hits = (model(batch["words"]).argmax(-1) == batch["tags"]) * batch["mask"]
            counts += torch.stack([hits.sum(), batch["mask"].sum()])
        counts = accelerator.reduce(counts, reduction="sum")
        accelerator.print(f"epoch {epoch}: tagged {counts[0] / counts[1]:.3f} right")


if __name__ == "__main__":
    main()
