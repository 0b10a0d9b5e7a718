"""What a loop whose last batch is padded has added up is joined behind a later loop. Expected: refused."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
first = DataLoader(TensorDataset(torch.randn(9, 2)), batch_size=4)
second = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=3)
loaders = list(mw.distribute(first, second, view="rank"))
total = 0.0
for (x,) in loaders[0]:
    total += x.sum().item()  # wrong
    # right: total += mw.sum(x.sum().item())
other = 0
for (x,) in loaders[1]:
    other += mw.sum(len(x))
mw.print(f"{mw.sum(total):.5f} {other}")  # wrong
# right: mw.print(f"{total:.5f} {other}")
