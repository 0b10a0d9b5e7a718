"""The cells of a notebook on two T4: what runs, and what is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.evidence(
    "a notebook on two T4 (7.5): its cells run; compile, bf16 and `DataParallel` are refused with a sentence"
)

CELLS = """
import torch
held = torch.ones(3, device="cuda")
print(torch.cuda.device_count(), torch.cuda.get_device_name(0))

import meshwise as mw
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(fp16=False, compiled=False):
    torch.manual_seed(0)
    inputs = torch.randn(64, 20)
    loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=16, shuffle=True, pin_memory=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
    model = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=fp16)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=fp16):
            loss = nn.functional.cross_entropy(model(x.cuda()).float(), y.cuda())
        loss = mw.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    return loss.item()

def data_parallel():
    mw.distribute(nn.DataParallel(nn.Linear(20, 2).cuda()), view="rank")

def refused(*arguments, devices="2xcuda"):
    try:
        mw.launch(*arguments, devices=devices)
    except Exception as error:
        print(type(error).__name__, error)

(a, b), (c, d) = mw.launch(train, devices="2xcuda"), mw.launch(train, True, devices="2xcuda")
print("losses", a == b and c == d and 0 < abs(a - c) < 1e-2)
refused(train, False, True)
refused(data_parallel)
refused(train, devices="4xcuda")
xp = mw.array_namespace("cuda")
print("sum", float(xp.sum(xp.arange(10.0) * 2)))
print("copied", mw.to(held, "cuda:1", verify=True).device)
"""


def test_the_cells_of_a_notebook_run_on_two_t4_or_are_refused(python: Any, fake: Any) -> None:
    fake(gpu="T4")
    lines = python("-c", CELLS).stdout.splitlines()
    assert [line for line in lines if line.startswith(("2 ", "losses", "sum", "copied"))] == [
        "2 Tesla T4",
        "losses True",
        "sum 90.0",
        "copied cuda:1",
    ]
    text = "\n".join(lines)
    assert "compile=True on a GPU needs triton, which is missing. Install triton, or leave compile out." in text
    assert "mw.distribute was given a DataParallel. Remove that wrapper" in text
    assert "UsageError --devices 4xcuda: this machine has 2 cuda devices" in text


def test_bf16_on_two_t4_is_refused_with_what_to_write(meshwise: Any, fake: Any) -> None:
    fake(gpu="T4")
    done = meshwise("run", "mnist-mlp", "--devices", "2xcuda", "--set", "precision=bf16", check=False)
    assert "compute_dtype='bf16'" in done.stderr and "Use precision='fp32'" in done.stderr and done.returncode != 0
