"""`meshwise doctor --nodes`: each fault is named with its node, its figure and the line that mends it.

By reports, and on three hosts, which are network namespaces of this machine. Clocks and versions are faked inside a
process. Of launcher/nodes.py.
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

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher.commands.doctor import DoctorOptions
from meshwise.launcher.nodes import judge
from meshwise.spec.errors import UsageError
from meshwise.workers.place import place_in
from meshwise.workers.places.place import ALONE, Place
from tests.hosts import Host, hosts, why_not

COUNT, PORT = 3, 29477
STEP = {  # as a task of a step on three nodes has them
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "10.77.0.[1-3]",
    "SLURM_LOCALID": "0",
}
SHARED = Finding("/dev/shm", "64.0 MiB", "data loaders and NCCL need more", "docker run --shm-size=8g")

# ---- The place of a node ---------------------------------------------------------------------------------------------


def test_nodes_of_a_step_meet_at_one_port_that_is_not_the_runs() -> None:
    places = [place_in({**STEP, "SLURM_NODEID": str(node)}) for node in range(COUNT)]
    found = [DoctorOptions(nodes=True).seat(place) for place in places]
    assert [(each.node, each.nodes) for each in found if each] == [(node, 3) for node in range(COUNT)]
    ((host, port),) = {each.address for each in found if each and each.address}
    assert host == "10.77.0.1" and 20000 <= port < 32768


def test_by_hand_a_node_is_told_where_node_0_is() -> None:
    place = DoctorOptions(nnodes=2, node_rank=1, master_addr="n0", master_port=29501).seat(ALONE)
    assert place is not None and (place.node, place.nodes, place.address) == (1, 2, ("n0", 29501))
    assert DoctorOptions().seat(ALONE) is None


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({"nodes": True}, {}, "found 1 task on 1 node. Start it on each node: srun --ntasks-per-node=1"),
        ({"nodes": True}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, "1 task on 1 node"),
        ({"nnodes": 2}, {}, "--master-addr is missing"),
    ],
)
def test_a_node_without_a_place_is_refused(options: dict[str, Any], environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DoctorOptions(**options).seat(place_in(environment))


# ---- The verdict on nodes --------------------------------------------------------------------------------------------

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
ALIKE = {"python": "3.11.7", "torch": "2.13.0", "train.py": "bb"}


def found_on(node: int = 2, ahead: Sequence[float | None] = (0.0,) * 4, **changed: Any) -> list[tuple[str, ...]]:
    """What is found on four nodes of Slurm that are alike, but for what is `changed` in the report of one. ahead: the
    seconds of each clock, or None of one that is cut off."""
    reports = [
        {"name": name, "folder": "/shared/runs", "findings": [], "alike": ALIKE, "seen": True}
        | {"ahead": [None if None in (own, other) else other - own for other in ahead]}  # type: ignore[operator]
        for name, own in zip(HOSTS, ahead, strict=True)
    ]
    reports[node] |= changed
    _, found = judge(Place("Slurm", size=4, nodes=4, hosts=HOSTS), reports)
    return [(each.what, each.figure, each.why, each.mend) for each in found]


def test_nodes_that_are_alike_have_nothing_to_say() -> None:
    assert found_on() == []


def test_a_node_cut_off_from_all_is_named_once() -> None:
    ((what, figure, why, mend),) = found_on(ahead=(0.0, 0.0, None, 0.0))
    assert (what, figure) == ("links", "gpu03")
    assert why.startswith("no connection gpu01 → gpu03, ") and why.endswith("and 3 more")
    assert mend.startswith("#SBATCH --exclude=gpu03, or open all TCP ports")


def test_a_clock_is_compared_with_most_of_them_on_whatever_node() -> None:
    clock = ("clocks", "gpu03", "40.0 s behind the others", "chronyc makestep on gpu03")
    assert found_on(ahead=(0.0, 0.0, -40.0, 0.0)) == [clock]
    assert found_on(ahead=(90.0, 0.0, 0.0, 0.0))[0][:3] == ("clocks", "gpu01", "1 min 30 s ahead of the others")
    assert found_on(ahead=(0.0, 0.3, 0.0, 0.0)) == []


@pytest.mark.parametrize(
    ("changed", "what", "why", "mend"),
    [
        ({"seen": False}, "folder", "/shared/runs is not the folder of gpu01", "--out FOLDER"),
        ({"alike": ALIKE | {"torch": "2.12.1"}}, "alike", "torch 2.12.1, not 2.13.0", "environment on all nodes"),
        ({"alike": ALIKE | {"train.py": "cc"}}, "alike", "train.py cc, not bb", "the same folder"),
        ({"alike": ALIKE | {"new.py": "d"}}, "alike", "new.py d, not none", "the same folder"),
        ({"findings": [list(vars(SHARED).values())]}, "/dev/shm", f"64.0 MiB: {SHARED.why}", SHARED.mend),
        ({"alike": ALIKE | {"torch": "\x1b[2J"}}, "alike", "torch , not 2.13.0", ""),
    ],
)
def test_a_node_that_differs_is_named_with_its_figure(changed: dict[str, Any], what: str, why: str, mend: str) -> None:
    ((told, figure, said, mends),) = found_on(**changed)
    assert (told, figure) == (what, "gpu03") and why in said and mend in mends


# ---- On three hosts --------------------------------------------------------------------------------------------------

on_hosts = pytest.mark.skipif(why_not() is not None, reason=f"no hosts: {why_not()}")
FAKED = """
import importlib.metadata as metadata, os, time
version, real = metadata.version, time.time_ns
fakes = eval(os.environ.get("FAKES", "{}"))
metadata.version = lambda name: fakes.get(name) or version(name)
time.time_ns = lambda: real() + fakes.get("ahead", 0) * 10**9
if mark := fakes.get("pause"):  # connections take long: time for a test to cut the link
    from meshwise.launcher import nodes
    ahead = nodes._ahead
    def late(at):
        open(mark, "w").close()
        time.sleep(3)
        return ahead(at)
    nodes._ahead = late
