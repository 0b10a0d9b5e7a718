import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)

centers = torch.randn(4, 6)
labels = torch.arange(72) % 4
points = centers[labels] + 0.7 * torch.randn(72, 6)
dataset = TensorDataset(points, labels)
sampler = DistributedSampler(dataset, shuffle=True, seed=8)
loader = DataLoader(dataset, batch_size=9, sampler=sampler)

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
temperature = nn.Parameter(torch.tensor(0.5))
params = list(model.parameters()) + [temperature]
owner = [i % world for i in range(len(params))]
optimizer = torch.optim.AdamW([p for i, p in enumerate(params) if owner[i] == rank], lr=2e-2)


def reduce_gradients():
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


def publish():
    for i, p in enumerate(params):
        dist.broadcast(p.data, src=owner[i])


for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        for p in params:
            p.grad = None
        logits = F.normalize(model(x), dim=-1) * temperature.exp()
        loss = F.cross_entropy(logits, y)
        loss.backward()
        reduce_gradients()
        optimizer.step()
        publish()
    if rank == 0:
        print(f"epoch {epoch}: temperature {temperature.item():.5f}")
dist.destroy_process_group()
