import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPS = 0.1


def build():
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    x_all = torch.randn(80, 8)
    y_all = (x_all @ torch.randn(8, 4)).argmax(1)
    data = TensorDataset(x_all, y_all)
    sampler = DistributedSampler(data, shuffle=True, seed=21)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            x.requires_grad_(True)
            clean = F.cross_entropy(model(x), y)
            clean.backward()

            x_adv = (x + EPS * x.grad.sign()).detach()
            adversarial = F.cross_entropy(model(x_adv), y)
            (0.5 * adversarial).backward()
            optimizer.step()
            if dist.get_rank() == 0 and step == len(loader) - 1:
                print(f"epoch {epoch} step {step} finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
