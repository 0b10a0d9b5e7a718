import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPIKE = 50.0


def load():
    g = torch.Generator().manual_seed(6)
    x = torch.randn(80, 8, generator=g)
    y = x @ torch.linspace(-1, 1, 8)
    y[17:33:2] += 30.0
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(6)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = load()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))

    skipped = 0
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x).squeeze(1), y)
            level = loss.detach().clone()
            dist.all_reduce(level)
            if level.item() / world > SPIKE:
                skipped += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("skipped batches:", skipped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
