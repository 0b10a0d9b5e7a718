"""Under a real Slurm (tests/slurm.py): who launches whom, where ranks meet, what its signals do."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.folder import read_run
from meshwise.spec.exit_codes import AGAIN
from tests.faults.runs import JOBS, LOOP, LOOP_WITHOUT_STATE, as_at_a_limit
from tests.slurm import Slurm, needs_slurm, slurm, which

pytestmark = pytest.mark.usefixtures("processes")

MESHWISE = f"{sys.executable} -m meshwise"
JOB = f"{JOBS}:job_long"
WHO = """
import os, socket, sys, torch, meshwise as mw
mw.barrier()
total = torch.tensor([float(sys.argv[1]) if len(sys.argv) > 1 else mw.rank()])
torch.distributed.all_reduce(total)
task = os.environ.get("SLURM_PROCID")
print(f"rank {mw.rank()} of {mw.world_size()} on {socket.gethostname()} task {task} sum {total.item():.0f}", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config) -> Iterator[Slurm]:
    needs_slurm(pytestconfig)
    with slurm(2, kill_wait=30) as made:  # Slurm's default
        yield made


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "who.py").write_text(WHO)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def lines(text: str, *, has: str) -> list[str]:
    return sorted(line for line in text.splitlines() if has in line)


def shows(path: Path, text: str, times: int = 1, limit: float = 90.0) -> str:
    """What the file shows, once it has `text` so often."""
    until = time.monotonic() + limit
    while not path.exists() or path.read_text().count(text) < times:
        assert time.monotonic() < until, f"no {text!r} in {path.read_text() if path.exists() else path}"
        time.sleep(0.05)
    return path.read_text()


# ---- Who is who, and where they meet ---------------------------------------------------------------------------------


def test_two_steps_at_once_meet_among_themselves_in_the_order_of_nodes(cluster: Slurm, programs: Path) -> None:
    (programs / "order").write_text("n2\nn1\n")
    step = f"srun --overlap -n2 -m arbitrary {sys.executable} who.py"
    script = f"export SLURM_HOSTFILE=order\n{step} 10 & {step} 100 & wait"
    job = cluster.submit(script, "-N2", "-n2", "--overcommit", folder=programs)
    cluster.wait(job, limit=90)
    output = (programs / f"{job}.out").read_text()
    expected = [
        f"rank {rank} of 2 on n{rank + 1} task {1 - rank} sum {total}" for rank in (0, 1) for total in (20, 200)
    ]
    assert lines(output, has="sum ") == sorted(expected), output
    assert lines(output, has="Slurm job") == [f"Slurm job {job}, 2 nodes × 1 device, attempt 1"] * 2
    assert not list(programs.glob(".meshwise-*"))


def test_a_batch_script_that_was_sent_from_inside_a_step_is_one_process(cluster: Slurm, programs: Path) -> None:
    inner = f"sbatch -N1 -n1 -o inner.out --wrap '{MESHWISE} run --devices 2xcpu who.py; echo code $?'"
    outer = cluster.start(
        "srun", "-N2", "--overcommit", "bash", "-c", f"[ $SLURM_PROCID = 1 ] || {inner}", folder=programs
    )
    try:
        output = shows(programs / "inner.out", "\ncode ")
    finally:
        outer.communicate(timeout=60)
    assert "rank 0 of 2 on" in output and "code 0" in output, output
    assert "1 node × 2 devices, attempt 1" in output


@pytest.mark.slow
@pytest.mark.parametrize("words", [f"{sys.executable} who.py", f"{MESHWISE} run --devices 2xcpu who.py"])
def test_nodes_that_share_no_folder_meet_too(words: str, cluster: Slurm, programs: Path) -> None:
    for node in (0, 1):
        (programs / f"node{node}").mkdir()
        (programs / f"node{node}" / "who.py").write_text((programs / "who.py").read_text())
    there = ["bash", "-c", f"cd node$SLURM_NODEID && exec {words}"]
    done = cluster.call("srun", "-N2", "--ntasks-per-node=1", *there, folder=programs)
    assert done.returncode == 0 and "rank 0 of " in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(which("mpirun") is None, reason="`mpirun` is not installed (package openmpi-bin)")
@pytest.mark.parametrize("started", ["task", "node"])
def test_mpirun_in_a_job_of_slurm_goes_by_mpirun(started: str, cluster: Slurm, programs: Path) -> None:
    words = f"mpirun --allow-run-as-root {'-N 1' if started == 'node' else ''}"
    program = f"{MESHWISE} run --devices 2xcpu who.py" if started == "node" else f"{sys.executable} who.py"
    # Open MPI uses any address of the machine, of which only those of the namespace are there.
    done = cluster.call("salloc", "-N2", "--ntasks-per-node=2", *words.split(), *program.split(), folder=programs)
    expected = [f"rank {rank} of 4 on n{1 + rank // 2}" for rank in range(4)]
    shown = [line.partition(" task")[0] for line in lines(done.stdout, has="sum 6")]
    assert shown == (expected if started == "task" else expected[:1]), done.stdout  # of a script rank 0's output
    assert "Open MPI, 2 nodes × 2 devices" in done.stdout


# ---- The end of the time ---------------------------------------------------------------------------------------------

LAYOUTS = {"one task a device": "", "one a node": "--devices 2xcpu"}


