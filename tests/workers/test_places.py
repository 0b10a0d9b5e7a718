"""Who a process is, from what Slurm, torchrun, mpirun or Kubernetes have set. Of workers/place.py, workers/places/ and
launcher/placing.py.

Variables marked "recorded" are of real processes: Slurm 22.05.8 (of tests/slurm.py), Open MPI 4.1.4 (both of Debian 12)
and torchrun of torch 2.13. Those marked "documented" are written from documentation alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.launcher.placing import check_kind, placed
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.job.options import RunOptions
from meshwise.workers.place import address_of, place_in
from meshwise.workers.places.place import ALONE, Place
from meshwise.workers.places.slurm import host_list, of_slurm, tasks_of_nodes
from meshwise.workers.ports import LISTENING_PORTS, port_of

# Recorded: task 2 of srun -N2 --ntasks-per-node=2.
SRUN = {
    "SLURM_CLUSTER_NAME": "one",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "99",
}
# Not recorded: all four on one node.
ONE_NODE = SRUN | {"SLURM_GTIDS": "0,1,2,3", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
# Recorded: a batch script of two nodes, two tasks on each.
BATCH = {
    "SLURM_CLUSTER_NAME": "one",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "146",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# Recorded: the batch script of a job of one node and one task, sent from inside a step of two nodes.
LEAKED = BATCH | {
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASK_PID": "213",
}
# Recorded: what Slurm 24.11.5 (Debian 13) sets beside the variables above, whose values it leaves as they are.
SLURM_24_11 = {
    "SLURMD_DEBUG": "2",
    "SLURM_JOB_END_TIME": "1796098551",
    "SLURM_JOB_GROUP": "root",
    "SLURM_JOB_START_TIME": "1796098371",
    "SLURM_OOM_KILL_STEP": "0",
    "SLURM_TRES_PER_TASK": "cpu=2",
}
# Recorded: task 0 of srun -n3 -m arbitrary with the hosts n2, n1, n2.
ARBITRARY = SRUN | {
    "SLURM_GTIDS": "0,2",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
}
# Recorded: rank 3 of mpirun on two nodes of Slurm, whose step is that of mpirun's daemons.
MPIRUN_IN_SLURM = SRUN | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "3150315521",
    "SLURM_GTIDS": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# Recorded: task 1 of srun --mpi=pmi2 -N2 -n3.
PMI2 = SRUN | {
    "PMI_JOBID": "4.0",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
    "SLURM_GTIDS": "0,1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
# Recorded: torchrun --nproc-per-node 2.
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "45879",
    "RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "d9d04502-45ab-48d9-8cae-931fd152b516",
    "WORLD_SIZE": "2",
}
# Documented: a Hydra of MPICH or Intel MPI, a worker's pod of a PyTorchJob, a pod of an Indexed Job with what `meshwise
# submit` sets beside it, and a node of a TrainJob of Kubeflow Trainer.
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "29500",
    "NNODES": "2",
}
TRAINJOB = {
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
}


def who(environment: dict[str, str]) -> tuple[str, int, int, int, int, int, int]:
    place = place_in(environment)
    numbers = place.rank, place.size, place.node, place.nodes, place.local_rank, place.tasks_here
    return (place.launcher, *numbers)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SRUN, ("Slurm", 2, 4, 1, 2, 0, 2)),
        (BATCH, ("Slurm", 0, 1, 0, 1, 0, 1)),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, ("Slurm", 0, 1, 0, 1, 0, 1)),
        (SRUN | SLURM_24_11, ("Slurm", 2, 4, 1, 2, 0, 2)),
        (LEAKED | SLURM_24_11, ("Slurm", 0, 1, 0, 1, 0, 1)),
        (ARBITRARY, ("Slurm", 1, 3, 1, 2, 0, 2)),  # not rank 0, whatever its SLURM_PROCID: the first host is n1
        (MPIRUN_IN_SLURM, ("Open MPI", 3, 4, 1, 2, 1, 2)),
        (PMI2, ("Slurm", 1, 3, 0, 2, 1, 2)),
        (TORCHRUN, ("torchrun", 1, 2, 0, 1, 1, 2)),
        (SRUN | TORCHRUN, ("torchrun", 1, 2, 0, 1, 1, 2)),
        (HYDRA, ("mpirun", 2, 4, 0, 1, 2, 4)),
        (POD, ("PyTorchJob", 1, 2, 1, 2, 0, 1)),
        (POD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ("", 1, 2, 0, 1, 1, 2)),
        (POD | {"MASTER_ADDR": "127.0.0.1"}, ("", 1, 2, 0, 1, 1, 2)),  # processes that a pod starts by hand
        (INDEXED, ("Kubernetes", 1, 2, 1, 2, 0, 1)),
        (INDEXED | {"NNODES": "1", "JOB_COMPLETION_INDEX": "0"}, ("", 0, 1, 0, 1, 0, 1)),
        ({"JOB_COMPLETION_INDEX": "1"}, ("", 0, 1, 0, 1, 0, 1)),  # one of many jobs of one pod each
        (TRAINJOB, ("Kubernetes", 1, 2, 1, 2, 0, 1)),
        (TRAINJOB | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, ("", 0, 1, 0, 1, 0, 1)),
        (TRAINJOB | TORCHRUN, ("torchrun", 1, 2, 0, 1, 1, 2)),
        (TRAINJOB | {"RANK": "1", "WORLD_SIZE": "2"}, ("PyTorchJob", 1, 2, 1, 2, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("", 1, 2, 0, 1, 1, 2)),
        (SRUN | {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, ("Slurm", 2, 4, 1, 2, 0, 2)),
        ({"HOME": "/root"}, ("", 0, 1, 0, 1, 0, 1)),
    ],
)
def test_a_process_knows_its_place(environment: dict[str, str], expected: tuple[str, int]) -> None:
    assert who(environment) == expected


def test_a_place_has_what_torchrun_would_set() -> None:
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert place_in(SRUN).variables() == expected
    where = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert place_in(SRUN | where).variables() == expected | where
    assert place_in(BATCH).variables() == {}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (TORCHRUN, ("localhost", 45879)),
        (POD, ("train-master-0", 23456)),
        (INDEXED, ("train-0.train", 29500)),
        (TRAINJOB, ("train-node-0-0.train", 29400)),
        (SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, ("10.0.0.1", 1234)),
        (SRUN, ("n1", port_of("slurm-one-1.0.1"))),
        (ONE_NODE, ("127.0.0.1", port_of("slurm-one-1.0.1"))),
        (MPIRUN_IN_SLURM, ("n1", port_of("mpi-3150315521"))),
        (HYDRA, ("127.0.0.1", port_of(f"mpi-{os.getppid()}"))),
    ],
)
def test_all_processes_of_a_start_know_where_they_meet(environment: dict[str, str], address: tuple[str, int]) -> None:
    assert address_of(place_in(environment)) == address


def test_starts_meet_at_ports_of_their_own_which_no_connection_takes() -> None:
    ports = {port_of(f"slurm-one-{job}.0.1") for job in range(100)}
    assert len(ports) > 90 and ports <= set(LISTENING_PORTS)


@pytest.mark.parametrize(
    "environment",
    [
        {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},  # on two machines
        {name: value for name, value in INDEXED.items() if not name.startswith("MASTER")},
    ],
)
def test_without_anything_in_common_it_is_said_what_to_set(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"does not say where rank 0 of \d is. Set MASTER_ADDR to its host and"):
        address_of(place_in(environment))


def test_steps_and_attempts_of_a_job_have_keys_of_their_own() -> None:
    others = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "9"}]
    assert len({place_in(SRUN | other).key for other in others}) == len(others)


@pytest.mark.parametrize(
    ("group", "inside"),
    [
        ("0::/system.slice/slurmstepd.scope/job_4/step_batch/user/task_0", False),
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_0", True),
        ("1:freezer:/slurm/uid_0/job_4/step_0", True),
        ("0::/", False),  # nothing is to be seen: the variables of the step are not this job's
    ],
)
def test_a_batch_script_that_inherits_a_step_is_one_process(group: str, inside: bool, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(group)
    place = of_slurm(LEAKED, proc=tmp_path)
    assert place is not None and (place.size == 2) == inside


def test_a_step_is_believed_where_the_system_shows_nothing(tmp_path: Path) -> None:
    found = [of_slurm(each, proc=tmp_path) for each in (SRUN, ARBITRARY, PMI2, LEAKED)]
    assert [place.size for place in found if place] == [4, 3, 3, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE lists 2 nodes"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID=x. The launcher must set SLURM_LOCALID to a whole number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2*2"}, "'2*2' is not a Slurm count of tasks"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "'n[1-' is not a Slurm list of hosts"),
    ],
)
def test_variables_that_cannot_be_are_refused(change: dict[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("/job_1/step_0/")
    with pytest.raises(UsageError) as caught:
        of_slurm(SRUN | change, proc=tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (INDEXED | {"NNODES": "two"}, "NNODES=two. The launcher must set NNODES to a whole number"),
        (INDEXED | {"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2, but NNODES=2"),
        (INDEXED | {"MASTER_PORT": "x"}, "MASTER_PORT=x. The launcher must set"),
        (TRAINJOB | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1, but PET_NNODES=2"),
        (TRAINJOB | {"PET_MASTER_PORT": ""}, "PET_MASTER_PORT=. The launcher must set"),
        (SRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "x"}, "MASTER_PORT=x. The launcher must set"),
        (POD | {"MASTER_PORT": "x"}, "MASTER_PORT=x. The launcher must set"),
    ],
)
def test_numbers_that_cannot_be_are_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        place_in(environment)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "devices", "told"),
    [
        (SRUN, 4, "Slurm job 1, 2 nodes × 2 devices, attempt 1"),
        (SRUN | {"SLURM_RESTART_COUNT": "1"}, 4, "Slurm job 1, 2 nodes × 2 devices, attempt 2"),
        (SRUN | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, 4, "Slurm job 7_3, 2 nodes × 2 devices"),
        (ARBITRARY, 3, "Slurm job 1, 2 nodes, 3 devices, attempt 1"),
        (BATCH, 2, "1 node × 2 devices, attempt 1, 1 more nodes are idle: start the run with srun --ntasks-per-node=1"),
        (TORCHRUN, 2, "torchrun, 1 node × 2 devices, attempt 1"),
        (MPIRUN_IN_SLURM, 4, "Open MPI, 2 nodes × 2 devices"),
        (POD, 8, "PyTorchJob, 2 nodes × 4 devices"),
        (INDEXED, 8, "Kubernetes, 2 nodes × 4 devices"),
        (INDEXED | {"JOB_NAME": "train"}, 8, "Kubernetes job train, 2 nodes × 4 devices"),
    ],
)
def test_the_first_line_says_who_launched_whom(environment: dict[str, str], devices: int, told: str) -> None:
    assert told in place_in(environment).told(devices)


def test_without_a_launcher_nothing_is_said() -> None:
    assert (ALONE.told(2), place_in({"RANK": "0", "WORLD_SIZE": "2"}).told(2)) == ("", "")


# What ClusterShell 1.10.1 expands them to (its nodes sorted, here in Slurm's order).
LISTS = [
    ("gpu03", ["gpu03"]),
    ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
    ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
    ("n[09-11]", ["n09", "n10", "n11"]),
    ("n[2,1]", ["n2", "n1"]),
    ("n[1-2],n[5-6],m", ["n1", "n2", "n5", "n6", "m"]),
    ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
    ("tux[1-2]-ib,a,b[3]", ["tux1-ib", "tux2-ib", "a", "b3"]),
    ("node-a[1-2].x.org", ["node-a1.x.org", "node-a2.x.org"]),
    ("10.0.0.1", ["10.0.0.1"]),
]


@pytest.mark.parametrize(("text", "hosts"), LISTS)
def test_a_list_of_hosts_is_expanded_whole(text: str, hosts: list[str]) -> None:
    assert list(host_list(text)) == hosts


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="`scontrol` is not installed (package slurm-client)")
@pytest.mark.parametrize("text", [text for text, _ in LISTS if "]-" not in text and "]." not in text])
def test_slurm_expands_a_list_of_hosts_to_the_same(text: str, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=x\nNodeName=n1\nPartitionName=a Nodes=n1\n")
    command, variables = ["scontrol", "show", "hostnames", text], {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    shown = subprocess.run(command, env=variables | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert shown.stdout.split() == list(host_list(text))


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n[]", ",n1", "n1,", "n[2-1]", "n[a-b]", "n[1-2", "n1 n2", "n[[1]]", "n[1,]"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a Slurm list of hosts"):
        host_list(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("4(x2)", (4, 4)), ("4(x2),3", (4, 4, 3)), ("1,2(x3),10", (1, 2, 2, 2, 10))]
)
def test_slurms_counts_of_tasks_are_read(text: str, counts: tuple[int, ...]) -> None:
    assert tasks_of_nodes(text) == counts


# ---- A rank itself, or the launcher of its machine: launcher/placing.py
# ---------------------------------------------------

ONE_A_NODE = SRUN | {"SLURM_GTIDS": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
ONE_A_NODE |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "words", "joins"),
    [
        (SRUN, {}, True),
        (SRUN, {"devices": "1xcpu"}, True),
        (SRUN, {"devices": "2xcpu"}, True),
        (SRUN, {"nnodes": 2, "node_rank": 1, "master_addr": "n1"}, True),
        (ONE_A_NODE, {"devices": "1xcpu"}, True),
        (ONE_A_NODE, {"devices": "2xcpu"}, False),
        (POD, {"devices": "2xcpu"}, False),
        (INDEXED, {"devices": "1xcpu"}, True),
        (INDEXED, {"devices": "1xcpu", "folder": Path("run")}, False),
        (INDEXED, {"devices": "2xcpu"}, False),
        (BATCH, {"devices": "2xcpu"}, False),
        (TORCHRUN, {}, True),
    ],
)
def test_one_task_a_machine_with_more_devices_launches_there(
    environment: dict[str, str], words: dict[str, object], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWISE_DEVICE", "cpu")  # not that of this process
    options, joined = placed(RunOptions("mlp", **words), environment)  # type: ignore[arg-type]
    assert joined == joins
    if place_in(environment).one_a_node and not joins:
        assert (options.nnodes, options.node_rank) == (2, 1)
        assert options.address == (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def test_launchers_meet_where_the_options_say_and_beside_the_store_of_torchruns_agents() -> None:
    agents = TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    options = RunOptions("mlp", devices="2xcpu")
    assert placed(options, agents)[0].address == ("localhost", port_of(place_in(agents).key))
    assert placed(replace(options, rdzv_endpoint="n1:7"), ONE_A_NODE)[0].address == ("n1", 7)


@pytest.mark.parametrize(
    ("environment", "words", "says"),
    [
        (ONE_A_NODE, {"nnodes": 3}, "--nnodes 3 --node-rank 0, but this is machine"),
        (ONE_A_NODE, {"nnodes": 3, "node_rank": 2}, "--nnodes 3 --node-rank 2, but this is machine"),
        (
            SRUN | {"SLURM_NODEID": "0"},
            {"nnodes": 2, "node_rank": 1},
            "--nnodes 2 --node-rank 1, but this is machine 0 of 2, as Slurm says",
        ),
        (
            SRUN,
            {"devices": "4xcpu"},
            "--devices 4xcpu, but Slurm started 2 tasks on this machine, 4 in all",
        ),
        (TORCHRUN, {"devices": "4xcpu"}, "--devices 4xcpu, but torchrun started 2 tasks on this"),
        (TORCHRUN, {"devices": "cuda:2,3"}, "and choose devices by CUDA_VISIBLE_DEVICES."),
        (TORCHRUN, {"devices": "cuda:1"}, "--devices cuda:1, but torchrun started 2 tasks on this machine, 2 in all"),
    ],
)
def test_options_that_contradict_the_launcher_are_refused(
    environment: dict[str, str], words: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        placed(RunOptions("mlp", **words), environment)  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize(("devices", "device"), [("2xcuda", "cpu"), ("cuda", "cpu"), ("2xcpu", "cuda:1")])
def test_a_rank_without_a_device_of_the_kind_that_was_asked_for_is_refused(devices: str, device: str) -> None:
    """It trained on what there was, in silence."""
    for fits in (None, "all", f"2x{device.split(':')[0]}"):
        check_kind(fits, World(1, 2, 1, 2, device))
    with pytest.raises(UsageError, match=f"--devices {devices}: rank 1 runs on {device} here. Start the run where"):
        check_kind(devices, World(1, 2, 1, 2, device))


@pytest.mark.parametrize(("devices", "kind"), [("2xcpu", "cpu"), ("2xcuda", None), ("cuda:0,1", None), (None, None)])
def test_a_rank_takes_an_accelerator_unless_cpu_workers_are_asked_for(
    devices: str | None, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWISE_DEVICE", "none yet")
    monkeypatch.delenv("MESHWISE_DEVICE")
    _, joined = placed(RunOptions("mlp", devices=devices), SRUN)
    assert joined and os.environ.get("MESHWISE_DEVICE") == kind


def test_a_step_of_which_half_is_known_is_refused_and_one_process_needs_no_list() -> None:
    with pytest.raises(UsageError, match="is set without SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NODELIST"):
        place_in(BATCH | {"SLURM_STEP_NUM_TASKS": "2"})
    assert place_in(BATCH | {"SLURM_JOB_NODELIST": "n[1-"}).size == 1


def test_a_place_is_a_value() -> None:
    assert Place("Slurm", job="1") == Place("Slurm", job="1") != ALONE
