"""Sentences of unequal length, a loss averaged over tokens, two batches a step: the gradient of one device, exactly.

One rank's share may hold twice the tokens of another's. `weight=tokens` makes the mean one over all tokens of the batch;
a plain average of the ranks' means would be another number.

python examples/04_token_mean.py
meshwise run examples/04_token_mean.py --devices 2xcpu
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import meshwise as mw


def pad(sentences: list[Tensor]) -> Tensor:
    return pad_sequence(sentences, batch_first=True)  # with 0, which is no word


torch.manual_seed(0)
sentences = [torch.randint(1, 50, (int(length),)) for length in torch.randint(2, 61, (48,))]
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(sentences, batch_size=4, shuffle=True, collate_fn=pad)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

for number, words in enumerate(loader, start=1):
    inputs, targets = words[:, :-1], words[:, 1:]
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0)
    tokens = (targets != 0).sum()
    step_is_full = number % 2 == 0
    with contextlib.nullcontext() if step_is_full else mw.accumulate():  # inside, gradients stay on their rank
        loss = mw.backward(loss, weight=tokens)
    if step_is_full:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mw.rank() == 0:
            print(f"step {number // 2}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}")
