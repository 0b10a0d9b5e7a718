"""Who this process is, from what torchrun, srun or mpirun have set."""

from __future__ import annotations

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.workers.environment import derived_ranks, first_host, read_world, tasks_of_nodes
from meshwise.workers.join import enter_process_group

SBATCH = {"SLURM_JOB_ID": "30017", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = SBATCH | {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}


def derived(environment: dict[str, str]) -> dict[str, str]:
    """What is added to the environment."""
    copy = dict(environment)
    copy |= derived_ranks(copy)
    assert environment.items() <= copy.items()  # nothing that was set is changed
    return {name: value for name, value in copy.items() if name not in environment}


def test_srun_gives_ranks_and_the_first_host() -> None:
    assert derived(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",  # not 8: several hosts do not meet on a loopback interface
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "30017",
    }


def test_two_jobs_on_one_host_meet_on_ports_of_their_own() -> None:
    ports = {derived(SRUN | {"SLURM_JOB_ID": str(job)})["MASTER_PORT"] for job in range(100_000, 100_050)}
    assert len(ports) == 50
    assert all(20000 <= int(port) < 40000 for port in ports)


@pytest.mark.parametrize("tasks", [{}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_without_srun_is_one_process(tasks: dict[str, str]) -> None:
    assert derived(SBATCH | tasks) == {}
    assert read_world(SBATCH | tasks).size == 1


def test_mpirun_gives_ranks() -> None:
    assert derived(MPIRUN) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_pmi_gives_ranks() -> None:
    found = derived(PMI)
    assert (found["RANK"], found["WORLD_SIZE"]) == ("2", "4")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "4")


def test_mpirun_on_several_hosts_asks_where_rank_0_is() -> None:
    several = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match=r"2 of 4 ranks are on this host.*Set MASTER_ADDR to its host"):
        derived(several)
    assert derived(several | {"MASTER_ADDR": "node0"})["RANK"] == "3"
    assert derived(several | {"SLURM_JOB_NODELIST": "gpu[03-04]"})["MASTER_ADDR"] == "gpu03"


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3),10", [1, 2, 2, 2, 10])]
)
def test_slurms_counts_of_tasks_are_read(text: str, counts: list[int]) -> None:
    assert tasks_of_nodes(text) == counts


def test_a_node_with_fewer_tasks_knows_its_own_number() -> None:
    last = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_NODEID": "1"}
    assert derived(last)["LOCAL_WORLD_SIZE"] == "3"


def test_mpirun_inside_a_slurm_job_goes_by_mpirun() -> None:
    found = derived(SBATCH | MPIRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("3", "4", "30017")


def test_what_torchrun_has_set_stays() -> None:
    assert derived(SRUN | {"RANK": "0", "WORLD_SIZE": "2"}) == {}


def test_where_rank_0_listens_may_be_said_beforehand() -> None:
    found = derived(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert not found.keys() & {"MASTER_ADDR", "MASTER_PORT"}


def test_without_a_launcher_nothing_is_set() -> None:
    assert derived({"HOME": "/root"}) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-07,9],big1", "gpu03"),
        ("gpu[9]", "gpu9"),
        ("big1,gpu[03-07]", "big1"),
        ("rack-2-node[001-100]", "rack-2-node001"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "[03-07]", ",gpu1"])
def test_a_node_list_without_a_host_is_told(nodes: str) -> None:
    with pytest.raises(UsageError, match="Set MASTER_ADDR to the host of rank 0"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0, 1, "")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, World(5, 8, 1, 4, "")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MESHWISE_DEVICE": "cpu"}, World(1, 2, 1, 2, "cpu")),
    ],
)
def test_the_world_is_read_from_the_environment(environment: dict[str, str], world: World) -> None:
    assert read_world(environment) == world


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: a rank lies between 0 and 1."),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 with WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "must be whole numbers"),
        ({"LOCAL_RANK": ""}, "must be whole numbers"),
    ],
)
def test_a_world_that_cannot_be_is_told(environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_world(environment)
    assert says in str(caught.value)


@pytest.mark.parametrize("known", ["MASTER_ADDR", "MASTER_PORT", ""])
def test_ranks_without_a_place_to_meet_are_refused(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if known:
        monkeypatch.setenv(known, "29500")
    with pytest.raises(UsageError, match=r"RANK=1 and WORLD_SIZE=2 are set, and MASTER_.* not: "):
        enter_process_group(World(1, 2, 1, 2, "cpu"))
