"""What several pods do with what was printed: each template is executed under a stand-in for the controllers, which
follows the rules that are documented (tests/controllers.py). No controller was run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from meshwise.launcher.engines.kubernetes import JOB, JOB_SET, TRAIN_JOB, PodJob
from meshwise.launcher.engines.manifest import manifest
from meshwise.launcher.engines.site import Site
from meshwise.records import folder as names
from meshwise.records.files import read_lines
from tests.controllers import Cluster, cluster
from tests.faults.test_restarts import JOB as PROGRAM
from tests.faults.test_restarts import final, trained
from tests.hosts import why_not
from tests.kubernetes import faults, read

pytestmark = [pytest.mark.slow, pytest.mark.workers, pytest.mark.usefixtures("processes")]
KINDS = (JOB, JOB_SET, TRAIN_JOB)
SOURCES = Path(__file__).parents[3] / "src"
SLOWLY = ("--save-every", "4", "--log-every", "1", "--fault", "slow 300ms:rank=0,step=3", f"{PROGRAM}:job")
Apply = Callable[..., Cluster]


@pytest.fixture
def apply(tmp_path: Path) -> Iterator[Apply]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:

        def applied(kind: str, *words: str, grace: int = 60, nodes: int = 3) -> Cluster:
            site = Site(image="this-machine", claim="data", mount=str(tmp_path), shared_memory="256Mi")
            job = PodJob(
                name="small-20261201-120000",
                kind=kind,
                nodes=nodes,
                workdir=str(tmp_path),
                folder=str(tmp_path / "run"),
                words=["--devices", "1xcpu", *words],
                gpus=0,
                command=[sys.executable, "-m", "meshwise"],
                site=site,
                grace=grace,
                why="a guess",
            )
            things = read(manifest(job))
            assert faults(things) == []
            variables = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            return stack.enter_context(cluster(things, tmp_path, variables))

        yield applied


def same_as_undisturbed(folder: Path) -> bool:
    """Whether a run has the weights of one that was never disturbed, bit for bit, and each step once."""
    _, whole = trained(folder / "whole", "--save-every", "4", devices="3xcpu")
    steps = [line["step"] for line in read_lines(folder / "run" / names.METRICS) if "loss" in line]
    return final(folder / "run") == final(whole) and steps == list(range(1, 21))


def statuses(folder: Path) -> list[Any]:
    return [each.get("status") for each in names.read_run(folder / "run")["sessions"]]


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_is_killed_and_all_begin_again(kind: str, index: int, apply: Apply, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step 10/")
    one.pods[index].kill()
    assert one.ended() == "Complete", one.shown
    assert same_as_undisturbed(tmp_path) and statuses(tmp_path)[-1] == "finished"
    codes = [pod.code for pod in one.every]
    assert set(codes) <= {0, 85, 137} and codes.count(137) == 1 and codes.count(0) == 3, one.shown
    if kind == JOB:
        assert one.job.counted == {index: 1}
    else:
        assert one.restarts <= 1 and len(one.every) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_drained_save_and_go_on(kind: str, apply: Apply, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step  6/")
    first = list(one.pods.values())
    for pod in first:
        pod.disrupted = True
        pod.delete()
    assert one.ended() == "Complete", one.shown
    assert [pod.code for pod in first] == [85, 85, 85]
    assert one.job.counted.total() == one.restarts == 0
    assert same_as_undisturbed(tmp_path) and statuses(tmp_path) == ["stopped", "finished"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_fails_is_never_begun_again(kind: str, apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 1:\n    raise RuntimeError('a mistake')\ndist.barrier()\n"
    )
    one = apply(kind, "train.py")
    assert one.ended() == "Failed"
    assert [pod.code for pod in one.every] in ([1, 1, 1],), one.shown
    assert one.job.failed and one.job.failed[0] == "PodFailurePolicy"


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_that_is_silent_and_then_removed(kind: str, apply: Apply, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step 10/")
    silent = one.pods[1]
    silent.freeze()
    one.until("machine 1 of 3 (rank 1) is lost")
    one.went_on(15.0)
    assert [index for index, pod in one.pods.items() if pod is silent] == [1]
    silent.disrupted = True
    silent.kill()
    assert one.ended() == "Complete", one.shown
    assert same_as_undisturbed(tmp_path) and one.job.counted.total() == one.restarts == 0
