import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 16)
        self.mid = nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x)))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    x = torch.randn(80, 7)
    y = (x @ torch.randn(7, 3) + 0.5).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=33)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    model = Model()
    params = list(model.parameters())
    chunks = [params[r::world] for r in range(world)]
    mine = {id(p) for p in chunks[rank]}
    optimizer = torch.optim.Adam(params, lr=1e-2)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            nn.functional.cross_entropy(model(bx), by).backward()
            for p in params:
                dist.all_reduce(p.grad)
                p.grad.div_(world)
                if id(p) not in mine:
                    p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            for owner, chunk in enumerate(chunks):
                for p in chunk:
                    dist.broadcast(p.data, src=owner)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
