"""A polynomial fitted to batches that are made in the loop, after pytorch/examples' regression."""

import torch
from torch import nn

import meshwise as mw

DEGREE = 4


def get_batch(weights, size=32):
    x = torch.randn(size)
    powers = torch.stack([x**i for i in range(1, DEGREE + 1)], 1)
    return mw.split(powers, powers @ weights + 0.5)


def main(steps=8):
    torch.manual_seed(0)
    weights = torch.randn(DEGREE, 1)
    model = mw.distribute(nn.Linear(DEGREE, 1))
    losses = []
    for _ in range(steps):
        x, y = get_batch(weights)
        model.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.1)
    return losses, model.state_dict()


if __name__ == "__main__":
    print(main()[0])
