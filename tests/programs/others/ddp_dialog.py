"""Train a decoder on short dialogues of different lengths."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

PAD, VOCAB, BLOCK = 0, 32, 20


class Dialogues(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.turns = []
        for _ in range(n):
            start, step, length = torch.randint(1, 5, (3,), generator=g).tolist()
            self.turns.append((torch.arange(4 * length + 1) * step + start) % (VOCAB - 1) + 1)

    def __len__(self):
        return len(self.turns)

    def __getitem__(self, i):
        return self.turns[i]


def pad(turns):
    tokens = nn.utils.rnn.pad_sequence(turns, batch_first=True, padding_value=PAD)
    return tokens[:, :-1], tokens[:, 1:]


class Decoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(BLOCK, dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.lm_head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, x):
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf"), device=x.device).triu(1)
        return self.lm_head(self.block(self.tok(x) + self.pos.weight[:n], src_mask=mask))


def summed_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")


def main(epochs=2, batch_size=32):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(3)
    train_set, val_set = Dialogues(320, seed=0), Dialogues(63, seed=1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=batch_size // world_size, sampler=sampler, collate_fn=pad)
    val_loader = DataLoader(Subset(val_set, range(rank, 63, world_size)), batch_size=16, collate_fn=pad)
    model = DDP(Decoder().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            tokens = (y != PAD).sum()
            dist.all_reduce(tokens)
            loss = summed_loss(model(x), y) * world_size / tokens
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        totals = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in val_loader:
                totals += torch.stack([summed_loss(model.module(x.to(device)), y.to(device)), (y != PAD).sum()])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {math.exp(totals[0] / totals[1]):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
