"""Machines that are lost, with real launchers on hosts of their own: told on the others, and nobody waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.runs import JOBS
from tests.hosts import INTERFACE, Host, hosts, why_not

pytestmark = [pytest.mark.usefixtures("own_fork_server"), pytest.mark.slow]


class Launchers:
    """`meshwise run` of a long job on two hosts."""

    def __init__(self, cluster: list[Host], folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.started = [self._start(node) for node in (0, 1)]
        while "step 100/" not in self.output(0):
            assert self.started[0].poll() is None, self.output(0)
            time.sleep(0.1)

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "meshwise", "run", f"{JOBS}:job_raises", "--devices", "1xcpu", "--nnodes", "2"]
        command += ["--node-rank", str(node), "--rdzv-endpoint", f"{self.cluster[0].address}:29500"]
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "FAIL_STEP": "-1"}
        with (self.folder / f"host{node}.txt").open("wb") as log:
            return self.cluster[node].popen(
                [*command, "--out", str(self.folder / f"host{node}")], variables, stdout=log, stderr=log
            )

    def output(self, node: int) -> str:
        return (self.folder / f"host{node}.txt").read_text()

    def cut(self) -> None:
        """The link of host 1 is dead from now on."""
        switch = self.cluster[0].namespace.replace("host0", "switch")
        subprocess.run(["ip", "-n", switch, "link", "set", "host1", "down"], check=True)


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Callable[[], Launchers]]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2, None) as cluster:
        yield lambda: Launchers(cluster, tmp_path)


def test_a_dead_link_is_told_on_both_machines(launchers: Callable[[], Launchers]) -> None:
    two = launchers()
    two.cut()
    assert [process.wait(timeout=60) for process in two.started] == [85, 85]
    assert "machine 1 of 2 (rank 1) is lost: it has not answered for " in two.output(0)
    assert "machine 0 of 2 (rank 0) is lost: it has not answered for " in two.output(1)


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_stands_still_is_lost_for_the_other(node: int, launchers: Callable[[], Launchers]) -> None:
    two = launchers()
    two.started[node].send_signal(signal.SIGSTOP)
    assert two.started[1 - node].wait(timeout=60) == 85
    assert f"machine {node} of 2 (rank {node}) is lost: it has not answered for 10" in two.output(1 - node)
    two.started[node].send_signal(signal.SIGCONT)
    assert two.started[node].wait(timeout=60) == 85, two.output(node)


def test_ctrl_c_ends_a_launcher_behind_a_dead_link(launchers: Callable[[], Launchers]) -> None:
    two = launchers()
    two.cut()
    for _ in range(2):
        two.started[1].send_signal(signal.SIGINT)
        time.sleep(1.0)
    assert two.started[1].wait(timeout=60) == 130, two.output(1)


def test_the_machine_that_keeps_the_store_may_be_lost_too(launchers: Callable[[], Launchers]) -> None:
    two = launchers()
    two.started[0].kill()
    assert two.started[1].wait(timeout=60) == 85
    assert "machine 0 of 2 (rank 0) is lost: its launcher is gone" in two.output(1)
    assert "frame #" not in two.output(1)
