"""A script with hydra's configuration: its options stand after the script, those of meshwise before it.

python examples/17_hydra.py lr=0.1
meshwise run --devices 2xcpu examples/17_hydra.py lr=0.1
"""

from dataclasses import dataclass, field
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


@dataclass
class Config:
    lr: float = 0.01
    epochs: int = 2
    batch_size: int = 16  # of all devices together
    # By the clock, as hydra names it, each rank would have a folder of its own, and each a log file in it.
    hydra: Any = field(default_factory=lambda: {"run": {"dir": "outputs/${hydra.job.name}"}, "output_subdir": None})
    defaults: Any = field(default_factory=lambda: ["_self_", {"override hydra/job_logging": "stdout"}])


ConfigStore.instance().store("config", Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config: Config) -> None:
    torch.manual_seed(0)
    x = torch.randn(203, 8)
    loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=config.batch_size, shuffle=True)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    for epoch in range(config.epochs):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.6f} with lr {config.lr}")


if __name__ == "__main__":
    main()
