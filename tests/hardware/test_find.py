"""Devices that a request names become workers; what is not there is told with what is."""

from collections.abc import Callable

import pytest

from meshwise.hardware import find
from meshwise.hardware.find import describe, find_devices
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError

Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host("cuda", 4, cores=8, near={...})`: a machine made of these; `near` gives the cores beside each device."""

    def of(kind: str | None, count: int, cores: int = 8, near: dict[int, tuple[int, ...]] | None = None) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(find, "accelerators", lambda: (kind, count))
        monkeypatch.setattr(find, "allowed_cores", lambda: tuple(range(cores)))
        monkeypatch.setattr(find, "pci_address", lambda device: device.rpartition(":")[2])
        monkeypatch.setattr(find, "cores_near", lambda address, cores: (near or {}).get(int(address), tuple(cores)))

    return of


def test_cpu_workers_share_the_cores(host: Host) -> None:
    host(None, 0, cores=5)
    assert find_devices(parse_devices("2xcpu")) == [
        WorkerSlot("cpu", None, (0, 1), 2),
        WorkerSlot("cpu", None, (2, 3, 4), 3),
    ]


def test_more_cpu_workers_than_cores_are_bound_to_none(host: Host) -> None:
    host(None, 0, cores=2)
    assert find_devices(parse_devices("3xcpu")) == [WorkerSlot("cpu", None, (), 1)] * 3


@pytest.mark.parametrize(("said", "threads"), [("4", 4), ("3,2", 3), ("", 0), ("many", 0), ("0", 0)])
def test_omp_num_threads_wins_and_one_worker_alone_has_torchs_own(
    host: Host, monkeypatch: pytest.MonkeyPatch, said: str, threads: int
) -> None:
    host(None, 0, cores=8)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert [slot.threads for slot in find_devices(parse_devices("1xcpu"))] == [threads]
    assert [slot.threads for slot in find_devices(parse_devices("2xcpu"))] == [threads or 4] * 2


def test_more_threads_than_cores_are_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(None, 0, cores=4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert describe(find_devices(parse_devices("2xcpu"))).endswith(
        "OMP_NUM_THREADS=3: 6 threads on 4 cores slow the workers"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "slows" not in describe(find_devices(parse_devices("2xcpu")))
    assert describe(find_devices(parse_devices("5xcpu"))).endswith("10 threads on 4 cores slow the workers")


def test_all_is_every_accelerator_else_one_cpu_worker(host: Host) -> None:
    host("cuda", 3)
    assert [slot.name for slot in find_devices(parse_devices("all"))] == ["cuda:0", "cuda:1", "cuda:2"]
    host(None, 0)
    assert [slot.name for slot in find_devices(parse_devices("all"))] == ["cpu"]
    host("cuda", 0)  # a driver without devices
    assert [slot.name for slot in find_devices(parse_devices("all"))] == ["cpu"]


def test_indices_are_taken_in_the_order_given(host: Host) -> None:
    host("cuda", 4)
    assert [slot.index for slot in find_devices(parse_devices("cuda:3,1"))] == [3, 1]
    assert [slot.index for slot in find_devices(parse_devices("2xcuda"))] == [0, 1]


def test_devices_on_one_node_share_its_cores_and_leave_the_other_nodes_alone(host: Host) -> None:
    near = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7), 2: (0, 1, 2, 3)}
    host("cuda", 3, near=near)
    assert find_devices(parse_devices("3xcuda")) == [
        WorkerSlot("cuda", 0, (0, 1), 2),
        WorkerSlot("cuda", 1, (4, 5, 6, 7), 4),
        WorkerSlot("cuda", 2, (2, 3), 2),
    ]


@pytest.mark.parametrize(
    ("words", "kind", "present", "says"),
    [
        ("8xcuda", "cuda", 2, "this machine has 2 cuda devices (indices 0 to 1). Use 2xcuda."),
        ("cuda:0,2", "cuda", 2, "this machine has 2 cuda devices (indices 0 to 1)"),
        ("2xcuda", "cuda", 1, "this machine has 1 cuda device (indices 0 to 0). Use 1xcuda."),
        ("cuda", None, 0, "finds no cuda device here. Use 2xcpu, or all."),
        ("cuda:0", None, 0, "--devices cuda:0: torch"),
        ("xpu", "cuda", 2, "finds no xpu device here"),
        ("cuda", "cuda", 0, "finds no cuda device here"),
    ],
)
def test_devices_that_are_not_there_are_told(host: Host, words: str, kind: str | None, present: int, says: str) -> None:
    host(kind, present)
    with pytest.raises(UsageError) as caught:
        find_devices(parse_devices(words))
    assert says in str(caught.value)


def test_the_line_for_the_user_names_devices_cores_and_threads() -> None:
    cpu = [WorkerSlot("cpu", None, (0,), 1), WorkerSlot("cpu", None, (1, 2), 2)]
    assert describe(cpu) == "2 CPU workers: rank 0 on core 0 (1 thread), rank 1 on cores 1-2 (2 threads)"
    assert describe([WorkerSlot("cuda", 3, (), 1)]) == "1 cuda device: rank 0 on cuda:3, no core of its own (1 thread)"


def test_a_long_list_of_workers_stays_one_short_line() -> None:
    line = describe([WorkerSlot("cpu", None, (), 1)] * 64)
    assert line.endswith("and so on to rank 63")
    assert "rank 3 " in line and "rank 4 " not in line
