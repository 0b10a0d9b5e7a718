"""`meshwise bench --hosts`: under torchrun, as two hosts would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.hardware.machines import read_machine
from tests.hosts import free_port

pytestmark = pytest.mark.usefixtures("processes")

BENCH = [sys.executable, "-m", "meshwise", "bench", "--hosts", "--sizes", "1K:4K", "--seconds", "3"]


@pytest.mark.slow
def test_torchrun_as_two_hosts(tmp_path: Path) -> None:
    endpoint, own = str(free_port()), "--master-addr=127.0.0.1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", own]
    hosts = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(rank), "--master-port", endpoint, "-m", *BENCH[2:], *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank, more in enumerate((["--save", str(tmp_path / "two.toml"), "--json"], []))
    ]
    (out, err), (other, other_err) = (host.communicate(timeout=120) for host in hosts)
    assert [host.returncode for host in hosts] == [0, 0], err + other_err
    told = json.loads(out)
    assert {(r["source"], r["target"]) for r in told["results"] if r["operation"] == "copy"} == {
        ("node0", "node1"),
        ("node1", "node0"),
    }
    assert all(result["wrong"] is None for result in told["results"]) and other == ""
    machine = read_machine(tmp_path / "two.toml")
    assert len(machine.hosts) == 2 and [device.host for device in machine.devices] == [0, 1]
    assert {link.kind for link in machine.links} == {"network"}
