"""A variational autoencoder after pytorch/examples' vae, whose noise is drawn in the loop: for the whole batch."""

import torch
from torch import nn

import meshwise as mw


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12), nn.Sigmoid())

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance


def loss_of(result, mean, log_variance, x):
    likeness = nn.functional.binary_cross_entropy(result, x, reduction="sum")
    return likeness - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()


def main(epochs=2):
    torch.manual_seed(1)
    data = torch.rand(23, 12)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = mw.distribute(model, optimizer)
    numbers = []
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(8):
            x, noise = mw.split(data[rows], torch.randn(len(rows), 3))
            loss = loss_of(*model(x, noise), x)
            loss.backward()
            numbers.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return numbers, model.state_dict()


if __name__ == "__main__":
    print(main()[0])
