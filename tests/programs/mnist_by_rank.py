"""Train on MNIST in the view by rank: bench/path.py counts what a step of it calls."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.training.jobs.mnist import MNIST, read_images

torch.manual_seed(0)
train = DataLoader(read_images(MNIST, "train"), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
model, optimizer, train = mw.distribute(model, optimizer, train, view="rank")
for images, labels in train:
    mw.backward(nn.functional.cross_entropy(model(images), labels))
    optimizer.step()
    optimizer.zero_grad()
