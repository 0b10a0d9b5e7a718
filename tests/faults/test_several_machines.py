"""A run on several machines ends on all of them, and goes on where an engine starts it again on as many as there are.
Launchers on this machine stand for machines, and share the run's folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshwise.records import folder as names
from meshwise.records.files import read_lines
from tests.faults.runs import CommandRun
from tests.faults.test_restarts import JOB, final, trained
from tests.hosts import free_port

pytestmark = pytest.mark.usefixtures("processes")
EXACT = ("--set", "precision=fp64", "--exact-random", "--save-every", "4")


class Launchers:
    """One start of `meshwise run` on several machines with one worker each, which share the run's folder."""

    def __init__(self, out: Path, count: int, *words: str, start: int = 1) -> None:
        self.folder = out / "run"
        meeting = ("--nnodes", str(count), "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        self._words = (f"{JOB}:job", *meeting, "--devices", "1xcpu", "--folder", str(self.folder), *words)
        self._out = out / f"start{start}"
        self.runs = [self.start(node) for node in range(count)]

    def start(self, node: int, *words: str) -> CommandRun:
        """The launcher of a machine."""
        out = self._out / f"machine{node}{'-'.join(words)}"
        return CommandRun(*self._words, "--node-rank", str(node), *words, out=out, GLOO_SOCKET_IFNAME="lo")

    def ended(self) -> list[int]:
        return [run.wait() for run in self.runs]

    @property
    def shown(self) -> str:
        return "\n".join(f"--- machine {node}\n{run.output}" for node, run in enumerate(self.runs))

    def left_over(self) -> list[list[int]]:
        return [run.left_over() for run in self.runs]


def losses(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(folder / names.METRICS) if "loss" in line]


def test_a_worker_that_was_killed_ends_all_machines_and_the_next_start_goes_on(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", "--save-every", "4")
    two = Launchers(tmp_path, 2, "--save-every", "4", "--fault", "kill:rank=1,step=15")
    assert two.ended() == [85, 85], two.shown
    said = [" ".join(run.output.split()) for run in two.runs]
    assert "rank 1 of 2 was killed by SIGKILL" in said[1] and "on another machine: rank 1 of 2 was killed" in said[0]
    assert all("Started again, the run goes on from its last saved state." in text for text in said)
    again = Launchers(tmp_path, 2, "--save-every", "4", start=2)
    assert again.ended() == [0, 0], again.shown
    assert final(again.folder) == final(whole)
    assert read_lines(again.folder / names.METRICS) == read_lines(whole / names.METRICS)
    first, second = names.read_run(again.folder)["sessions"]
    assert (first["status"], first["rank"], first["step"]) == ("failed", 1, 15)
    assert (second["status"], second["from_step"]) == ("finished", 12)
    assert two.left_over() == again.left_over() == [[], []]


def test_a_start_with_another_command_is_refused_on_all_machines(tmp_path: Path) -> None:
    two = Launchers(tmp_path, 2)
    two.runs[1].kill()
    odd = two.start(1, "--epochs", "7")
    assert (two.runs[0].wait(), odd.wait()) == (2, 2), two.shown + odd.output
    for run in (two.runs[0], odd):
        assert "machines 0 and 1 differ in their epochs: None and 7." in " ".join(run.output.split())


def same_within(one: Path, other: Path, most: float = 1e-9) -> bool:
    """Whether the final weights of two runs agree, relative to the largest."""
    a, b = (load_file(folder / names.WEIGHTS) for folder in (one, other))
    return a.keys() == b.keys() and all(
        float((a[name] - b[name]).abs().max()) <= most * max(1.0, float(a[name].abs().max())) for name in a
    )


def saved(launchers: Launchers, step: int) -> None:
    """Wait until the state after this step is saved."""
    limit = time.monotonic() + 60
    while not list(launchers.folder.glob(f"checkpoint/step-{step:08d}.1")):
        assert time.monotonic() < limit, launchers.shown
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_machine_that_is_lost_ends_the_others_and_two_machines_go_on(lost: int, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", *EXACT, devices="3xcpu")
    three = Launchers(tmp_path, 3, *EXACT, "--fault", "slow 400ms:rank=0,step=9")
    saved(three, 8)
    three.runs[lost].process.kill()
    left = [run for node, run in enumerate(three.runs) if node != lost]
    assert [run.wait() for run in left] == [85, 85], three.shown
    for run in left:
        assert f"machine {lost} of 3 (rank {lost}) is lost: " in " ".join(run.output.split()), run.output
    two = Launchers(tmp_path, 2, *EXACT, start=2)
    assert two.ended() == [0, 0], two.shown
    assert same_within(two.folder, whole) and losses(two.folder) == list(range(1, 21))
    run = names.read_run(two.folder)
    assert (run["status"], run["world"], [each["status"] for each in run["sessions"]]) == (
        *("finished", 2),
        ["failed", "finished"],
    )
    assert three.left_over() == [[], [], []]


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_is_started_again_with_a_plan_that_needs_less(tmp_path: Path) -> None:
    two = Launchers(tmp_path, 2, *EXACT, "--fault", "oom:rank=1,step=9")
    assert two.ended() == [85, 85], two.shown
    again = Launchers(tmp_path, 2, *EXACT, start=2)
    assert again.ended() == [0, 0], again.shown
    assert "recompute=" in (again.folder / names.PLAN).read_text().replace('"', "").replace(" ", "")
