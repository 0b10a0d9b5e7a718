"""`meshwise doctor`: what it looks at here, and its verdict on nodes.

Of launcher/doctor.py, launcher/node_verdict.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher import doctor
from meshwise.launcher.commands.doctor import DoctorOptions
from meshwise.launcher.node_verdict import judge
from meshwise.spec.errors import UsageError
from meshwise.workers.place import place_in
from meshwise.workers.places.place import ALONE, Place

SHARED = Finding("/dev/shm", "64.0 MiB", "data loaders and NCCL need more", "docker run --shm-size=8g")
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_LOCALID": "0",
}


# ---- This machine ----------------------------------------------------------------------------------------------------


def test_a_full_or_locked_disk_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, found = doctor.disk_of(tmp_path)
    assert words.startswith(f"{tmp_path}: ") and words.endswith(" free") and found == []
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    monkeypatch.setattr(doctor, "LEAST_FREE", 2**80)
    full, locked = doctor.disk_of(tmp_path)[1]
    assert (full.why, locked.figure) == ("states of a run may not fit", str(tmp_path))
    assert all(each.what == "disk" and each.mend.startswith("--out FOLDER") for each in (full, locked))


def test_torch_and_gloo_are_asked_where_they_listen() -> None:
    store, gloo = doctor.listening()
    assert store == "every interface" and gloo


# ---- The place of a node ---------------------------------------------------------------------------------------------


def test_nodes_of_a_step_meet_at_one_port_that_is_not_the_runs() -> None:
    places = [place_in({**STEP, "SLURM_NODEID": str(node)}) for node in range(3)]
    found = [DoctorOptions(nodes=True).seat(place) for place in places]
    assert [(each.node, each.nodes) for each in found if each] == [(node, 3) for node in range(3)]
    assert len({(each.address, each.key) for each in found if each}) == 1
    assert found[0] is not None and found[0].address is not None
    host, port = found[0].address
    assert host == "gpu01" and 20000 <= port < 32768


def test_by_hand_a_node_is_told_where_node_0_is() -> None:
    place = DoctorOptions(nnodes=2, node_rank=1, master_addr="n0", master_port=29501).seat(ALONE)
    assert place is not None and (place.node, place.nodes, place.address) == (1, 2, ("n0", 29501))
    assert DoctorOptions().seat(ALONE) is None


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({"nodes": True}, {}, "found 1 task on 1 node. Start it on each node: srun --ntasks-per-node=1"),
        ({"nodes": True}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, "1 task on 1 node"),
        (
            {"nodes": True},
            {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_NODEID": "0"},
            "found 6 tasks on 3 nodes",
        ),
        ({"nnodes": 2}, {}, "--master-addr is missing"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "n0"}, {}, "--node-rank must be from 0 to 1"),
    ],
)
def test_a_node_without_a_place_is_refused(options: dict[str, Any], environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DoctorOptions(**options).seat(place_in(environment))


# ---- The verdict on nodes --------------------------------------------------------------------------------------------

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
SEAT = Place("Slurm", size=4, nodes=4, hosts=HOSTS)


def reports_of(**changed: Any) -> dict[int, dict[str, Any]]:
    """What four nodes tell that are alike. changed: `ahead` seconds of each clock, `shut` ways, or a key of a report
    with its value on node 2."""
    ahead, shut = changed.pop("ahead", [0.0] * 4), changed.pop("shut", ())
    return {
        node: {
            "name": HOSTS[node],
            "folder": "/shared/runs",
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "files": {"meshwise": "aa", "train.py": "bb"},
            "findings": [],
            "shared": True,
            "reached": {
                str(other): {"error": "timed out"} if (node, other) in shut else {"ahead": ahead[other] - ahead[node]}
                for other in range(4)
                if other != node
            },
        }
        | (changed if node == 2 else {})
        for node in range(4)
    }


def findings_of(came: int = 4, **changed: Any) -> list[tuple[str, str, str, str]]:
    _, found = judge(SEAT, reports_of(**changed), range(came))
    return [(each.what, each.figure, each.why, each.mend) for each in found]


def test_nodes_that_are_alike_are_one_line_each() -> None:
    facts, found = judge(SEAT, reports_of(), range(4))
    assert found == []
    assert facts == {
        "nodes": "4 of 4: gpu01, gpu02, gpu03, gpu04",
        "links": "12 of 12 ways",
        "clocks": "within 0 s",
        "folder": "/shared/runs, seen by 4 of 4",
        "versions": "2 compared, alike on 4 of 4 nodes",
        "files": "2 compared, alike on 4 of 4 nodes",
    }


def test_a_node_cut_off_from_all_is_named_once() -> None:
    shut = [(node, 2) for node in (0, 1, 3)] + [(2, node) for node in (0, 1, 3)]
    ((what, figure, why, mend),) = findings_of(shut=shut)
    assert (what, figure) == ("links", "gpu03")
    assert why.startswith("no connection gpu01 → gpu03 (timed out), ") and why.endswith("and 3 more")
    assert mend.startswith("#SBATCH --exclude=gpu03, or open all TCP ports")


def test_a_clock_is_compared_with_most_of_them_on_whatever_node() -> None:
    assert findings_of(ahead=[0.0, 0.0, -40.0, 0.0]) == [
        ("clocks", "gpu03", "40.0 s behind the others", "chronyc makestep on gpu03")
    ]
    assert findings_of(ahead=[90.0, 0.0, 0.0, 0.0])[0][:3] == ("clocks", "gpu01", "1 min 30 s ahead of the others")
    assert findings_of(ahead=[0.0, 0.3, 0.0, 0.0]) == []


@pytest.mark.parametrize(
    ("changed", "what", "why", "mend"),
    [
        ({"shared": False}, "folder", "/shared/runs is not the folder of gpu01", "--out FOLDER"),
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.1"}},
            "versions",
            "torch 2.12.1, not 2.13.0",
            "pip install torch==2.13.0",
        ),
        (
            {"versions": {"python": "3.12.1", "torch": "2.13.0"}},
            "versions",
            "python 3.12.1",
            "a folder that all nodes share",
        ),
        ({"versions": {"python": "3.11.7"}}, "versions", "torch none, not 2.13.0", "pip install torch==2.13.0"),
        ({"files": {"meshwise": "aa", "train.py": "cc"}}, "files", "train.py: not as on", "share"),
        ({"files": {"meshwise": "aa", "train.py": "bb", "new.py": "d"}}, "files", "new.py: not as on", "share"),
    ],
)
def test_a_node_that_differs_is_named_with_its_figure(changed: dict[str, Any], what: str, why: str, mend: str) -> None:
    ((told, figure, said, mends),) = findings_of(**changed)
    assert (told, figure) == (what, "gpu03") and why in said and mend in mends


def test_what_nodes_find_on_themselves_is_joined() -> None:
    reports = reports_of()
    for node in (1, 3):
        reports[node]["findings"] = [list(vars(SHARED).values())]
    _, (found,) = judge(SEAT, reports, range(4))
    assert (found.what, found.figure, found.mend) == ("/dev/shm", "gpu02, gpu04", SHARED.mend)
    assert found.why == f"64.0 MiB: {SHARED.why}"


def test_nodes_that_do_not_come_and_that_fall_silent_are_told_apart() -> None:
    reports = reports_of()
    del reports[2], reports[3]
    found = [each for each in judge(SEAT, reports, [0, 1, 2])[1] if each.what == "nodes"]
    assert [(each.figure, each.why) for each in found] == [
        ("gpu03", "fell silent"),
        ("gpu04", "did not come in time"),
    ]


def test_names_from_other_nodes_cannot_write_to_the_terminal() -> None:
    reports = reports_of(name="gpu03\x1b[2J", versions={"python": "\x1b]0;x\x07", "torch": "2.13.0"})
    facts, found = judge(SEAT, reports, range(4))
    assert "\x1b" not in repr([facts, found]).encode().decode("unicode_escape")