from meshwise.cli import main
main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Host]]:
    with hosts(COUNT, None) as made:
        yield made


def start(host: Host, node: int, cluster: Sequence[Host], folder: Path, *more: str, **env: str) -> Any:
    """The doctor on one host. folder: what it takes for the run folder."""
    by_hand = ["--nnodes", str(COUNT), "--node-rank", str(node), "--master-addr", cluster[0].address]
    by_hand += ["--master-port", str(PORT)]
    words = ["doctor", *(["--nodes"] if "SLURM_JOB_ID" in env else by_hand)]
    command = [sys.executable, "-c", FAKED, *words, "--wait", "120", "--out", str(folder), "--json", *more]
    return host.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(processes: Sequence[Any]) -> list[dict[str, Any]]:
    """What each node printed, once all have ended with the same exit code."""
    answers = [process.communicate(timeout=300) for process in processes]
    assert len({process.returncode for process in processes}) == 1, answers
    return [json.loads(out) if out else {} for out, _ in answers]


def of(found: dict[str, Any], what: str) -> list[tuple[str, str]]:
    """What was found of one kind: host and why."""
    own = [each for each in found["findings"] if each["what"] == what]
    return [(each["figure"].rpartition("-")[2], each["why"]) for each in own]


@on_hosts
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("step", [{}, STEP], ids=["by hand", "in a step"])
def test_healthy_nodes_have_no_finding(step: dict[str, str], cluster: list[Host], tmp_path: Path) -> None:
    places = [step and {**step, "SLURM_NODEID": str(node)} for node in range(COUNT)]
    found, *_ = ended([start(host, n, cluster, tmp_path, **places[n]) for n, host in enumerate(cluster)])
    assert found["findings"] == [] and found["facts"]["links"] == "6 of 6 ways"
    assert list(tmp_path.iterdir()) == []


@on_hosts
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_each_fault_is_named_with_its_node(cluster: list[Host], tmp_path: Path) -> None:
    """Host 1 has another program and its clock ahead, host 2 another numpy, another folder, and no way to host 1."""
    fakes: list[dict[str, Any]] = [{}, {"ahead": 37}, {"numpy": "1.26.0"}]
    processes = []
    neighbour = (cluster[2].address, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
    of_host = ("ip", "-n", cluster[1].namespace, "neigh")
    subprocess.run([*of_host, "replace", *neighbour], check=True)
    try:
        for node, host in enumerate(cluster):
            program, folder = tmp_path / f"code{node}" / "train.py", tmp_path / ("own" if node == 2 else "shared")
            program.parent.mkdir()
            program.write_text("lr = 0.1\n" if node != 1 else "lr = 0.2\n")
            folder.mkdir(exist_ok=True)
            processes.append(start(host, node, cluster, folder, str(program), FAKES=repr(fakes[node])))
        found, *_ = ended(processes)
    finally:
        subprocess.run([*of_host, "del", cluster[2].address, "dev", "eth0"], check=True)
    assert of(found, "clocks") == [("host1", "37.0 s ahead of the others")]
    assert [(host, why[:8]) for host, why in of(found, "alike")] == [("host1", "train.py"), ("host2", "numpy 1.")]
    assert [host for host, _ in of(found, "folder")] == ["host2"]
    ((host, why),) = of(found, "links")
    assert host in ("host1", "host2") and why.count("→") == 2
    assert len(found["findings"]) == 5


@on_hosts
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("late", [False, True], ids=["does not come", "is cut off in the middle"])
def test_a_node_that_is_lost_is_named_on_both_sides(late: bool, cluster: list[Host], tmp_path: Path) -> None:
    def link(state: str) -> None:
        switch = cluster[2].namespace.rpartition("-")[0] + "-switch"
        subprocess.run(["ip", "-n", switch, "link", "set", "host2", state], check=True)

    mark, folder = tmp_path / "mark", tmp_path / "runs"
    folder.mkdir()
    fakes, more = {"pause": str(mark)} if late else {}, () if late else ("--wait", "20")
    link("up" if late else "down")
    try:
        started = zip(cluster, ({}, {}, fakes), strict=True)
        processes = [start(host, n, cluster, folder, *more, FAKES=repr(f)) for n, (host, f) in enumerate(started)]
        until = time.monotonic() + 300
        while late and not mark.exists():
            assert time.monotonic() < until, [process.poll() for process in processes]
            time.sleep(0.05)
        link("down")
        found, _, lost = ended(processes)
    finally:
        link("up")
    ((_, why),) = of(found, "nodes")
    assert "machine 2 of 3" in why and ("is lost" if late else "did not come in 20.0 s") in why
    ((_, why),) = of(lost, "nodes")
    assert "machine 0" in why or "machine 0 " in why
