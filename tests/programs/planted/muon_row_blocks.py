import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def orthogonalize(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                n = p.size(0) // world
                rows = slice(rank * n, (rank + 1) * n)
                mine = orthogonalize(buf)[rows].contiguous()
                parts = [torch.empty_like(mine) for _ in range(world)]
                dist.all_gather(parts, mine)
                p.add_(torch.cat(parts), alpha=-group["lr"])


dist.init_process_group("gloo")
torch.manual_seed(9)
x, w = torch.randn(72, 8), torch.randn(8, 4)
data = TensorDataset(x, torch.tanh(x @ w))
sampler = DistributedSampler(data, seed=9)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
muon = Muon([p for p in model.parameters() if p.ndim == 2])
adam = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for bx, by in DataLoader(data, batch_size=6, sampler=sampler):
        model.zero_grad()
        nn.functional.mse_loss(model(bx), by).backward()
        muon.step()
        adam.step()
dist.destroy_process_group()
