import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOCAL_STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def average(params):
    for p in params:
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    x = torch.randn(64, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=10)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(bx), by).backward()
            optimizer.step()
            step += 1
            if step % LOCAL_STEPS == 0:
                average(model.parameters())
        if dist.get_rank() == 0:
            print("epoch", epoch, "steps", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
