"""`meshwise submit`, and what `runs`, `stop` and `logs` show of what was sent. Its commands are stand-ins here; the
real ones are in tests/launcher/engines. Of launcher/placing.py,
launcher/commands/logs.py, launcher/commands/stop.py, records/attempts.py and launcher/engines/slurm.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwise.launcher import submit
from meshwise.launcher.commands.submit import too_short
from meshwise.launcher.engines.site import Site
from meshwise.records import folder as names
from meshwise.training.job.options import RunOptions

JOB = """
import torch
from torch import nn
import meshwise as mw

x = torch.randn(64, 4)
job = mw.Job(
    name="small", model=lambda: nn.Linear(4, 1), data=lambda: (x, x.sum(1, keepdim=True)), batch_size=8, epochs=2,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`command("submit", …)` where small.py lies: its exit code, and what it prints."""
    (tmp_path / "small.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no config"))
    monkeypatch.setenv("PATH", str(tmp_path / "no commands"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return command


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose file `queue` is what squeue says, and `asked` what the other commands were given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stand_ins = {
        "sbatch": f'echo "sbatch $@ step=$SLURM_STEP_ID conf=$SLURM_CONF" >>{tools}/asked; cat {tools}/answer',
        "squeue": f"echo JOBID; cat {tools}/queue",
        "scancel": f'echo "scancel $@" >>{tools}/asked; sed -i "/^7/d" {tools}/queue',
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    (tools / "queue").write_text("7|PENDING|Priority|gpu\n")
    (tools / "answer").write_text("7\n")
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tools


def run_in(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_dry_run_prints_the_script_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    own = ("--epochs", 3, "--seed", 0, "--restarts", 0)
    code, out, err = command("submit", "small.py:job", *own, "--time", "90min", "--dry-run", "--", "-p", "gpu")
    assert code == 0 and "not rehearsed: site.toml names no machine" in err
    assert "#SBATCH --time=01:30:00\n" in out and "#SBATCH -p gpu\n" in out
    assert "--epochs 3 --seed 0 --restarts 0 small.py:job &" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("--devices 4xcpu", False),
        ("--devices 4xcuda", True),
        ("--machine 4xcpu", False),
        ("--machine 4xA100", True),
    ],
)
def test_gpus_are_asked_of_the_queue_for_devices_that_are_gpus(
    words: str, gpus: bool, command: Command, tmp_path: Path
) -> None:
    code, out, err = command("submit", "small.py:job", *words.split(), "--dry-run", "--anyway")
    assert code == 0, err
    assert [line for line in out.splitlines() if "gpus-per-node" in line] == ["#SBATCH --gpus-per-node=4"] * gpus


def test_a_job_that_asks_for_no_gpu_says_so_before_it_is_sent(command: Command, slurm: Path, tmp_path: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    code, _, err = command("submit", "small.py:job")
    assert code == 1 and err.index("asks for no GPU, for which most sites give it one CPU worker") < err.index(
        "SchedulerError"
    )


@pytest.mark.parametrize(
    ("devices", "site", "sbatch", "is_told"),
    [
        (None, Site(), "", True),
        ("all", Site(partition="gpu"), "--partition gpu", True),
        ("4xcuda", Site(), "", False),
        ("4xcpu", Site(), "", False),
        (None, Site(devices="4xcpu"), "", False),
        (None, Site(machine="8xH100"), "", False),
        (None, Site(machine="4xcpu"), "", False),
        (None, Site(gpus_per_node=8), "", False),
        (None, Site(gpus="none"), "", False),
        (None, Site(options=("--gres=gpu:4",)), "", False),
        (None, Site(), "-G 4", False),
    ],
)
def test_who_asks_for_gpus_or_for_none_is_told_nothing(
    devices: str | None, site: Site, sbatch: str, is_told: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "find_site", lambda named, beside: site)
    options = RunOptions(job="small.py:job", devices=devices)
    job = submit.prepare(submit.SubmitOptions(), options, {"devices": devices}, (), sbatch.split())
    told = submit.without_gpus(job)
    assert bool(told) is is_told
    assert not told or ("gpus_per_node = 8 to site.toml" in told and "--devices 4xcpu" in told)


def test_the_words_of_a_script_are_its_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    words = ("submit", "--nodes", "2", "--dry-run", "train.py", "--lr", "0.1", "--", "--account", "physics")
    code, out, _ = command(*words)
    assert code == 0 and "train.py --lr 0.1 &" in out and "#SBATCH --account physics" in out


def test_without_sbatch_nothing_is_left(command: Command, tmp_path: Path) -> None:
    code, _, err = command("submit", "small.py:job")
    assert code == 2 and "sbatch is not installed here" in err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_is_sent_without_what_slurm_told_this_shell(
    command: Command, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    code, out, _ = command("submit", "small.py:job")
    run = run_in(tmp_path)
    assert code == 0 and "Slurm job 7" in out
    asked = (slurm / "asked").read_text()
    assert f"{run}/submit.sh step= conf=/etc/slurm.conf" in asked and f"--output={run}/slurm-%j.out" in asked
    assert names.read_run(run)["submission"]["jobs"].keys() == {"7"}
    code, out, _ = command("runs")
    assert "queued, pending (Priority)" in out
    (slurm / "queue").write_text("7|RUNNING|None|gpu\n")
    assert "starting" in command("runs")[1]
    code, _, err = command("runs", "remove", "--yes", run.name)
    assert code == 2 and f"Stop it first: meshwise stop {run.name}" in err and run.exists()
    (slurm / "queue").write_text("")
    assert "failed, left the queue before its start" in command("runs")[1]
    (run / "slurm-7.out").write_text("setup of the site: module load cuda: exit code 1\n")
    code, out, _ = command("runs")
    assert "failed, see its slurm-7.out" in out and "meshwise submit RUN" in out
    assert "exit code 1" in command("logs", run.name, "-f")[1]  # it ends: the job will never start


def test_what_sbatch_refuses_leaves_no_run(command: Command, slurm: Path, tmp_path: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n")
    code, _, err = command("submit", "small.py:job")
    assert code == 1 and "invalid partition specified: gpu" in err
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_waits_is_cancelled_for_good_and_can_be_sent_again(
    command: Command, slurm: Path, tmp_path: Path
) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    code, out, _ = command("stop", run.name)
    assert code == 0 and "Slurm job 7 was waiting in the queue. It is cancelled." in out
    assert "scancel --state=PENDING 7" in (slurm / "asked").read_text()
    assert (run / "stop").exists() and names.read_run(run)["status"] == "stopped"
    code, _, err = command("run", "small.py:job", "--folder", run, "--devices", "1xcpu")
    assert code == 2 and "was stopped by meshwise stop" in err
    (slurm / "answer").write_text("8\n")
    code, out, _ = command("submit", run)
    assert code == 0 and "Slurm job 8" in out and not (run / "stop").exists()
    assert names.read_run(run)["submission"]["jobs"].keys() == {"7", "8"}


def test_a_run_that_is_sent_again_may_have_other_nodes_and_time(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    (slurm / "queue").write_text("")
    code, _, err = command("submit", run, "--epochs", 9)
    assert code == 2 and "--epochs: a run that is submitted again keeps its own options" in err
    assert names.read_run(run)["submission"]["jobs"].keys() == {"7"}
    code, _, _ = command("submit", run, "--nodes", 3, "--time", "8h", "--", "-p", "long")
    assert code == 0 and "--nodes=3 --time=08:00:00 -p long" in (slurm / "asked").read_text()


def test_what_is_done_is_not_sent_again(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    (slurm / "queue").write_text("")
    names.change_run(run, status="finished")
    code, _, err = command("submit", run)
    assert code == 2 and "is finished, so nothing is left to do" in err and "--epochs N" in err
    assert names.read_run(run)["submission"]["jobs"].keys() == {"7"}


def test_a_refusal_leaves_a_run_that_is_sent_again_as_it_was(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    (slurm / "queue").write_text("")
    names.change_run(run, status="stopped")
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    code, _, err = command("submit", run)
    assert code == 1 and "no such partition" in err and names.read_run(run)["status"] == "stopped"


def test_what_the_launcher_showed_is_in_the_logs(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    (slurm / "queue").write_text("")
    (run / "slurm-7.out").write_text("UsageError: small.py: no such file\n")
    code, out, _ = command("logs", run.name)
    assert code == 0 and "slurm-7.out: what the launcher showed\nUsageError: small.py: no such file" in out


def test_a_run_in_the_queue_is_not_sent_twice(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job")
    code, _, err = command("submit", run_in(tmp_path))
    assert code == 2 and "still in the queue or running" in err


def test_a_run_that_does_not_fit_is_sent_only_anyway(command: Command, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('machine = "2xH100"\n')
    (tmp_path / "big.py").write_text(
        JOB.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 10**10), nn.Linear(10**10, 1))")
    )
    code, out, err = command("submit", "big.py:job", "--dry-run")
    assert code == 2 and not out and "not submitted: on 1 node × 2 H100" in err and "--anyway" in err
    code, out, err = command("submit", "big.py:job", "--dry-run", "--anyway")
    assert code == 0 and "sent anyway, although on 1 node" in err and "--gpus-per-node=2" in out


def test_a_plan_that_can_never_run_is_not_sent_anyway_either(command: Command, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('machine = "2xH100"\n')
    code, out, err = command("submit", "small.py:job", "--set", "data=3", "--dry-run", "--anyway")
    assert code == 2 and not out and "1 node × 2 H100: " in err, err
    assert "Fix this before you submit: --anyway skips only warnings." in err


@pytest.mark.parametrize(("step", "limit", "short"), [(1.0, 60.0, False), (50.0, 60.0, True), (7000.0, 7200.0, False)])
def test_a_limit_that_no_step_fits_into_is_said(step: float, limit: float, short: bool) -> None:
    """Behind the step come three saves, of a tenth of the limit or a minute, and the end of the processes."""
    assert bool(too_short(step, limit)) == short


def test_the_end_is_known_before(command: Command, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('machine = "2xH100"\nnetwork = "400Gb"\n')
    code, _, err = command("submit", "small.py:job", "--nodes", "1-2", "--time", "1min", "--dry-run")
    assert code == 0 and "1 node × 2 H100: small on " in err and "\ndata=2 fits: " in err and "\ndata=4 fits: " in err
    assert err.index("1 node × 2 H100: rehearsing") < err.index("fits") < err.index("2 nodes × 2 H100: rehearsing")
    assert "Training of 16 steps: " in err and "1 attempt of 1 min 00 s to the end." in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("submit", "meshwise submit needs a job"),
        ("submit nothere.py:job", "no such file"),
        (
            "submit small.py:job --nodes 2 --restarts 5",
            "--restarts on several nodes: meshwise cannot restart a run there",
        ),
        ("submit small.py:job --nodes 0", "--nodes must be a number such as 4"),
        ("submit small.py:job --nodes 4-2", "Write 2-4"),
        ("submit small.py:job --time soon", "is not a duration"),
        ("submit small.py:job --site other.toml", "No such file"),
        ("submit small.py:job --nnodes 2", "No such option: --nnodes"),
        ("submit small.py:job --time-limit 4h", "No such option: --time-limit"),
        ("submit small.py:job -- gpu", "only options of sbatch may follow"),
        ("submit small.py:job --nodes 2 -- --nodes=1", "--nodes=1 after --: the batch script sets this option"),
        ("submit small.py:job -- -N 3", "-N after --"),
        ("submit small.py:job -- --ntasks 8", "--ntasks after --"),
        ("submit small.py:job --time 90", "--time 90 has no unit. Write 90min or 90s"),
        ("submit small.py:nosuch", "nosuch"),
        ("submit runs/nosuch", "nosuch"),
        ("submit small.py:job --devices 2xtpu", "tpu"),
        ("submit small.py --dry-run", "options after small.py go to the script"),
        ("submit small.py:job --machine 8xH999", "H999"),
        ("stop nothing", "there is no run nothing in"),
        ("logs nothing", "there is no run nothing in"),
    ],
)
def test_what_cannot_be_sent_is_said(words: str, says: str, command: Command, tmp_path: Path) -> None:
    code, _, err = command(*words.split())
    assert code == 2 and says in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_secret_is_named_and_asked_for(
    command: Command, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "queue").write_text("")
    (tmp_path / "site.toml").write_text('secrets = ["TRACKER_KEY"]\n')
    code, _, err = command("submit", "small.py:job")
    assert code == 2 and "lists TRACKER_KEY as secrets, but these are not set" in err
    monkeypatch.setenv("TRACKER_KEY", "abcdef")
    assert command("submit", "small.py:job")[0] == 0
    kept = "".join(path.read_text() for path in run_in(tmp_path).iterdir())
    assert "TRACKER_KEY" in kept and "abcdef" not in kept
    monkeypatch.delenv("TRACKER_KEY")
    code, _, err = command("submit", run_in(tmp_path))
    assert code == 2 and "site.toml lists TRACKER_KEY as secrets, but these are not set" in err


def test_what_runs_is_what_was_checked(command: Command, slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("width = 4\n")
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    (tmp_path / "layers.py").write_text("width = 8\n")
    code, _, err = command("run", "small.py:job", "--folder", run, "--devices", "1xcpu")
    assert code == 2 and "layers.py changed after meshwise submit checked this run" in err
    facts = names.read_run(run)
    assert facts["status"] == "failed" and "layers.py changed" in facts["error"]


def test_a_run_that_comes_no_step_further_is_not_started_for_ever(
    command: Command, processes: None, slurm: Path, tmp_path: Path
) -> None:
    command("submit", "small.py:job")
    run = run_in(tmp_path)
    began = names.read_run(run)["submission"]["sent"]
    sessions = [{"began": began + n, "ended": began + n + 1, "status": "failed", "from_step": 0} for n in range(3)]
    names.change_run(run, sessions=sessions)
    words = ("run", "small.py:job", "--folder", run, "--devices", "1xcpu")
    code, _, err = command(*words)
    assert code == 93 and "3 attempts in a row made no progress after step 0" in err
    names.change_run(run, sessions=[*sessions[:2], sessions[2] | {"from_step": 4}])
    assert command(*words)[0] == 0


def test_a_run_goes_on_in_its_folder(command: Command, processes: None, tmp_path: Path) -> None:
    words = ("run", "small.py:job", "--folder", tmp_path / "mine", "--devices", "1xcpu")
    assert command(*words, "--epochs", 1)[0] == 0
    assert command(*words, "--epochs", 1)[0] == 0  # it is done: nothing is computed again
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    assert command(*words, "--epochs", 2)[0] == 0
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 17))
    assert len(names.read_run(tmp_path / "mine")["sessions"]) == 3
    code, _, err = command("run", "mnist-mlp", "--folder", tmp_path / "mine", "--devices", "1xcpu")
    assert code == 2 and "the run to continue is of 'small.py:job', not of 'mnist-mlp'" in err


def test_the_logs_of_a_run_name_rank_attempt_and_host(command: Command, processes: None, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(
        "import os, meshwise as mw\nmw.rank()\nprint('I am', os.environ['RANK'], flush=True)\n"
    )
    for _ in range(2):
        words = ["run", "--devices", "2xcpu", "--folder", "runs/mine", "hello.py"]
        subprocess.run([sys.executable, "-m", "meshwise", *words], check=True, timeout=120)
    for other in ("other.py", "small.py:job"):
        (tmp_path / "other.py").touch()
        code, _, err = command("run", "--devices", "2xcpu", "--folder", "runs/mine", other)
        assert code == 2 and f"contains a run of 'hello.py', not of '{other}'" in err
    code, out, _ = command("logs", "mine", "-f")
    host = os.uname().nodename
    said = [line for line in out.splitlines() if "I am" in line or line.startswith("---")]
    both = [f"rank {rank} @ {host}: I am {rank}" for rank in (0, 1)]
    assert code == 0 and said == [*both, "--- attempt 2", *both]
    assert command("logs", "mine", "--rank", 1)[1].count("I am 1") == 2
    code, _, err = command("logs", "mine", "--rank", 7)
    assert code == 2 and "rank 7 has printed nothing" in err


LONG_JOB = """
import time
import torch
from torch import nn
import meshwise as mw

x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

def loss(model, batch):
    time.sleep(0.02)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

job = mw.Job(
    name="long", data=lambda: (x, x.sum(1, keepdim=True)), batch_size=12, epochs=6, loss=loss,
    model=lambda: nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double(),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
"""


@pytest.mark.slow
def test_attempts_of_another_size_have_the_numbers_of_an_undisturbed_run(processes: None, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG_JOB)

    def begun(folder: str, devices: int) -> subprocess.Popen[bytes]:
        words = ["run", "--folder", folder, "--devices", f"{devices}xcpu", "long.py:job"]
        return subprocess.Popen([sys.executable, "-m", "meshwise", *words], cwd=tmp_path)

    def records(folder: str) -> list[dict[str, float]]:
        path = tmp_path / folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if "loss" in (record := json.loads(line))]

    assert begun("whole", 1).wait(timeout=120) == 0
    for devices in (4, 2):
        run, until = begun("parts", devices), len(records("parts")) + 30
        while len(records("parts")) < until:
            assert run.poll() is None, "it ended before it was asked to"
            time.sleep(0.02)
        run.send_signal(signal.SIGUSR1)
        assert run.wait(timeout=120) == 85
    assert begun("parts", 3).wait(timeout=120) == 0
    assert [one["world"] for one in names.read_run(tmp_path / "parts")["sessions"]] == [4, 2, 3]
    whole, parts = records("whole"), records("parts")
    assert [one["step"] for one in parts] == [one["step"] for one in whole] == list(range(1, 121))
    assert [one["loss"] for one in parts] == pytest.approx([one["loss"] for one in whole], rel=1e-9)
    after, before = (load_file(tmp_path / folder / "weights.safetensors") for folder in ("parts", "whole"))
    assert all(torch.allclose(value, before[name], rtol=0, atol=1e-9) for name, value in after.items())


def test_a_task_of_an_array_is_stopped_and_sent_again_alone(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job", "--", "--array", "0-9")
    run = run_in(tmp_path)
    tasks = {number: run.with_name(f"{run.name}-{number}") for number in (2, 3)}
    for number, task in tasks.items():
        task.mkdir()
        session = {"began": 1.0, "status": "running", "launcher": "Slurm", "scheduler_job": f"7_{number}", "start": 1}
        names.write_run(task, {"job": "small", "status": "running", "sessions": [session]})
    (slurm / "queue").write_text("7_4|PENDING|JobArrayTaskLimit|main\n7_2|RUNNING|None|main\n7_3|RUNNING|None|main\n")
    assert "queued, pending (JobArrayTaskLimit)" not in command("runs")[1]
    code, out, _ = command("stop", tasks[3].name)
    assert code == 0 and "Slurm job 7_3 is running. It was asked to save and to end." in out
    assert "scancel --signal=TERM 7_3\n" in (slurm / "asked").read_text()
    assert (tasks[3] / "stop").exists() and not (tasks[2] / "stop").exists() and not (run / "stop").exists()
    names.change_run(tasks[3], status="stopped")
    (slurm / "answer").write_text("8\n")
    code, out, err = command("submit", tasks[3].name)
    assert code == 0 and "Slurm job 8" in out, err
    assert f"--array=3 runs/{run.name}/submit.sh" in (slurm / "asked").read_text()
    assert names.read_run(tasks[3])["submission"]["jobs"].keys() == {"8_3"} and not (tasks[3] / "stop").exists()
    (slurm / "queue").write_text("8_3|PENDING|Priority|main\n")
    assert command("submit", tasks[3].name)[0] == 2  # it is in the queue


def test_an_array_is_stopped_whole(command: Command, slurm: Path, tmp_path: Path) -> None:
    command("submit", "small.py:job", "--", "--array", "0-1")
    run = run_in(tmp_path)
    task = run.with_name(f"{run.name}-0")
    task.mkdir()
    names.write_run(task, {"job": "small", "status": "running", "sessions": [{"began": 1.0, "status": "running"}]})
    (slurm / "queue").write_text("7_1|PENDING|Priority|main\n7_0|RUNNING|None|main\n")
    command("stop", run.name)
    asked = (slurm / "asked").read_text()
    assert "scancel --state=PENDING 7\n" in asked and (task / "stop").exists() and (run / "stop").exists()


def test_logs_that_are_followed_say_how_far_the_run_is(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    names.write_run(run, {"job": "small", "status": "running", "sessions": [{"began": 1.0, "status": "running"}]})
    (run / names.METRICS).write_text('{"step": 1, "loss": 0.75}\n{"step": 2, "loss": 0.5}\n')
    monkeypatch.setattr("meshwise.launcher.commands.logs.EVERY", 0.0)
    monkeypatch.setattr(
        "meshwise.launcher.commands.logs.time.sleep", lambda seconds: names.end_session(run, "finished")
    )
    code, out, _ = command("logs", "one", "-f")
    assert code == 0 and out == "step 2  loss 0.5000\n"
