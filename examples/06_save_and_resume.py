"""Save in the middle of an epoch and go on from there, on another number of devices if need be.

python examples/06_save_and_resume.py --stop-after 7             stops after 7 of 20 steps
meshwise run examples/06_save_and_resume.py --devices 2xcpu      goes on with step 8
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

EPOCHS = 2

options = argparse.ArgumentParser()
options.add_argument("--state", type=Path, default=Path("state.pt"), help="the file to save to and to go on from")
options.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop after this step")
args = options.parse_args()

torch.manual_seed(0)
x = torch.randn(100, 8)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=10, shuffle=True)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

step = 0
if args.state.exists():
    state = mw.load(args.state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])  # the next loop over it gives the rest of that epoch
    step = state["step"]

while step < EPOCHS * len(loader):
    for inputs, targets in loader:
        loss = mw.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if mw.rank() == 0:
            print(f"step {step}  loss {loss.item():.5f}")
        if step == args.stop_after:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            mw.save(state | {"step": step}, args.state)
            raise SystemExit
