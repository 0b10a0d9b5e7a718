"""Mistakes around a run: a second one, another launcher, a port that is taken, a disk that is full."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from meshwise.training.process.session import end_sessions
from tests.training.whole.mistakes import ce, parts
from tests.training.whole.running import apart, run
from tests.training.whole.shared import Distribute, step, weights

LOOP = """
import pathlib, sys
import torch
import meshwise as mw

torch.manual_seed(0)
x = torch.randn(21, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")
for a, b in loader:
    loss = (model(a) - b).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss:.5f} of {len(a)} rows", flush=True)
for file in sys.argv[1:]:
    pathlib.Path(file).write_text("end")
"""
MESHWISE = [sys.executable, "-m", "meshwise", "run"]


def trained(distribute: Distribute, folder: Path, stop: int = 0) -> Any:
    """Two epochs that go on where an earlier run ended. stop: an exception after so many batches."""
    model, optimizer, loader = distribute(*parts())
    saved = mw.checkpoint(str(folder), model=model, optimizer=optimizer, loader=loader, every=1)
    losses = []
    for _ in range(saved.epoch, 2):
        for x, y in loader:
            losses.append(step(ce(model, x, y), optimizer))
            if len(losses) == stop:
                raise InterruptedError
    return losses, weights(model)


def resumed(folder: Path) -> Any:
    """What a run leaves that goes on where another has ended, after its second batch."""
    distribute = partial(mw.distribute, view="whole")
    try:
        run(lambda d: trained(d, folder, 2), distribute)
    except InterruptedError:
        end_sessions()
    return run(lambda d: trained(d, folder), distribute)


def saved_before_distributed(folder: Path) -> str:
    def program(distribute: Distribute) -> str:
        model, optimizer, loader = parts()
        try:
            mw.checkpoint(str(folder), model=model, optimizer=optimizer, loader=loader)
            distribute(model, optimizer, loader)
        except mw.MeshwiseError as error:
            return str(error)
        return ""

    return run(program, partial(mw.distribute, view="whole"))


def launched(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The loop in processes of their own. `words` end with what is started, and its arguments."""
    (folder / "loop.py").write_text(LOOP)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=150)


def test_a_run_that_ended_goes_on_as_one_device_does(pool: Any, tmp_path: Path) -> None:
    want = resumed(tmp_path / "one")
    for got in pool(2).run(resumed, tmp_path / "two"):
        assert len(got[0]) == 5  # of six: one is in the state
        far, at = apart(got, want)
        assert far <= 1e-9, at


def test_a_checkpoint_before_the_view_is_refused(pool: Any, tmp_path: Path) -> None:
    for said in pool(2).run(saved_before_distributed, tmp_path / "state"):
        assert "mw.distribute" in said and len(said.split()) > 8


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_torchrun_gives_the_losses_of_one_device(tmp_path: Path) -> None:
    alone = launched([sys.executable, "loop.py"], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py"]
    both = launched(torchrun, tmp_path)
    assert both.returncode == 0, both.stderr
    lines = re.findall(r"loss \S+ of \d rows", alone.stdout)
    assert len(lines) == 3 and sorted(re.findall(r"loss \S+ of \d rows", both.stdout)) == sorted(2 * lines)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        meeting = ["--rdzv-endpoint", f"127.0.0.1:{taken.getsockname()[1]}", "--nnodes", "2"]
        ran = launched([*MESHWISE, *meeting, "--devices", "1xcpu", "loop.py"], tmp_path)
    assert (
        ran.returncode == 2
        and "(Address already in use). Set MASTER_PORT" in ran.stderr
        and "Traceback" not in ran.stderr
    )


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the disk that is always full is Linux's")
def test_a_full_disk_ends_the_run_as_it_ends_one_device(tmp_path: Path) -> None:
    for words in ([sys.executable], [*MESHWISE, "--devices", "2xcpu"]):
        ran = launched([*words, "loop.py", "/dev/full"], tmp_path)
        assert ran.returncode == 1 and "No space left on device" in ran.stderr, ran.stderr
        assert ran.stdout.count("of 8 rows") == 2
