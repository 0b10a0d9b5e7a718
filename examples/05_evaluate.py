"""An exact evaluation of 21 samples on any number of devices: nothing is padded, nothing counts twice.

In batches of 10 the last batch has one sample. All devices but one have nothing to do there; they take part with a
repeated sample, which `mw.sum` leaves out.

python examples/05_evaluate.py
meshwise run examples/05_evaluate.py --devices 4xcpu
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
inputs = torch.randn(21, 4)
labels = (inputs.sum(dim=1) > 0).long()
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=10)

model, loader = mw.distribute(model, loader)

right, total_loss, seen = 0, 0.0, 0
with torch.no_grad():
    for x, y in loader:
        logits = model(x)
        right += mw.sum(int((logits.argmax(dim=1) == y).sum()))
        total_loss += mw.sum(nn.functional.cross_entropy(logits, y, reduction="sum").item())
        seen += mw.sum(len(y))
if mw.rank() == 0:
    print(f"{right} of {seen} right, mean loss {total_loss / seen:.4f}")
