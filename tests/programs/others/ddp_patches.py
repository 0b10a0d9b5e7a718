"""A small vision transformer, trained with accumulated gradients."""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def quadrants(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=g)
    images = torch.randn(n, 1, 8, 8, generator=g)
    for q in range(4):
        r, c = divmod(q, 2)
        images[label == q, :, r * 4 : r * 4 + 4, c * 4 : c * 4 + 4] += 0.7
    return TensorDataset(images, label)


class PatchTransformer(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, stride=2)
        self.pos = nn.Parameter(torch.zeros(16, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        tokens = self.patch(images).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.encoder(tokens).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of one forward, over all processes")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.5)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(8)

    train_set, test_set = quadrants(256, seed=0), quadrants(64, seed=1)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    model = DDP(PatchTransformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = args.epochs * len(loader) // args.accum
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (images, label) in enumerate(loader):
            last = (i + 1) % args.accum == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(images.to(device)), label.to(device))
                (loss / args.accum).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            model.eval()
            images, label = test_set.tensors
            with torch.no_grad():
                accuracy = (model.module(images.to(device)).argmax(1).cpu() == label).float().mean()
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "args": vars(args)}, Path(tempfile.gettempdir()) / "patches.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
