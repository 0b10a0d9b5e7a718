"""Save in the middle of an epoch and go on from there, on another number of devices if need be.

python examples/06_save_and_resume.py --stop-after 7 --state state.pt
meshwise run --devices 2xcpu examples/06_save_and_resume.py --state state.pt
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

options = argparse.ArgumentParser()
options.add_argument("--state", type=Path, default=Path("state.pt"))
options.add_argument("--stop-after", type=int, default=None, help="steps")
args = options.parse_args()

torch.manual_seed(0)
x = torch.randn(100, 8)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader)

first = 0
if args.state.exists():
    state = torch.load(args.state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    first = state["step"]

step, epochs = first, 2
while step < epochs * len(loader):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}  loss {loss.item():.5f}", flush=True)
        if step == args.stop_after:
            everything = {"model": model, "optimizer": optimizer, "loader": loader}
            torch.save({name: thing.state_dict() for name, thing in everything.items()} | {"step": step}, args.state)
            raise SystemExit
