"""`meshwise doctor --nodes` on three hosts: each fault is named with its node, its figure and the line that mends it.

The hosts are network namespaces of this machine; clocks and versions are faked inside a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, hosts, why_not

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no hosts: {why_not()}"),
]
COUNT, PORT = 3, 29477
STEP = {  # as a task of a step on three nodes has them
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "10.77.0.[1-3]",
    "SLURM_LOCALID": "0",
}
FAKED = """
import importlib.metadata as metadata, os, sys, time
real, version = time.time, metadata.version
fakes = eval(os.environ.get("FAKES", "{}"))
time.time = lambda: real() + fakes.get("ahead", 0)
metadata.version = lambda name: fakes.get(name) or version(name)
if mark := fakes.get("pause"):  # connections take long: time for a test to cut the link
    from meshwise.launcher import node_checks
    probe = node_checks.probe
    def late(address, port):
        open(mark, "w").close()
        time.sleep(3)
        return probe(address, port)
    node_checks.probe = late
from meshwise.cli import main
main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Host]]:
    with hosts(COUNT, None) as made:
        yield made


def start(host: Host, node: int, cluster: Sequence[Host], folder: Path, *more: str, **env: str) -> Any:
    """The doctor on one host. folder: what it takes for the run folder, in front of words that change its view."""
    by_hand = ["--nnodes", str(COUNT), "--node-rank", str(node), "--master-addr", cluster[0].address]
    by_hand += ["--master-port", str(PORT)]
    words = ["doctor", *(["--nodes"] if "SLURM_JOB_ID" in env else by_hand)]
    words += ["--wait", "120", "--out", str(folder), "--json", *more]
    command = [sys.executable, "-c", FAKED, *words]
    return host.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: Any, limit: float = 300.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


def all_ended(processes: Sequence[Any]) -> dict[str, Any]:
    """What node 0 found, once all have ended with the same exit code."""
    answers = [ended(process) for process in processes]
    assert len({code for code, _, _ in answers}) == 1, answers
    found: dict[str, Any] = json.loads(answers[0][1])
    assert found["exit_code"] == answers[0][0]
    return found


def of(found: dict[str, Any], what: str) -> list[tuple[str, str, str]]:
    """What was found of one kind: host, why, mend."""
    own = [each for each in found["findings"] if each["what"] == what]
    return [(each["figure"].rpartition("-")[2], each["why"], each["mend"]) for each in own]


@pytest.mark.parametrize("step", [{}, STEP], ids=["by hand", "in a step"])
def test_healthy_nodes_have_nothing_to_say(step: dict[str, str], cluster: list[Host], tmp_path: Path) -> None:
    places = [step and {**step, "SLURM_NODEID": str(node)} for node in range(COUNT)]
    found = all_ended([start(host, n, cluster, tmp_path, **places[n]) for n, host in enumerate(cluster)])
    assert found["findings"] == []
    assert found["facts"]["nodes"].startswith("3 of 3")
    assert found["facts"]["links"] == "6 of 6 ways"
    assert list(tmp_path.iterdir()) == []


def test_each_fault_is_named_with_its_node(cluster: list[Host], tmp_path: Path) -> None:
    programs = [tmp_path / f"code{node}" / "train.py" for node in range(COUNT)]
    for node, program in enumerate(programs):
        program.parent.mkdir()
        program.write_text("lr = 0.1\n" if node != 1 else "lr = 0.2\n")
    fakes: list[dict[str, Any]] = [{}, {"ahead": 37.0}, {"numpy": "1.26.0"}]
    processes = []
    for node, host in enumerate(cluster):
        folder = tmp_path / ("own" if node == 2 else "shared")  # a folder that another node does not see
        folder.mkdir(exist_ok=True)
        words = (str(programs[node]),)
        processes.append(start(host, node, cluster, folder, *words, FAKES=repr(fakes[node])))
    found = all_ended(processes)
    ((host, why, mend),) = of(found, "clocks")
    assert (host, why) == ("host1", "37.0 s ahead of the others") and mend.startswith("chronyc makestep on meshwise-")
    ((host, why, mend),) = of(found, "versions")
    assert (host, why.partition(", not ")[0], mend[:18]) == ("host2", "numpy 1.26.0", "pip install numpy=")
    ((host, why, mend),) = of(found, "files")
    assert host == "host1" and "train.py" in why and "share" in mend
    ((host, why, mend),) = of(found, "folder")
    assert host == "host2" and str(tmp_path / "shared") in why and "--out" in mend
    assert len(found["findings"]) == 4


def test_a_node_that_another_does_not_reach_is_named(cluster: list[Host], tmp_path: Path) -> None:
    """Packets of host 1 to host 2 go to a card that does not exist."""
    neighbour = (cluster[2].address, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
    of_host = ("ip", "-n", cluster[1].namespace, "neigh")
    subprocess.run([*of_host, "replace", *neighbour], check=True)
    try:
        found = all_ended([start(host, node, cluster, tmp_path) for node, host in enumerate(cluster)])
    finally:
        subprocess.run([*of_host, "del", cluster[2].address, "dev", "eth0"], check=True)
    ((host, why, mend),) = of(found, "links")
    assert host in ("host1", "host2") and why.count("timed out") == 2 and "open all TCP ports" in mend
    assert found["facts"]["links"] == "4 of 6 ways"
    assert len(found["findings"]) == 1


def switched(cluster: list[Host], node: int, state: str) -> None:
    """Cut the link of a host, or mend it."""
    switch = cluster[node].namespace.rpartition("-")[0] + "-switch"
    subprocess.run(["ip", "-n", switch, "link", "set", f"host{node}", state], check=True)


def test_a_node_that_does_not_come_is_named_on_both_sides(cluster: list[Host], tmp_path: Path) -> None:
    switched(cluster, 2, "down")
    try:
        more = ("--wait", "20")
        processes = [start(host, node, cluster, tmp_path, *more) for node, host in enumerate(cluster)]
        answers = [ended(process) for process in processes]
    finally:
        switched(cluster, 2, "up")
    assert [code for code, _, _ in answers] == [1, 1, 1], answers
    found = json.loads(answers[0][1])
    assert of(found, "nodes") == [("node 2", "did not come in time", "the other nodes, without node 2")]
    lost = json.loads(answers[2][1])
    ((_, why, mend),) = of(lost, "nodes")
    assert "no answer of node 0" in why and "open TCP ports" in mend


def test_a_link_that_is_cut_in_the_middle_ends_all(cluster: list[Host], tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "runs"
    folder.mkdir()
    fakes = [{}, {}, {"pause": str(mark)}]
    started = zip(cluster, fakes, strict=True)
    processes = [start(h, node, cluster, folder, FAKES=repr(f)) for node, (h, f) in enumerate(started)]
    until = time.monotonic() + 300
    while not mark.exists():
        assert time.monotonic() < until, [process.poll() for process in processes]
        time.sleep(0.05)
    switched(cluster, 2, "down")
    try:
        answers = [ended(process) for process in processes]
    finally:
        switched(cluster, 2, "up")
    assert [code for code, _, _ in answers] == [1, 1, 1], answers
    assert of(json.loads(answers[0][1]), "nodes")[0][:2] == ("node 2", "fell silent")
    ((_, why, _),) = of(json.loads(answers[2][1]), "nodes")
    assert "no answer of node 0" in why
