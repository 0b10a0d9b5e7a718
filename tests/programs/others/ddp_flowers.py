"""Tell three kinds of flowers apart."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def flowers(n=357):
    g = torch.Generator().manual_seed(3)
    kind = torch.randint(3, (n,), generator=g)
    means = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    return TensorDataset(means[kind] + 0.5 * torch.randn(n, 4, generator=g), kind)


def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    running = torch.zeros((), device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        running += loss.detach()
    dist.all_reduce(running)
    return running.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, seen = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in loader:
        pred = model(x.to(device)).argmax(dim=1)
        correct += (pred == y.to(device)).sum()
        seen += y.numel()
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    return (correct / seen).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--global-batch-size", default=32, type=int)
    args = parser.parse_args()

    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    world_size = dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    train_set, val_set = random_split(flowers(), [256, 101], generator=torch.Generator().manual_seed(0))
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, args.global_batch_size // world_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, 16, sampler=val_sampler)

    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(device))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, criterion, optimizer, device)
        accuracy = evaluate(model, val_loader, device)
        best = max(best, accuracy)
        if dist.get_rank() == 0:
            print(f"[{epoch}] train loss {loss:.4f}  val accuracy {accuracy:.4f}  best {best:.4f}")
    dist.destroy_process_group()
