"""The mean over 21 samples is 11, on any number of devices: nothing is padded, nothing counts twice.

python examples/05_evaluate.py
meshwise run --devices 4xcpu examples/05_evaluate.py
"""

import torch
from torch.utils.data import DataLoader

import meshwise as mw

loader = mw.distribute(DataLoader(torch.arange(1.0, 22.0), batch_size=8))
total, count = 0.0, 0
for values in loader:
    total += values.sum().item()
    count += len(values)
print(f"mean {total / count:.3f} of {count} samples on {mw.world_size()} device(s)")
