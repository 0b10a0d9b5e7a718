"""Identify speakers from their voice features, with a cosine margin."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SPEAKERS = 12


class Voices(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(99)
        timbre = torch.randn(SPEAKERS, 20, generator=g)
        g.manual_seed(seed)
        self.speaker = torch.randint(SPEAKERS, (n,), generator=g)
        self.frames = timbre[self.speaker, None] + 1.5 * torch.randn(n, 6, 20, generator=g)

    def __len__(self):
        return len(self.speaker)

    def __getitem__(self, i):
        return self.frames[i], self.speaker[i]


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(20, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, frames):
        return self.norm(self.frame(frames).mean(1))


class CosineMargin(nn.Module):
    def __init__(self, dim=32, scale=10.0, margin=0.2):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(SPEAKERS, dim))
        self.scale, self.margin = scale, margin

    def scores(self, embedding):
        return F.linear(F.normalize(embedding), F.normalize(self.centres))

    def forward(self, embedding, speaker):
        cosine = self.scores(embedding) - self.margin * F.one_hot(speaker, SPEAKERS)
        return F.cross_entropy(self.scale * cosine, speaker)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(17)

    train_set, test_set = Voices(288, seed=1), Voices(96, seed=2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=36 // dist.get_world_size(), sampler=sampler)

    encoder = DDP(Encoder().to(device))
    margin = CosineMargin().to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *margin.parameters()], lr=3e-3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        encoder.train()
        for frames, speaker in loader:
            optimizer.zero_grad()
            loss = margin(encoder(frames.to(device)), speaker.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            encoder.eval()
            with torch.no_grad():
                guess = margin.scores(encoder.module(test_set.frames.to(device))).argmax(1).cpu()
            print(f"epoch {epoch}: {(guess == test_set.speaker).float().mean().item():.3f} of the speakers found")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
