"""Sentences of unequal length, a loss averaged over tokens, two batches a step: the gradient of one device, exactly.

The loss is a mean over the tokens of the whole batch, however many of them a rank has. Peers are off by 7 % here.

python examples/04_token_mean.py
meshwise run --devices 2xcpu examples/04_token_mean.py
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import meshwise as mw

torch.manual_seed(0)
sentences = [torch.randint(1, 50, (int(n),)) for n in torch.randint(2, 61, (48,))]
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(
    sentences, batch_size=4, shuffle=True, collate_fn=lambda batch: pad_sequence(batch, batch_first=True)
)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

for step, words in enumerate(loader, start=1):
    inputs, targets = words[:, :-1], words[:, 1:]
    logits = model(inputs).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=0)
    (loss / 2).backward()
    if step % 2 == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step // 2}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)
