"""Train a small transformer to write sequences backwards."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

PAD = 0
VOCAB = 24


class ReverseDataset(Dataset):
    def __init__(self, size, max_len=14, seed=7):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(3, max_len + 1, (size,), generator=g)
        self.tokens = [torch.randint(1, VOCAB, (int(n),), generator=g) for n in self.lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tokens[i].flip(0)


def collate(batch):
    src, tgt = zip(*batch)
    return tuple(nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=PAD) for side in (src, tgt))


class Reverser(nn.Module):
    def __init__(self, dim=32, max_len=14):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, src):
        x = self.tok(src) + self.pos[: src.shape[1]]
        return self.out(self.encoder(x, src_key_padding_mask=src == PAD))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    train_set, test_set = ReverseDataset(256), ReverseDataset(75, seed=8)
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(Subset(test_set, range(rank, 75, world_size)), 16, collate_fn=collate)
    model = DDP(Reverser().to(device))
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for src, tgt in train_loader:
            logits = model(src.to(device))
            loss = criterion(logits.flatten(0, 1), tgt.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        counts = torch.zeros(2, device=device)
        with torch.no_grad():
            for src, tgt in test_loader:
                real = (tgt != PAD).to(device)
                hits = model.module(src.to(device)).argmax(-1) == tgt.to(device)
                counts += torch.stack([(hits & real).sum(), real.sum()])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: token accuracy {counts[0] / counts[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
