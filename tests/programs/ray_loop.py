"""A loop for Ray Train's workers, of tests/launcher/engines/test_ray.py and bench/engines.py.

    python ray_loop.py LOG             one device, without Ray
    python ray_loop.py LOG 2 3 1       Ray, on two, three and one worker in turn, one more epoch with each

A line of the log is: time, step, loss, number of workers, process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCH = 6  # steps


def loop(config: dict[str, Any]) -> None:
    """Train in float64. config: log, epochs, and perhaps every (steps between two states) and pause (seconds)."""
    import meshwise as mw

    torch.manual_seed(0)
    x = torch.randn(24 * EPOCH, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=24, shuffle=True)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    state = config.get("state", "state")
    saved = mw.checkpoint(state, model=model, optimizer=optimizer, loader=loader, every=config.get("every", EPOCH))
    for _ in range(saved.epoch, config["epochs"]):
        for inputs, target in loader:
            loss = ((model(inputs) - target) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mw.log(loss=loss)
            value = loss.item()
            if mw.is_main():
                with Path(config["log"]).open("a") as file:
                    file.write(f"{time.time()} {saved.step} {value!r} {mw.world_size()} {os.getpid()}\n")
            time.sleep(config.get("pause", 0))


def steps_of(log: Path) -> list[tuple[float, int, float, int, int]]:
    """What the lines of a log say."""
    rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(float(at), int(step), float(loss), int(size), int(pid)) for at, step, loss, size, pid in rows]


def with_ray(log: str, sizes: list[int]) -> None:
    """One more epoch with each number of workers. Print what Ray knows of each."""
    import ray
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init("local", num_cpus=max(sizes) + 1, include_dashboard=False, object_store_memory=80_000_000)
    for epochs, size in enumerate(sizes, 1):
        result = TorchTrainer(
            loop,
            train_loop_config={"log": log, "epochs": epochs},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=train.ScalingConfig(num_workers=size),
            run_config=train.RunConfig(name="sizes", storage_path=str(Path(log).parent)),
        ).fit()
        print("reported", result.metrics["step"], result.metrics["loss"], Path(result.checkpoint.path).name)


if __name__ == "__main__":
    path, *sizes = sys.argv[1:]
    if sizes:
        with_ray(path, [int(size) for size in sizes])
    else:
        loop({"log": path, "epochs": int(os.environ.get("RAY_LOOP_EPOCHS", "3")), "state": f"{path}.state"})
