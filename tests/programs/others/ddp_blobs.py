"""Cluster labels of points in the plane."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH_SIZE = 40
LR = 0.2


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 4
    centre = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
    return TensorDataset(centre[label] + torch.randn(n, 2, generator=g), label)


def setup():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def accuracy(model, dataset, device):
    points, labels = dataset.tensors
    with torch.no_grad():
        return (model(points.to(device)).argmax(1).cpu() == labels).float().mean().item()


def main():
    device = setup()
    world_size = dist.get_world_size()
    torch.manual_seed(123)

    train_set, test_set = blobs(400, seed=0), blobs(120, seed=1)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE // world_size, shuffle=True)

    model = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 4)).to(device)
    ddp_model = DDP(model)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=LR)

    for epoch in range(EPOCHS):
        total = torch.zeros((), device=device)
        for points, labels in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / len(train_loader) / world_size
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, test accuracy {accuracy(model, test_set, device):.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
