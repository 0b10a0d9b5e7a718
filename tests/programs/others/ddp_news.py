"""Sort headlines into topics with a bag of embeddings."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

TOPICS, WORDS = 4, 120


class Headlines(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.topic = torch.randint(TOPICS, (n,), generator=g)
        own = torch.randint(WORDS // TOPICS, (n, 10), generator=g) + self.topic[:, None] * (WORDS // TOPICS)
        noise = torch.randint(WORDS, (n, 10), generator=g)
        self.words = torch.where(torch.rand(n, 10, generator=g) < 0.3, own, noise)
        self.lengths = torch.randint(4, 11, (n,), generator=g)

    def __len__(self):
        return len(self.topic)

    def __getitem__(self, i):
        return self.words[i, : self.lengths[i]], self.topic[i]


def collate(batch):
    words, topics = zip(*batch)
    offsets = torch.tensor([0] + [len(w) for w in words[:-1]]).cumsum(0)
    return torch.cat(words), offsets, torch.stack(topics)


class TopicModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, dim, mode="mean")
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, TOPICS))

    def forward(self, words, offsets):
        return self.mlp(self.bag(words, offsets))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    train_set, test_set = Headlines(384, seed=0), Headlines(101, seed=1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(Subset(test_set, range(rank, 101, world_size)), 20, collate_fn=collate)
    model = DDP(TopicModel().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for words, offsets, topics in train_loader:
            loss = nn.functional.cross_entropy(model(words.to(device), offsets.to(device)), topics.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        counts = torch.zeros(2, dtype=torch.long, device=device)
        with torch.no_grad():
            for words, offsets, topics in test_loader:
                guess = model.module(words.to(device), offsets.to(device)).argmax(1)
                counts[0] += (guess == topics.to(device)).sum()
                counts[1] += len(topics)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {counts[0].item()}/{counts[1].item()} headlines right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
