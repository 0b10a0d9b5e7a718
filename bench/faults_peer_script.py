"""A loop as torch's own tools have it: torchrun, DistributedDataParallel, torch.distributed.checkpoint every 4 steps.

For bench/faults_peers.py: FAULT is what happens to rank 1 in step 15 of the first start.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OUT, FAULT = Path(os.environ["PEER_OUT"]), os.environ.get("FAULT", "")
STEPS, AT = 20, 15
AGAIN = (OUT / "stamp").exists()
"""Whether this start comes after the fault."""


def network() -> nn.Sequential:
    """The model of all peers."""
    return nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4096, 1))


def samples() -> torch.Tensor:
    """Their data set; its target is the sum of a row."""
    return torch.randn(320, 6, generator=torch.Generator().manual_seed(0))


def written(rank: int, step: int, loss: float) -> None:
    """A line of this rank's record of steps."""
    with (OUT / f"steps{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "again": AGAIN, "loss": loss}) + "\n")


def trained(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """One step on this rank's part of the batch, written down: its loss."""
    rows = torch.randperm(320, generator=torch.Generator().manual_seed(step))[rank * 8 : rank * 8 + 8]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[rows]), x[rows].sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    written(rank, step, loss.item())
    return loss.item()


def happen(rank: int, model: nn.Module) -> None:
    """The fault."""
    if rank != 1:
        return
    (OUT / "stamp").write_text(str(time.time()))
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "exit":
        os._exit(0)
    with torch.no_grad():
        if FAULT == "bit of a parameter":
            next(model.parameters()).view(-1)[:1].view(torch.uint8)[2] ^= 0x08
        if FAULT == "nan":
            next(model.parameters()).view(-1)[0] = float("nan")


def main() -> None:
    """Train, save, go on from the newest state."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = network()
    wrapped = DistributedDataParallel(model)
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():  # the state is there before it is loaded into
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), begun, strict=True):
            parameter.copy_(before)
    for entry in optimizer.state.values():
        for value in entry.values():
            value.zero_()
    torch.manual_seed(100 + rank)
    first = 0
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), f"random{rank}": torch.get_rng_state()}
    saved = sorted(OUT.glob("state/step-*/.metadata"))
    if saved:
        dcp.load(state, checkpoint_id=saved[-1].parent)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state[f"random{rank}"])
        first = int(saved[-1].parent.name.partition("-")[2])
    x = samples()
    for step in range(first + 1, STEPS + 1):
        if FAULT and step == AT and not AGAIN:
            happen(rank, model)
        trained(rank, step, wrapped, optimizer, x)
        if step % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save({**state, f"random{rank}": torch.get_rng_state()}, checkpoint_id=OUT / f"state/step-{step:04d}")
    if rank == 0:
        torch.save(model.state_dict(), OUT / "last.pt")
    dist.barrier()  # else a rank may wait for ever, as it lets go of a connection that the other has left
    del wrapped
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
