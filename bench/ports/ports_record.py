"""Imported first by each script of bench/ports.py: dtype, number of threads, small pictures, and what it found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

torch.set_default_dtype(getattr(torch, os.environ["PORTS_DTYPE"]))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
SMALL = {224: 32, 256: 36}
NUDGED = int(os.environ.get("PORTS_NUDGED", "0"))
begin = torch.optim.Optimizer.__init__


def nudged(self: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
    """An optimizer whose parameters are first moved by one rounding each, up or down."""
    begin(self, *args, **options)
    draw = torch.Generator().manual_seed(NUDGED)
    with torch.no_grad():
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            sign = 2 * torch.randint(2, parameter.shape, generator=draw) - 1
            parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)


if NUDGED:
    torch.optim.Optimizer.__init__ = nudged


def record(model: torch.nn.Module | None = None, **values: Any) -> None:
    """Rank 0 writes a line of numbers, and the weights."""
    if os.environ.get("RANK", "0") != "0":
        return
    out = Path(os.environ["PORTS_OUT"])
    with (out / "history.jsonl").open("a") as file:
        file.write(json.dumps({k: v.item() if hasattr(v, "item") else v for k, v in values.items()}) + "\n")
    if model is not None:
        torch.save({k: v.clone() for k, v in model.state_dict().items()}, out / "weights.pt")


def shrink() -> None:
    """Pictures of 32 pixels, where the script says 224; without random augmentation, which a run on several devices
    draws by sample, and plain PyTorch by worker."""
    from torchvision import transforms as t

    resize, centre = t.Resize, t.CenterCrop
    t.RandomResizedCrop = lambda size: resize((SMALL[size], SMALL[size]))
    t.RandomHorizontalFlip = lambda: t.Lambda(lambda picture: picture)
    t.Resize = lambda size: resize(SMALL[size])
    t.CenterCrop = lambda size: centre(SMALL[size])
