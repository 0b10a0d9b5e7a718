"""A loop as torch's own tools have it: torchrun, DistributedDataParallel, torch.distributed.checkpoint every 4 steps.

For bench/faults_peers.py: FAULT is what happens to rank 1 (rank 0 harms a checkpoint) in step 15 of the first start.
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


def happen(rank: int, model: nn.Module) -> None:
    """The fault."""
    if FAULT == "bit of a checkpoint" and rank == 0:
        newest = sorted(OUT.glob("state/step-*"))[-1]
        path = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x08
        path.write_bytes(content)
    if rank != 1:
        return
    (OUT / "stamp").write_text(str(time.time()))
    if FAULT in ("kill", "bit of a checkpoint"):
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
    model = nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4096, 1))
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
    first, again = 0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), f"random{rank}": torch.get_rng_state()}
    saved = sorted(OUT.glob("state/step-*/.metadata"))
    if saved:
        dcp.load(state, checkpoint_id=saved[-1].parent)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state[f"random{rank}"])
        first = int(saved[-1].parent.name.partition("-")[2])
    x = torch.randn(320, 6, generator=torch.Generator().manual_seed(0))
    for step in range(first + 1, STEPS + 1):
        rows = torch.randperm(320, generator=torch.Generator().manual_seed(step))[rank * 8 : rank * 8 + 8]
        if FAULT and step == AT and again == 0:
            happen(rank, model)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x[rows]), x[rows].sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        with (OUT / f"steps{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "again": again, "loss": loss.item()}) + "\n")
        if step % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save({**state, f"random{rank}": torch.get_rng_state()}, checkpoint_id=OUT / f"state/step-{step:04d}")
    if rank == 0:
        torch.save(model.state_dict(), OUT / "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
