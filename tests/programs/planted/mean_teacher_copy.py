import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(n=64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, :2].sum(1) > 0).long()
    labelled = torch.rand(n, generator=g)
    return TensorDataset(x, y, labelled)


@torch.no_grad()
def ema_update(teacher, student, m=0.9):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(m).add_(s, alpha=1 - m)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    ddp = DDP(student)
    teacher = copy.deepcopy(student).requires_grad_(False)

    data = dataset()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.2)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y, weight in loader:
            logits = ddp(x)
            with torch.no_grad():
                soft = teacher(x).softmax(-1)
            supervised = (F.cross_entropy(logits, y, reduction="none") * weight).mean()
            consistency = F.mse_loss(logits.softmax(-1), soft)
            opt.zero_grad()
            (supervised + 2.0 * consistency).backward()
            opt.step()
            ema_update(teacher, student)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
