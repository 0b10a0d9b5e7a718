"""A rank that hangs on another machine, with real launchers on hosts of their own: told on both in the same words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_hangs import SCRIPT
from tests.hosts import INTERFACE, Host, hosts, why_not

pytestmark = [pytest.mark.usefixtures("own_fork_server"), pytest.mark.slow]


@pytest.fixture
def cluster() -> Iterator[list[Host]]:
    if reason := why_not(own_clocks=True):
        pytest.skip(reason)
    with hosts(2, None, ahead=[0.0, 4000.0]) as made:
        yield made


def outputs(cluster: list[Host], folder: Path, *words: str) -> tuple[list[int], list[str]]:
    """Exit codes and what was shown of a run with one rank on each host."""
    started = []
    for node, host in enumerate(cluster):
        meeting = ("--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", f"{cluster[0].address}:29500")
        more = ("--devices", "1xcpu", "--out", str(folder / f"host{node}"), "--hang-limit", "8s")
        with (folder / f"host{node}.txt").open("wb") as log:
            command = [sys.executable, "-m", "meshwise", "run", *meeting, *more, *words]
            started.append(host.popen(command, {"GLOO_SOCKET_IFNAME": INTERFACE}, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=90) for process in started]
    return codes, [" ".join((folder / f"host{node}.txt").read_text().split()) for node in range(2)]


def test_a_late_rank_of_a_loop_is_explained_on_both_machines(cluster: list[Host], tmp_path: Path) -> None:
    codes, (here, there) = outputs(cluster, tmp_path, str(SCRIPT), "late", "6")
    assert codes == [0, 0], here + there
    told = "in step 20: rank 1 is in its phase forward and stands at "
    assert told in there and "in validate; rank 0 waits for it in all-reduce" in there
    assert here.count("No progress for") == there.count("No progress for") == 1
    assert "machine 1: No progress for" in here and told in here and "rank 0 waits for it in all-reduce" in here
    assert "rank 1 goes on after " in here and "rank 1 goes on after " in there


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_of_a_job_ends_it_on_both_machines(rank: int, cluster: list[Host], tmp_path: Path) -> None:
    fault = f"hang:rank={rank},step=50,phase=backward"
    codes, said = outputs(cluster, tmp_path, "mnist-mlp", "--epochs", "1", "--fault", fault)
    assert 0 not in codes and codes[0] == codes[1], said
    for text in said:
        assert f"in step 50: rank {rank} is in its phase backward and stands at " in text
        assert f"rank {1 - rank} waits for it in all-reduce of gradients (collective " in text
        assert "Ended after 8 s without progress." in text and "may be missing" not in text
