"""What several pods do with what was printed: each template is executed under a stand-in for the controllers, which
follows the rules that are documented (tests/controllers.py). No controller was run."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never disturbed."""
    return trained(tmp_path_factory.mktemp("whole"), "--save-every", "4", devices="3xcpu")[1]


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / names.METRICS) if "loss" in line]


def statuses(run: Path) -> list[Any]:
    return [each.get("status") for each in names.read_run(run)["sessions"]]


@pytest.mark.parametrize(("kind", "index"), [(JOB, 0), (JOB, 2), (JOB_SET, 2), (TRAIN_JOB, 0)])
def test_a_pod_is_killed_and_all_begin_again(kind: str, index: int, apply: Apply, whole: Path, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step 10/")
    one.pods[index].kill()
    assert one.ended() == "Complete", one.shown
    run = tmp_path / "run"
    assert final(run) == final(whole) and steps_of(run) == list(range(1, 21)), one.shown
    codes = [pod.code for pod in one.every]
    assert set(codes) <= {0, 85, 137} and codes.count(137) == 1 and codes.count(0) == 3, one.shown
    if kind == JOB:
        assert one.job.counted == {index: 1}
    else:
        assert (one.restarts, len(one.every)) == (1, 6)
    late = one.alone(1)  # the others do not come back: it must not wait for them
    assert late.code == 0 and "is finished: nothing is left to do." in late.shown


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_drained_save_and_go_on(kind: str, apply: Apply, whole: Path, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step  6/")
    first = list(one.pods.values())
    for pod in first:
        pod.disrupted = True
        pod.delete()
    assert one.ended() == "Complete", one.shown
    assert [pod.code for pod in first] == [85, 85, 85]
    assert one.job.counted.total() == one.restarts == 0
    run = tmp_path / "run"
    assert final(run) == final(whole) and steps_of(run) == list(range(1, 21)), one.shown
    assert statuses(run) == ["stopped", "finished"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_fails_is_never_begun_again(kind: str, apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 1:\n    raise RuntimeError('a mistake')\ndist.barrier()\n"
    )
    one = apply(kind, "train.py")
    assert one.ended() == "Failed"
    codes = [pod.code for pod in one.every]
    assert len(codes) == 3 and 1 in codes and set(codes) <= {1, 85}, one.shown
    assert one.job.failed and one.job.failed[0] == "PodFailurePolicy" and "a mistake" in one.shown


@pytest.mark.parametrize("kind", [JOB, TRAIN_JOB])
def test_a_machine_is_silent_and_then_removed(kind: str, apply: Apply, whole: Path, tmp_path: Path) -> None:
    one = apply(kind, *SLOWLY)
    one.until("step 10/")
    silent = one.pods[1]
    silent.freeze()
    one.until("machine 1 of 3 (rank 1) is lost")
    one.went_on(15.0)  # nothing replaces a pod that may still run
    assert silent.ended is None and [pod.index for pod in one.every].count(1) == 1
    silent.disrupted = True
    silent.kill()
    assert one.ended() == "Complete", one.shown
    run = tmp_path / "run"
    assert final(run) == final(whole) and steps_of(run) == list(range(1, 21)), one.shown
    assert one.job.counted.total() == one.restarts == 0


def test_pods_that_wait_for_a_lost_one_end_by_term(apply: Apply) -> None:
    one = apply(JOB_SET, *SLOWLY)
    one.until("starting", 3)
    one.pods[1].kill()
    first = list(one.pods.values())
    while not one.old:
        one.went_on(0.5)
    assert [pod.code for pod in first] == [85, 137, 85]


def test_a_run_that_comes_no_step_further_is_given_up(apply: Apply, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    sessions = [{"began": 1.0 + n, "ended": 2.0 + n, "status": "failed", "from_step": 0} for n in range(3)]
    names.write_run(run, {"job": f"{PROGRAM}:job", "status": "failed", "sessions": sessions})
    one = apply(JOB, *SLOWLY)
    assert one.ended() == "Failed"
    codes = [pod.code for pod in one.every]
    assert len(codes) == 3 and 93 in codes and set(codes) <= {93, 85}, one.shown
