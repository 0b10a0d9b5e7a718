import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTower(nn.Module):
    def __init__(self, da=8, db=6, d=10):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(da, 16), nn.Tanh(), nn.Linear(16, d))
        self.b = nn.Sequential(nn.Linear(db, 16), nn.Tanh(), nn.Linear(16, d))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, xa, xb):
        return F.normalize(self.a(xa), dim=-1), F.normalize(self.b(xb), dim=-1), self.scale.exp()


def gather(z):
    return torch.cat(torch.distributed.nn.all_gather(z))


def contrastive(za, zb, scale):
    all_a, all_b = gather(za), gather(zb)
    target = torch.arange(len(za)) + dist.get_rank() * len(za)
    return 0.5 * (F.cross_entropy(scale * za @ all_b.T, target) + F.cross_entropy(scale * zb @ all_a.T, target))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(52)
    latent = torch.randn(64, 4)
    data = TensorDataset(latent @ torch.randn(4, 8), torch.tanh(latent @ torch.randn(4, 6)))
    sampler = DistributedSampler(data, shuffle=True, seed=52)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(TwoTower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xa, xb in loader:
            loss = contrastive(*model(xa, xb))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
