import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n=80):
    g = torch.Generator().manual_seed(11)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 0.8).long()
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    encoder = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh()))
    head = DDP(nn.Linear(12, 3))
    opt_enc = torch.optim.Adam(encoder.parameters(), lr=5e-3)
    opt_head = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    decay = torch.optim.lr_scheduler.ExponentialLR(opt_head, gamma=0.95)

    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(head(encoder(x)), y)
            opt_enc.zero_grad()
            opt_head.zero_grad()
            loss.backward()
            opt_enc.step()
            opt_head.step()
            decay.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, head lr {decay.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
