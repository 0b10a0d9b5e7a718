"""A run on several machines goes on by itself (launcher/several.py): launchers on this machine stand for them, and
share the run's folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshwise.records import claims
from meshwise.records import folder as names
from meshwise.records.files import read_lines
from meshwise.workers.channel import free_port
from tests.faults.runs import CommandRun, run_folder
from tests.faults.test_restarts import JOB, final, trained

pytestmark = pytest.mark.usefixtures("processes")


class Launchers:
    """`meshwise run` on several machines with one worker each, which share the folder `out`."""

    def __init__(self, out: Path, count: int, *words: str, job: str = f"{JOB}:job", shared: bool = True) -> None:
        self.out, self._shared = out, shared
        meeting = ("--nnodes", str(count), "--rdzv", f"127.0.0.1:{free_port()}", "--devices", "1xcpu")
        self._words = (job, *meeting, *words)
        self.runs = [self.start(node) for node in range(count)]

    def start(self, node: int, again: str = "", *words: str) -> CommandRun:
        """The launcher of a machine; again: the name of its output, where it was there before."""
        out = self.out / ("runs" if self._shared else f"runs{node}")
        words = (*self._words, "--node-rank", str(node), *words, "--out", str(out))
        return CommandRun(*words, out=self.out / f"machine{node}{again}", GLOO_SOCKET_IFNAME="lo")

    def ended(self) -> list[int]:
        return [run.wait() for run in self.runs]

    def kill(self, node: int) -> None:
        """A machine is gone, with all that runs on it."""
        self.runs[node].process.kill()
        self.runs[node].process.wait()

    @property
    def shown(self) -> str:
        return "\n".join(f"--- machine {node}\n{run.output}" for node, run in enumerate(self.runs))


def test_a_worker_that_was_killed_is_replaced_on_all_machines(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", "--save-every", "4")
    two = Launchers(tmp_path / "b", 2, "--save-every", "4", "--fault", "kill:rank=1,step=15")
    assert two.ended() == [0, 0], two.shown
    folder = run_folder(tmp_path / "b")
    assert "rank 1 of 2 was killed by SIGKILL" in two.runs[1].output
    assert "on another machine:\nrank 1 of 2 was killed" in two.runs[0].output
    for run in two.runs:
        assert "attempt 2 of 4 begins from the state saved at step 12." in run.output
    assert final(folder) == final(whole)
    assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS)
    first, second = names.read_run(folder)["sessions"]
    assert (first["status"], first["rank"], first["step"]) == ("failed", 1, 15) and second["status"] == "finished"
    assert (second["from_step"], second["steps_lost"]) == (12, 2) and claims.newest(folder) == 2
    assert [run.left_over() for run in two.runs] == [[], []]


def test_with_fewer_machines_than_asked_for_the_run_is_left_to_who_started_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs/sent"
    names.write_run(folder, {"job": f"{JOB}:job", "status": names.QUEUED, "submission": {"nodes": "2"}})
    fault = ("--save-every", "4", "--fault", "slow 400ms:rank=0,step=9")
    two = Launchers(tmp_path, 2, "--folder", str(folder), *fault)
    saved(tmp_path, 8)
    two.kill(1)
    assert two.runs[0].wait() == 85, two.shown
    said = " ".join(two.runs[0].output.split())
    assert "Only 1 machine of 2 remained, but the run was submitted with --nodes 2" in said and "attempt 2" not in said
    (session,) = names.read_run(run_folder(tmp_path))["sessions"]
    assert session["status"] == "failed" and session["reason"].startswith("machine 1 of 2 (rank 1) is lost")


EXACT = ("--set", "precision=fp64", "--exact-random", "--save-every", "4")


def same_within(one: Path, other: Path, most: float = 1e-9) -> bool:
    """Whether the final weights of two runs agree, relative to the largest."""
    a, b = (load_file(folder / names.WEIGHTS) for folder in (one, other))
    return a.keys() == b.keys() and all(
        float((a[name] - b[name]).abs().max()) <= most * max(1.0, float(a[name].abs().max())) for name in a
    )


def saved(out: Path, step: int) -> None:
    """Wait until the state after this step is saved."""
    limit = time.monotonic() + 60
    while not list((out / "runs").glob(f"*/checkpoint/step-{step:08d}.1")):
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_machine_that_is_lost_is_left_out(lost: int, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", *EXACT, devices="3xcpu")
    three = Launchers(tmp_path / "b", 3, *EXACT, "--fault", "slow 400ms:rank=0,step=9")
    saved(tmp_path / "b", 8)
    three.kill(lost)
    left = [run for node, run in enumerate(three.runs) if node != lost]
    assert [run.wait() for run in left] == [0, 0], three.shown
    folder = run_folder(tmp_path / "b")
    for run in left:
        said = " ".join(run.output.split())
        assert f"machine {lost} of 3 (rank {lost}) is lost: " in said
        assert "attempt 2 of 4 begins from the state saved at step " in said
        assert ", on 2 machines with 2 devices under Plan(data=2" in said
    assert same_within(folder, whole), three.shown
    steps = [line["step"] for line in read_lines(folder / names.METRICS) if "loss" in line]
    assert steps == list(range(1, 21))
    run = names.read_run(folder)
    assert (run["status"], run["world"], len(run["sessions"])) == ("finished", 2, 2)
    assert run["machine"] == (1 if lost == 0 else 0)
    assert [run.left_over() for run in three.runs] == [[], [], []]


@pytest.mark.slow
def test_without_a_shared_folder_the_run_does_not_go_on_where_its_states_are_not(tmp_path: Path) -> None:
    two = Launchers(tmp_path / "b", 2, *EXACT, "--fault", "slow 400ms:rank=0,step=9", shared=False)
    limit = time.monotonic() + 60
    while not list((tmp_path / "b" / "runs0").glob("*/checkpoint/step-00000008.1")):
        assert time.monotonic() < limit, two.shown
        time.sleep(0.05)
    two.kill(0)
    assert two.runs[1].wait() == 85, two.shown
    assert "Machine 0, which has the saved states, is lost" in two.runs[1].output


SLOW_TWICE = ("--fault", "slow 400ms:rank=0,step=9", "--fault", "slow 2500ms:rank=0,step=9,attempt=2")


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 2])
def test_a_machine_that_is_started_again_joins(node: int, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", *EXACT, devices="3xcpu")
    three = Launchers(tmp_path / "b", 3, *EXACT, *SLOW_TWICE)
    saved(tmp_path / "b", 8)
    three.kill(node)
    left = [run for at, run in enumerate(three.runs) if at != node]
    left[0].wait_for("attempt 2 of 4 begins")
    back = three.start(node, "-back")
    assert [run.wait() for run in (*left, back)] == [0, 0, 0], three.shown + back.output
    said = " ".join(left[0].output.split())
    assert "A machine joins: all ranks have stopped after a step. attempt 3 of 5 begins from the state saved" in said
    assert ", on 3 machines with 3 devices under Plan(data=3" in said
    assert "the run is under way: this machine joins it" in " ".join(back.output.split())
    folder = run_folder(tmp_path / "b")
    assert same_within(folder, whole), three.shown
    steps = [line["step"] for line in read_lines(folder / names.METRICS) if "loss" in line]
    assert steps == list(range(1, 21))
    assert [session["status"] for session in names.read_run(folder)["sessions"]] == ["failed", "stopped", "finished"]


@pytest.mark.slow
def test_a_machine_that_was_started_with_another_command_does_not_join(tmp_path: Path) -> None:
    two = Launchers(tmp_path / "b", 2, *EXACT, *SLOW_TWICE)
    saved(tmp_path / "b", 8)
    two.kill(1)
    two.runs[0].wait_for("attempt 2 of 4 begins")
    back = two.start(1, "-back", "--epochs", "7")
    assert (back.wait(), two.runs[0].wait()) == (2, 0), back.output
    assert "the run uses epochs None, but this machine was started with 7." in " ".join(back.output.split())