def begun(cluster: Slurm, folder: Path, program: str, layout: str, *options: str, words: str = "") -> str:
    """A job on two nodes that trains: a Job, or a loop of one's own; its id, once it steps."""
    own = program == "own loop"
    command = f"{MESHWISE} run {words} {LAYOUTS[layout]} {'loop.py' if own else f'{JOB} --log-every 20'}"
    script = f"srun --ntasks-per-node=1 {command}; echo code $?"
    job = cluster.submit(script, "-N2", *options, folder=folder)
    shows(folder / f"{job}.out", "ten steps" if own else "step  40/")
    return job


def send_as_at_a_limit(cluster: Slurm, job: str) -> None:
    """TERM, CONT and TERM within a tenth of a second to every process of the step, as slurmd and srun send them."""
    inside = psutil.Process(cluster.process).children(recursive=True)
    ours = [
        process
        for process in inside
        if _variable(process, "SLURM_STEP_ID") and _variable(process, "SLURM_JOB_ID") == job
    ]
    assert len(ours) >= 2
    as_at_a_limit(ours)


def _variable(process: psutil.Process, name: str) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return str(process.environ().get(name, ""))
    return ""


def is_saved(folder: Path, output: str, program: str) -> None:
    """The state of the last step is on the disk, and each rank ended after the same one."""
    (run,) = (folder / "runs").iterdir()
    assert read_run(run)["status"] == "stopped"
    if program == "own loop":
        ends = {int(steps) for steps in re.findall(r"ended after (\d+)", output)}
        states = folder / "state"
    else:
        ends = {int(step) for step in re.findall(r"after step (\d+) \(epoch", output)}
        states = run / "checkpoint"
    assert len(ends) == 1, output
    assert checkpoints_in(states)[-1].step == ends.pop()


def test_one_task_a_node_launches_there_and_a_time_limit_saves_it(cluster: Slurm, programs: Path) -> None:
    job = begun(cluster, programs, "job", "one a node")
    send_as_at_a_limit(cluster, job)
    output = shows(programs / f"{job}.out", "\ncode ")  # srun writes "exit code" of the first task
    assert f"\ncode {AGAIN}" in output, output
    assert f"Slurm job {job}, 2 nodes × 2 devices, attempt 1" in output
    assert "stopped by SIGTERM after step" in output and "Plan(data=4)" in output
    is_saved(programs, output, "job")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["limit", "USR1", "scancel"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", ["job", "own loop"])
def test_whatever_slurm_sends_the_state_is_saved(
    program: str, layout: str, event: str, cluster: Slurm, programs: Path
) -> None:
    job = begun(cluster, programs, program, layout)
    if event == "limit":
        send_as_at_a_limit(cluster, job)
    else:
        cluster.call("scancel", *(["-s", "USR1"] if event == "USR1" else []), job)
    cluster.wait(job)
    output = (programs / f"{job}.out").read_text()
    assert f"stopped by {'SIGUSR1' if event == 'USR1' else 'SIGTERM'}" in output, output
    assert event == "scancel" or f"code {AGAIN}" in output, output
    is_saved(programs, output, program)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", ["job", "own loop"])
def test_a_run_that_knows_the_end_of_its_job_stops_before_it(
    program: str, layout: str, cluster: Slurm, programs: Path
) -> None:
    job = begun(cluster, programs, program, layout, "--time=1", words="--save-every 100")
    facts = cluster.wait(job, limit=150)
    output = (programs / f"{job}.out").read_text()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "0:0") or f"code {AGAIN}" in output, (facts, output)
    assert f"left of job {job}, a step (" in output and "stopped by its time limit" in output, output
    is_saved(programs, output, program)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_limit_ends_what_saves_nothing_by_its_signals(layout: str, cluster: Slurm, programs: Path) -> None:
    (programs / "loop.py").write_text(LOOP_WITHOUT_STATE)
    job = begun(cluster, programs, "own loop", layout, "--time=1")
    cluster.wait(job, limit=200)
    output = (programs / f"{job}.out").read_text()
    assert "stopped by SIGTERM" in output and "DUE TO TIME LIMIT" in output, output
    assert len(set(re.findall(r"ended after (\d+)", output))) == 1


@pytest.mark.slow  # in `make test` it is tests/launcher/engines/test_submit_slurm.py that waits for a requeue
def test_a_requeued_job_goes_on_where_it_was_stopped(cluster: Slurm, programs: Path) -> None:
    again = 'if [ "$SLURM_RESTART_COUNT" = 1 ]; then set -- --resume runs/*; fi'
    train = f'srun -N2 --ntasks-per-node=1 {MESHWISE} run {JOB} --log-every 20 "$@"'
    job = cluster.submit(f"{again}\n{train}", "-N2", "--requeue", folder=programs)
    out = programs / f"{job}.out"
    shows(out, "step  40/")
    cluster.call("scontrol", "requeue", job)
    second = f"Slurm job {job}, 2 nodes × 1 device, attempt 2"
    shows(out, second)
    (first,) = re.findall(r"stopped by SIGTERM after step (\d+)", out.read_text())
    until, seen = time.monotonic() + 90, 0
    while seen <= int(first):
        assert time.monotonic() < until, out.read_text()
        time.sleep(0.1)
        found = re.findall(r"step\s+(\d+)/", out.read_text().partition(second)[2])
        assert all(int(step) > int(first) for step in found), "a step was done again"
        seen = max(map(int, found), default=0)
    cluster.call("scancel", job)
    facts = cluster.wait(job)
    steps = [int(step) for step in re.findall(r"stopped by SIGTERM after step (\d+)", out.read_text())]
    assert (facts["Restarts"], len(steps)) == ("1", 2), out.read_text()
    assert steps[0] < steps[1]
    is_saved(programs, out.read_text().rpartition("attempt 2")[2], "job")
