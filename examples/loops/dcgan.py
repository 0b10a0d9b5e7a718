"""Two networks after pytorch/examples' dcgan: pictures from a loader, and noise of the loop's own.

The loop draws alike on every rank. `mw.split` divides the noise over the ranks, as the loader divides the pictures.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

NOISE, BATCH = 4, 6


def main(epochs=2):
    torch.manual_seed(999)
    pictures = TensorDataset(torch.randn(20, 3, 8, 8))
    loader = DataLoader(pictures, batch_size=BATCH, shuffle=True, drop_last=True)
    maker = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
    )
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten(0)
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (critic, maker)]
    critic, maker, loader, *optimizers = mw.distribute(critic, maker, loader, *optimizers)
    criterion = nn.BCEWithLogitsLoss()
    fixed = torch.randn(5, NOISE, 1, 1)
    numbers = []
    for _ in range(epochs):
        for (real,) in loader:
            noise = mw.split(torch.randn(BATCH, NOISE, 1, 1))
            critic.zero_grad()
            on_real = criterion(critic(real), torch.ones(len(real)))
            on_real.backward()
            fake = maker(noise)
            on_fake = criterion(critic(fake.detach()), torch.zeros(len(noise)))
            on_fake.backward()
            optimizers[0].step()
            maker.zero_grad()
            of_maker = criterion(critic(fake), torch.ones(len(noise)))
            of_maker.backward()
            optimizers[1].step()
            numbers += [on_real.item(), on_fake.item(), of_maker.item()]
        with torch.no_grad():
            numbers.append(maker(fixed).mean().item())  # in training mode, as the example does
    return numbers, maker.state_dict() | critic.state_dict()


if __name__ == "__main__":
    print(main()[0])
