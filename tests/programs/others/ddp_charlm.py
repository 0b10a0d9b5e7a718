"""A character language model with an LSTM."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards boxed with jovial quacking zebras. " * 20


class CharDataset(Dataset):
    def __init__(self, text, block=24):
        self.chars = sorted(set(TEXT))
        self.block = block
        self.data = torch.tensor([self.chars.index(c) for c in text])

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        piece = self.data[i * self.block : (i + 1) * self.block + 1]
        return piece[:-1], piece[1:]


class CharLM(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x.to(device))
            total += nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
            count += y.numel()
    return math.exp(total / count)


def main(epochs=3, batch_size=16, clip=0.01):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(2)

    split = 64 * 24 + 1
    train_set, val_set = CharDataset(TEXT[:split]), CharDataset(TEXT[split:])
    sampler = DistributedSampler(train_set, shuffle=True, seed=2)
    train_loader = DataLoader(train_set, batch_size // world_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size)

    model = CharLM(len(train_set.chars)).to(device)
    for p in model.parameters():
        p.register_hook(lambda grad: torch.clamp(grad, -clip, clip))
    model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            logits = model(x.to(device))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: perplexity {evaluate(model.module, val_loader, device):.2f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
