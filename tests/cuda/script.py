"""A loop of one's own with the two lines, and what such loops have: `script.py WORDS`; each turns something on.

workers: a DataLoader with processes. fused: an optimizer in one kernel, whose learning
rate lies on the device. fp16: autocast and a GradScaler.
"""

import sys

import torch
import torch.nn.functional as F
from jobs import SAMPLES, Decoder, error, sentences
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

given = sys.argv[1:]
device = "cpu" if "cpu" in given else "cuda"
torch.manual_seed(0)
model = Decoder(0.0).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
rate = torch.tensor(0.01, device=device) if "fused" in given else 0.01
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused="fused" in given or None)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
workers = {"num_workers": 2, "persistent_workers": True} if "workers" in given else {}
data = TensorDataset(*sentences(SAMPLES))
loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=device == "cuda", **workers)
scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled="fp16" in given)

model, average, optimizer, loader, scheduler = mw.distribute(model, average, optimizer, loader, scheduler, view="rank")
for _ in range(2):
    for batch in loader:
        batch = [each.to(device, non_blocking=True) for each in batch]
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled="fp16" in given):
            logits = model(batch[0]).flatten(0, -2)
        loss = F.cross_entropy(logits.float(), batch[1].flatten())  # where autocast is the same on CUDA and on the CPU
        loss = mw.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        mw.print("loss", repr(loss.item()))

average.eval()
with torch.no_grad():
    mw.print("average", repr(error(average, [each[:8].to(device) for each in sentences(SAMPLES)]).item()))
mw.save({"average": average.state_dict(), "optimizer": optimizer.state_dict()}, f"state-{device}.pt")
