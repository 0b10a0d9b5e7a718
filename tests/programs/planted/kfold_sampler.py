import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class FoldSampler(Sampler):
    def __init__(self, n, folds, held_out, seed=0):
        self.indices = [i for i in range(n) if i % folds != held_out]
        self.folds, self.seed, self.epoch = folds, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.indices), generator=g).tolist()
        shuffled = [self.indices[i] for i in order]
        return iter(shuffled[self.rank :: self.world])

    def __len__(self):
        return len(range(self.rank, len(self.indices), self.world))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(29)
    x = torch.randn(80, 8)
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    data = TensorDataset(x, y)
    sampler = FoldSampler(len(data), folds=5, held_out=2)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
