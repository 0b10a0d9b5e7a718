"""Classify product reviews with a small transformer."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(80, (n, 16), generator=g)
        self.labels = ((self.input_ids < 40).sum(1) > 8).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.input_ids[i], "labels": self.labels[i]}


class Classifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(80, dim)
        self.pos = nn.Parameter(torch.zeros(16, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.score = nn.Linear(dim, 2)

    def forward(self, input_ids, labels):
        logits = self.score(self.encoder(self.embed(input_ids) + self.pos).mean(1))
        return nn.functional.cross_entropy(logits, labels), logits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(1)
    train_dl = DataLoader(Reviews(256, 0), batch_size=args.batch_size // accelerator.num_processes, shuffle=True)
    eval_dl = DataLoader(Reviews(85, 1), batch_size=16)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            loss, _ = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        all_predictions, all_labels = [], []
        for batch in eval_dl:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions, labels = accelerator.gather((logits.argmax(dim=-1), batch["labels"]))
            all_predictions.append(predictions)
            all_labels.append(labels)
        predictions, labels = torch.cat(all_predictions), torch.cat(all_labels)
        accuracy = (predictions == labels).float().mean().item()
        positive = predictions[labels == 1].float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f} recall {positive:.4f}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
