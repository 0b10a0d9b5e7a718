"""Train on MNIST in the view by rank: bench/path.py counts what a step of it calls."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.jobs.mnist import MNIST, read_digits

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=5)
epochs = options.parse_args().epochs

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train = DataLoader(read_digits(MNIST, "train"), batch_size=64, shuffle=True)
test = DataLoader(read_digits(MNIST, "test"), batch_size=1000)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
criterion = nn.CrossEntropyLoss()

model, optimizer, train, test = mw.distribute(model, optimizer, train, test, view="rank")

for epoch in range(epochs):
    for step, (images, labels) in enumerate(train, start=1):
        loss = mw.backward(criterion(model(images.to(device)), labels.to(device)))
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 and mw.rank() == 0:
            print(f"Epoch [{epoch + 1}/{epochs}], Step [{step}/{len(train)}], Loss: {loss.item():.4f}", flush=True)
print("Training Finished!")

right = 0
with torch.no_grad():
    for images, labels in test:
        right += mw.sum(int((model(images.to(device)).argmax(1) == labels.to(device)).sum()))
print(f"Accuracy: {right / len(test.dataset):.2%}")
