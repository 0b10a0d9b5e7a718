"""The script of the old runs: it saves its state after `--stop-after` steps, and goes on from a state that is there."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

options = argparse.ArgumentParser()
options.add_argument("--state", type=Path)
options.add_argument("--stop-after", type=int, help="steps")
options.add_argument("--losses", type=Path, help="where the losses are written")
args = options.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")

step, losses = 0, []
if args.state.exists():
    state = mw.load(args.state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    step = state["step"]
while step < 2 * len(loader):
    for inputs, targets in loader:
        loss = mw.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step == args.stop_after:
            everything = {"model": model, "optimizer": optimizer, "loader": loader}
            mw.save({name: thing.state_dict() for name, thing in everything.items()} | {"step": step}, args.state)
            break
    if step == args.stop_after:
        break
if mw.rank() == 0:
    args.losses.write_text(json.dumps(losses))
