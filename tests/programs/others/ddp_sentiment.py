"""Sentiment of short reviews with a bidirectional LSTM."""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def reviews(n, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 60, (n, 12), generator=g)
    label = ((words < 30).float().mean(1) > 0.5).float()
    return TensorDataset(words, label)


class SentimentLSTM(nn.Module):
    def __init__(self, vocab=60, dim=24, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, 1)

    def forward(self, words):
        states, _ = self.lstm(self.embedding(words))
        return self.fc(states.mean(1)).squeeze(1)


def warmup_then_linear(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / (total - warmup))

    return factor


def main(args):
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(args.seed)

    train_data, val_data = reviews(512, seed=1), reviews(90, seed=2)
    per_process = args.batch_size // world_size
    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
    loader = DataLoader(train_data, batch_size=per_process, sampler=sampler)
    val_loader = DataLoader(Subset(val_data, range(rank, len(val_data), world_size)), batch_size=30)

    model = DDP(SentimentLSTM().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total_steps = args.epochs * math.ceil(len(train_data) / per_process)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(4, total_steps))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for words, label in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(words.to(device)), label.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        hits = torch.zeros((), device=device)
        with torch.no_grad():
            for words, label in val_loader:
                hits += ((model.module(words.to(device)) > 0) == label.to(device).bool()).sum()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.2e} accuracy {hits.item() / len(val_data):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="total over processes")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
