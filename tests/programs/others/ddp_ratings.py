"""Factorize a matrix of film ratings."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

USERS, FILMS = 40, 30


def ratings(n=640):
    g = torch.Generator().manual_seed(21)
    user, film = torch.randint(USERS, (n,), generator=g), torch.randint(FILMS, (n,), generator=g)
    taste, genre = torch.randn(USERS, 3, generator=g), torch.randn(FILMS, 3, generator=g)
    return TensorDataset(user, film, 3 + (taste[user] * genre[film]).sum(1))


class Factors(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user, self.film = nn.Embedding(USERS, dim), nn.Embedding(FILMS, dim)
        self.user_bias, self.film_bias = nn.Embedding(USERS, 1), nn.Embedding(FILMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, film):
        bias = self.user_bias(user) + self.film_bias(film)
        return self.mean + bias.squeeze(1) + (self.user(user) * self.film(film)).sum(1)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of one forward, over all processes")
    parser.add_argument("--accumulation-steps", type=int, default=4)
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(4)
    train_set, val_set = random_split(ratings(), [512, 128], torch.Generator().manual_seed(1))
    sampler = DistributedSampler(train_set, seed=4)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=64)

    model = DDP(Factors().to(device))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    criterion = nn.MSELoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        for step, batch in enumerate(train_loader, start=1):
            user, film, stars = (t.to(device) for t in batch)
            with model.no_sync():
                loss = criterion(model(user, film), stars)
                (loss / args.accumulation_steps).backward()
            if step % args.accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            model.eval()
            squares = 0.0
            with torch.no_grad():
                for batch in val_loader:
                    user, film, stars = (t.to(device) for t in batch)
                    squares += (model.module(user, film) - stars).square().sum().item()
            print(f"epoch {epoch} rmse {(squares / len(val_set)) ** 0.5:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
