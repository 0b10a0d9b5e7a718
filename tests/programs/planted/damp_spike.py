import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def measurements(n=80):
    g = torch.Generator().manual_seed(61)
    x = torch.randn(n, 8, generator=g)
    y = x[:, 0] - x[:, 1] + 0.5 * x[:, 2] ** 2
    y[33:49:2] += 20.0
    return TensorDataset(x, y)


def global_mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(61)
    data = measurements()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)

    level = None
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x).squeeze(-1), y)
            current = global_mean(loss)
            if level is not None and current > 4 * level:
                loss = 0.1 * loss
            level = current if level is None else 0.9 * level + 0.1 * current
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
