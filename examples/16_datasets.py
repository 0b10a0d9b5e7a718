"""A stream of Hugging Face's datasets, shuffled in a buffer: every rank reads it, each trains on its part of a batch.

python examples/16_datasets.py
meshwise run --devices 2xcpu examples/16_datasets.py

Rows are made here, nothing is downloaded; `load_dataset("name", split="train", streaming=True)` takes their place.
"""

from collections.abc import Iterator
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw


def rows() -> Iterator[dict[str, Any]]:
    for n in range(203):
        yield {"x": [float(n % k == 0) for k in range(2, 10)], "label": n % 5}


torch.manual_seed(0)
stream = IterableDataset.from_generator(rows).shuffle(seed=0, buffer_size=50).with_format("torch")
loader = DataLoader(stream, batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

for epoch in range(2):
    stream.set_epoch(epoch)  # another order in each epoch
    for batch in loader:
        x = batch["x"].to(torch.get_default_dtype())
        loss = nn.functional.cross_entropy(model(x), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
