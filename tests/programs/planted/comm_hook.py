import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def allreduce_hook(group, bucket):
    world = dist.get_world_size(group)
    buffer = bucket.buffer().div_(world)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


class Autoencoder(nn.Module):
    def __init__(self, d=8, code=3):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Linear(16, code))
        self.decode = nn.Sequential(nn.Linear(code, 16), nn.Tanh(), nn.Linear(16, d))

    def forward(self, x):
        return self.decode(self.encode(x))


dist.init_process_group("gloo")
torch.manual_seed(44)
x = torch.randn(80, 3) @ torch.randn(3, 8)
data = TensorDataset(x)
sampler = DistributedSampler(data, shuffle=True, seed=44)
loader = DataLoader(data, batch_size=8, sampler=sampler)

model = DDP(Autoencoder())
model.register_comm_hook(dist.group.WORLD, allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("finished epoch", epoch)
dist.destroy_process_group()
