"""A run whose worker was killed goes on by itself, with the numbers of the run that was never disturbed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from meshwise.launcher.restarts import Restarts
from meshwise.records import folder as names
from meshwise.records.files import append_lines, read_lines, stay_in, write_text
from meshwise.spec.errors import WorkerFailed
from meshwise.spec.faults import parse_fault
from meshwise.workers.failure import Failure
from tests.faults.runs import CommandRun, run_folder

JOB = Path(__file__).with_name("job_with_state.py")


def failed(kind: str = "killed", rank: int = 1, step: int | None = None, done: int = 0) -> WorkerFailed:
    return WorkerFailed(
        "rank 1 was killed.", rank=rank, failure=Failure(rank, kind, "was killed", step=step, done=done)
    )


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path, most=3)


def test_what_machines_do_is_started_again_and_what_programs_do_is_not(restarts: Restarts) -> None:
    for kind in ("killed", "left", "hung", "lost", "spoiled"):
        assert Restarts(restarts.folder, most=3).after(failed(kind)) is None
    for kind in ("raised", "diverged", "victim"):
        ended = restarts.after(failed(kind))
        assert ended is not None and ended.exit_code == 1
    stopped = WorkerFailed("stopped at once", exit_code=130)
    assert restarts.after(stopped) is stopped


def test_what_was_lost_is_counted_from_what_all_ranks_had_done(restarts: Restarts) -> None:
    assert restarts.began(0) == {"from_step": 0} and restarts.stepped() == {}
    assert restarts.after(failed(step=15, done=14)) is None
    restarts.next()
    assert restarts.began(12) == {"from_step": 12, "steps_lost": 2}
    assert restarts.stepped()["seconds_to_step"] >= 0 and restarts.stepped() == {}


def test_a_program_that_saves_no_state_is_told_what_would_have_gone_on(tmp_path: Path) -> None:
    ends = Restarts(tmp_path, most=3, resumable=False).after(failed("killed"))
    assert ends is not None and ends.exit_code == 1
    assert str(ends).endswith("saves no state. Call mw.checkpoint in the program.")


@pytest.mark.parametrize("resumable", [False, True])
def test_without_restarts_it_ends_as_it_did(resumable: bool, tmp_path: Path) -> None:
    error = failed()
    assert Restarts(tmp_path, most=0, resumable=resumable).after(error) is error


def test_the_same_failure_twice_in_the_same_step_is_the_programs(restarts: Restarts) -> None:
    assert restarts.after(failed(step=5, done=4)) is None
    assert restarts.after(failed(rank=0, step=5, done=4)) is None
    ended = restarts.after(failed(rank=0, step=5, done=4))
    assert ended is not None and ended.exit_code == 1
    assert str(ended) == "rank 1 was killed.\nThe program itself fails: rank 0 failed alike in step 5 of two attempts."


def test_three_attempts_without_a_step_of_progress_are_enough(restarts: Restarts) -> None:
    codes = []
    for step in (4, 4, 3, 4):
        ended = restarts.after(failed(done=step))
        codes.append(None if ended is None else ended.exit_code)
    assert codes == [None, None, None, 93]


def test_when_no_restart_is_left_the_exit_code_asks_for_another_command(restarts: Restarts) -> None:
    for step in (1, 2, 3):
        assert restarts.after(failed(step=step + 1, done=step)) is None
        restarts.next()
    ended = restarts.after(failed(step=5, done=4))
    assert ended is not None and ended.exit_code == 85
    assert str(ended).endswith(f"That was attempt 4 of 4. To continue: meshwise run --resume {restarts.folder}")


def test_it_says_where_the_next_attempt_begins(restarts: Restarts) -> None:
    assert restarts.next() == "attempt 2 of 4 begins from the beginning: no state was saved."
    for name in ("step-00000008.1", "step-00000012.2.part", "step-00000010.1"):
        write_text(restarts.folder / names.CHECKPOINTS / name / "manifest.json", "{}")
    assert restarts.next() == "attempt 3 of 4 begins from the state saved at step 10."


def test_faults_belong_to_an_attempt_and_those_that_did_not_happen_are_said(tmp_path: Path) -> None:
    faults = [parse_fault(f"kill:rank=1,step={step},attempt={step}") for step in (1, 2, 3)]
    restarts, said = Restarts(tmp_path, most=3, faults=faults, number=4), list[str]()
    assert restarts.due() == (faults[0],) and restarts.record() == {"faults": [str(faults[0])]}
    append_lines(tmp_path / "faults.jsonl", [{"fault": str(faults[0]), "attempt": 4, "time": 1.0}])
    assert restarts.facts(failed())["seconds_to_detect"] > 0
    restarts.next()
    restarts.number = 5
    assert restarts.due() == (faults[1],) and "seconds_to_detect" not in restarts.facts(failed())
    restarts.close(said.append)
    assert [line.partition(" did not")[0] for line in said] == [f"--fault {fault}" for fault in faults[1:]]


def test_of_faults_nothing_is_known_once_the_folder_of_the_run_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.records.files._places", {})
    folder, said = tmp_path / "run", list[str]()
    folder.mkdir()
    stay_in(folder)
    restarts = Restarts(folder, most=3, faults=[parse_fault("kill:rank=1,step=1")], number=1)
    folder.rmdir()
    restarts.close(said.append)
    assert said == []


def test_a_command_is_told_of_a_failure(tmp_path: Path) -> None:
    out, said = tmp_path / "told", list[str]()
    command = f'echo "$MESHWISE_FAILURE $MESHWISE_ATTEMPT $MESHWISE_AGAIN" > {out}; false'
    restarts = Restarts(tmp_path, command=command)
    restarts.run_command("rank 1 was killed.", again=True)
    restarts.close(said.append)
    assert out.read_text() == "rank 1 was killed. 1 1\n"
    assert said == []


# With real workers.


def final(folder: Path) -> str:
    return hashlib.sha256((folder / names.WEIGHTS).read_bytes()).hexdigest()


def trained(out: Path, *words: str, devices: str = "2xcpu") -> tuple[CommandRun, Path]:
    run = CommandRun(f"{JOB}:job", "--devices", devices, *words, out=out)
    run.wait()
    return run, run_folder(out)


@pytest.mark.usefixtures("processes")
def test_a_killed_worker_does_not_change_the_numbers(tmp_path: Path) -> None:
    undisturbed, whole = trained(tmp_path / "a", "--save-every", "4")
    run, folder = trained(tmp_path / "b", "--save-every", "4", "--fault", "kill:rank=1,step=15,phase=backward")
    assert run.process.returncode == 0, run.output
    assert "rank 1 of 2 was killed by SIGKILL" in run.output
    assert final(folder) == final(whole), undisturbed.output
    losses = [read_lines(each / names.METRICS) for each in (whole, folder)]
    assert losses[0] == losses[1]
    first, second = names.read_run(folder)["sessions"]
    assert first["status"] == "failed" and (first["kind"], first["rank"], first["step"]) == ("killed", 1, 15)
    assert second["status"] == "finished" and second["from_step"] in (8, 12)  # where that of step 12 was not whole yet
    assert second["steps_lost"] == 14 - second["from_step"]
    assert f"attempt 2 of 4 begins from the state saved at step {second['from_step']}." in run.output
    assert second["seconds_to_step"] > 0
    assert run.left_over() == []


PHASES = ("data", "forward", "backward", "communication", "optimizer", "evaluate", "checkpoint")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("plan", ["data=2", "shard=2", "data=3"])
def test_a_kill_in_any_phase_on_any_rank_does_not_change_the_numbers(plan: str, tmp_path: Path) -> None:
    devices = f"{plan[-1]}xcpu"
    words = ("--set", plan, "--save-every", "4")
    _, whole = trained(tmp_path / "a", *words, devices=devices)
    for number, phase in enumerate(PHASES):
        step = 12 if phase == "checkpoint" else 15
        fault = f"kill:rank={number % int(plan[-1])},step={step},phase={phase}"
        run, folder = trained(tmp_path / phase, *words, "--fault", fault, devices=devices)
        assert run.process.returncode == 0 and "did not happen" not in run.output, run.output
        assert final(folder) == final(whole), fault
        assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS), fault


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_kill_where_nothing_was_saved_begins_anew(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", "--set", "shard=2", "--save-every", "4")
    faults = ("--fault", "kill:rank=0,step=3", "--fault", "kill:rank=1,step=6,attempt=2")
    run, folder = trained(tmp_path / "b", "--set", "shard=2", "--save-every", "4", *faults)
    assert run.process.returncode == 0, run.output
    assert "attempt 2 of 4 begins from the beginning: no state was saved." in run.output
    assert "attempt 3 of 4 begins from the state saved at step 4." in run.output
    assert final(folder) == final(whole)
    assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_a_step_that_runs_out_of_memory_does_not_change_the_numbers(plan: str, tmp_path: Path) -> None:
    words = ("--set", plan, "--save-every", "4")
    _, whole = trained(tmp_path / "a", *words, "--set", "recompute=full")
    for phase in ("forward", "backward", "communication", "optimizer"):
        run, folder = trained(tmp_path / phase, *words, "--fault", f"oom:rank=1,step=15,phase={phase}")
        assert run.process.returncode == 0 and "did not happen" not in run.output, run.output
        assert "A plan that needs less: recompute=full" in " ".join(run.output.split()), run.output
        assert final(folder) == final(whole), phase
        assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS), phase
