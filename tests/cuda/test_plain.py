"""Programs that know nothing of meshwise, on fake GPUs: recorded, with the numbers that they have without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.records import folder as names
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline

pytestmark = pytest.mark.evidence("a program of DDP that knows nothing of meshwise is recorded, with its own numbers")

DDP = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn

kind, backend = sys.argv[1:]
dist.init_process_group(backend)
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(kind))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for x in torch.randn(5, 4, 8):
    optimizer.zero_grad()
    loss = model(x.to(kind)).square().mean()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # it blocks: nccl gives no work back
    if dist.get_rank() == 0:
        print("loss", mean.item() / 2, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def by_hand() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data, losses = [], list[float]()
    for rank in range(2):
        torch.manual_seed(rank)
        data.append(torch.randn(5, 4, 8))
    for x in torch.cat(data, 1):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_ddp_whose_gradients_a_thread_of_autograd_sends_is_recorded(
    meshwise: Any, tmp_path: Path, kind: str, backend: str
) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    printed = meshwise("run", "--devices", f"2x{kind}", "ddp.py", kind, backend).stdout
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("loss")]
    assert losses == pytest.approx(by_hand(), rel=1e-5) and len(losses) == 5
    report = report_of(read_timeline(names.newest_run(tmp_path / "runs")))
    assert report.steps == 5 and [rank.steps for rank in report.ranks] == [5, 5]
    assert ("all-reduce", "gradients") in {(each.name, each.of) for each in report.collectives}
