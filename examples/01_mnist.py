"""Tutorial 1 with a loop of one's own: MNIST, 784-128-10, Adam, and the one line that brings it to many devices.

python examples/01_mnist.py                                  on one device
meshwise run --devices 2xcpu examples/01_mnist.py            on two: the same numbers
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.training.jobs.mnist import MNIST, read_images

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=5)
epochs = options.parse_args().epochs

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train = DataLoader(read_images(MNIST, "train"), batch_size=64, shuffle=True)
test = DataLoader(read_images(MNIST, "test"), batch_size=1000)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
criterion = nn.CrossEntropyLoss()

model, optimizer, train, test = mw.distribute(model, optimizer, train, test)

for epoch in range(epochs):
    for step, (images, labels) in enumerate(train, start=1):
        loss = criterion(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"Epoch [{epoch + 1}/{epochs}], Step [{step}/{len(train)}], Loss: {loss.item():.4f}", flush=True)
print("Training Finished!")

right = 0
with torch.no_grad():
    for images, labels in test:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
print(f"Accuracy: {right / len(test.dataset):.2%}")
