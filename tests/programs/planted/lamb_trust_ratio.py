import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                w, g, state = p.to_local(), p.grad.to_local(), self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
                state["step"] += 1
                state["m"].lerp_(g, 1 - b1)
                state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
                squares = torch.stack([w.pow(2).sum(), update.pow(2).sum()])
                dist.all_reduce(squares)
                norm_w, norm_u = squares.sqrt().tolist()
                trust = norm_w / norm_u if norm_w > 0 and norm_u > 0 else 1.0
                w.add_(update, alpha=-group["lr"] * trust)


dist.init_process_group("gloo")
torch.manual_seed(4)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = Lamb(model.parameters())
x = torch.randn(64, 8)
data = TensorDataset(x, x[:, :2] - 0.5 * x[:, 2:4] ** 2)
sampler = DistributedSampler(data, seed=4)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for bx, by in DataLoader(data, batch_size=8, sampler=sampler):
        nn.functional.mse_loss(model(bx), by).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
