"""The text of the script, and what its shell does about the end of a job, with commands of Slurm that are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.launcher.engines.batch_script import BatchJob, batch_script, nodes_of, slurm_time
from meshwise.launcher.engines.site import Site
from meshwise.spec.errors import UsageError


def job_in(folder: Path, **changes: object) -> BatchJob:
    job = BatchJob(
        name="gpt",
        workdir=folder,
        run=folder / "runs" / "gpt",
        words=["train.py:job"],
        nodes="4",
        seconds=4 * 3600,
        gpus=8,
        command=["meshwise"],
        site=Site(),
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def options_in(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_a_site_shows_in_the_script(tmp_path: Path) -> None:
    site = Site(
        gpus="gres",
        gpu_type="h100",
        cpus=64,
        memory="500G",
        partition="gpu",
        account="p 1",
        setup=("module load cuda",),
    )
    script = batch_script(job_in(tmp_path, site=site, options=["--qos", "high", "-x", "n3"]))
    options = options_in(script)
    assert {"--gres=gpu:h100:8", "--cpus-per-task=64", "--mem=500G", "--partition=gpu", '--account="p 1"'} <= {*options}
    assert "--nodes=4" in options and "--time=04:00:00" in options and options[-1] == "--qos high -x n3"
    assert "\nmodule load cuda\n" in script and "export SRUN_CPUS_PER_TASK" in script and "--no-kill" not in script


def test_a_range_of_nodes_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    script = batch_script(job_in(tmp_path, nodes="2-8"))
    assert "--nodes=2-8" in options_in(script) and "srun --no-kill --wait=15 --overlap --ntasks" in script
    assert "left=$(for node in $up" in script and '[ "$(wc -w <<<"$left")" -ge 2 ] || break' in script
    assert "#SBATCH --ntasks" not in script  # Slurm would take two nodes


@pytest.mark.parametrize(
    ("site", "words"),
    [
        (Site(container="a b.sif", mounts=("/data",)), "srun apptainer exec --nv --bind /data 'a b.sif' meshwise run"),
        (Site(container="a.sqsh", runtime="pyxis"), "srun --container-image=a.sqsh --container-workdir="),
    ],
)
def test_a_container_is_around_the_command(site: Site, words: str, tmp_path: Path) -> None:
    assert words in batch_script(job_in(tmp_path, site=site))


def test_words_are_quoted_for_the_shell(tmp_path: Path) -> None:
    script = batch_script(job_in(tmp_path, words=["--arg", "text=$(rm -rf /); 'x'", "train.py:job"]))
    step = next(line for line in script.splitlines() if line.startswith("srun"))
    printed = subprocess.run(
        ["bash", "-c", step.replace("srun", "printf '%s\\n'", 1).removesuffix(" &")], text=True, capture_output=True
    )
    assert "text=$(rm -rf /); 'x'" in printed.stdout.splitlines()


@pytest.mark.parametrize(
    "changes",
    [
        {"words": ["--arg", "text=one\ntwo"]},
        {"options": ["--comment=one\ntwo"]},
        {"options": ['--comment="one"']},
        {"nodes": "8-2"},
        {"nodes": "two"},
        {"workdir": Path("/tmp/a\nb")},
    ],
)
def test_what_cannot_stand_in_a_script_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        batch_script(job_in(tmp_path, **changes))


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "00:01:00"), (4 * 3600, "04:00:00"), (36 * 3600 + 61, "1-12:02:00")]
)
def test_times_are_slurms(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text


def test_counts_of_nodes_are_read() -> None:
    assert nodes_of("4") == (4, 4) and nodes_of("2-8") == (2, 8)


@pytest.fixture
def slurm(tmp_path: Path, processes: None) -> dict[str, str]:
    """Stand-ins: srun runs the words behind it, scontrol and squeue say what files hold, and keep what was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stand_ins = {
        "srun": 'exec "$@"',
        "squeue": f"cat {tmp_path}/state",
        "scontrol": f'[ "$1" = show ] && cat {tmp_path}/job || echo "$@" >>{tmp_path}/asked',
        "meshwise": f'echo "$@" >>{tmp_path}/ran; trap "exit 85" TERM; [ -e {tmp_path}/waits ] && '
        f"{{ touch {tmp_path}/runs-now; while :; do sleep 0.1; done; }}; exit $(cat {tmp_path}/code)",
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("code", "state", "restarts", "asks"),
    [
        (85, "RUNNING None", 0, True),
        (85, "COMPLETING TimeLimit", 0, True),
        (85, "COMPLETING None", 0, False),  # cancelled
        (85, "PENDING BeginTime", 0, False),  # Slurm has requeued it itself
        (85, "RUNNING None", 1, False),  # another start of the job runs now
        (0, "RUNNING None", 0, False),
        (1, "RUNNING None", 0, False),
        (93, "RUNNING None", 0, False),
        (130, "RUNNING None", 0, False),
    ],
)
def test_only_the_start_that_slurm_counts_asks_for_another(
    code: int, state: str, restarts: int, asks: bool, slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "code").write_text(str(code))
    (tmp_path / "state").write_text(state)
    (tmp_path / "job").write_text(f"JobId=7 Requeue=1 Restarts={restarts} BatchFlag=1\n")
    ended = subprocess.run(["bash", "-c", batch_script(job_in(tmp_path))], env=slurm)
    assert ended.returncode == code
    assert (tmp_path / "asked").exists() == asks
    if asks:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_line_of_setup_that_fails_is_said_and_nothing_starts(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("false  # what fails inside a file is the file's own\nmodule() { return 3; }\n")
    setup = (f"source {tmp_path}/env.sh", "if false; then :; fi", "module load cuda/99")
    (tmp_path / "submit.sh").write_text(batch_script(job_in(tmp_path, site=Site(setup=setup))))
    ended = subprocess.run(["bash", str(tmp_path / "submit.sh")], env=slurm, text=True, capture_output=True)
    assert ended.returncode == 2 and not (tmp_path / "ran").exists()
    assert ended.stderr == "setup of the site: module load cuda/99: exit code 3. Nothing was started.\n"


def test_a_run_that_was_stopped_for_good_is_not_started_again(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "code").write_text("85")
    (tmp_path / "state").write_text("RUNNING None")
    (tmp_path / "job").write_text("Restarts=0")
    job = job_in(tmp_path)
    job.run.mkdir(parents=True)
    (job.run / "stop").touch()
    subprocess.run(["bash", "-c", batch_script(job)], env=slurm)
    assert not (tmp_path / "asked").exists()


def test_the_script_waits_for_the_ranks_whatever_signals_come(slurm: dict[str, str], tmp_path: Path) -> None:
    for name, text in (("waits", ""), ("state", "COMPLETING TimeLimit"), ("job", "Restarts=0"), ("code", "85")):
        (tmp_path / name).write_text(text)
    script = subprocess.Popen(["bash", "-c", batch_script(job_in(tmp_path))], env=slurm)
    while not (tmp_path / "runs-now").exists():
        time.sleep(0.05)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT, signal.SIGTERM):
        script.send_signal(number)
        time.sleep(0.1)
    assert script.poll() is None  # the ranks have got none of them here: it waits for their end
    children = subprocess.run(["pgrep", "-P", str(script.pid)], text=True, capture_output=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    assert script.wait(timeout=30) == 85
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_task_of_an_array_has_a_folder_and_a_name_of_its_own(slurm: dict[str, str], tmp_path: Path) -> None:
    for name, text in (("state", "RUNNING None"), ("job", "Restarts=0"), ("code", "85")):
        (tmp_path / name).write_text(text)
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", "-c", batch_script(job_in(tmp_path, nodes="1"))], env=slurm | task)
    assert (tmp_path / "asked").read_text() == "requeue 5_3\n"
    assert f"--folder {tmp_path}/runs/gpt-3 train.py:job" in (tmp_path / "ran").read_text()
