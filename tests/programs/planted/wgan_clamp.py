import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLIP = 0.05


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    real = 0.5 * torch.randn(64, 6) + torch.tensor([1.0, -1.0, 0.0, 2.0, 0.5, 0.0])
    noise = torch.randn(64, 4)
    data = TensorDataset(real, noise)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
    critic = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-3)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, z in loader:
            fake = generator(z)
            scores = critic(torch.cat([x, fake.detach()]))
            c_loss = scores[len(x) :].mean() - scores[: len(x)].mean()
            opt_c.zero_grad()
            c_loss.backward()
            opt_c.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-CLIP, CLIP)

            g_loss = -critic(fake).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
        if rank == 0:
            print("epoch", epoch, "complete")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
