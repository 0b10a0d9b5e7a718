"""A real Slurm on this machine: every node has a host name, an address and a link of its own.

    with slurm(2) as cluster:
        done = cluster.call("srun", "-N2", "hostname")
        job = cluster.submit("srun sleep 60", "-N2", "--time=1", folder=tmp_path)

It is up in about a second and ends with the with-statement, and so does all that runs on it. Several may run side by
side. Needs root on Linux, and the packages of `PACKAGES`: see `why_not`.

Another Slurm than this machine's: MESHWISE_SLURM_ROOT is the folder of a Debian with these packages,

    debootstrap --variant=minbase trixie DIR
    chroot DIR apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2 libffi8

in which daemons and commands then run, with all that is not the system's (/root, /tmp, /dev …) as it is here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from meshwise.workers.fork_server import LISTENS

PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
ROOT = Path(__file__).parents[1]
NEWER = os.environ.get("MESHWISE_SLURM_ROOT", "")
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=1
ReturnToService=2
JobRequeue=1
SlurmdTimeout={timeout}
KillWait={kill_wait}
UnkillableStepTimeout=30
MinJobAge=600
{more}
NodeName=n[1-{nodes}] NodeAddr=10.77.0.[1-{nodes}] CPUs=4 RealMemory=2000 State=UNKNOWN {has}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""cred_expire: a requeued job may start after so many seconds and one, 121 by default."""


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs. folder: its configuration, its logs. process: the first of its PID namespace."""

    folder: Path
    process: int

    def call(
        self,
        *command: str,
        folder: Path | None = None,
        limit: float = 120.0,
        user: str = "root",
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head, in `folder`; what it prints, stderr among it, is the stdout."""
        done = self.start(*command, folder=folder, user=user, **variables)
        try:
            output, _ = done.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            done.kill()
            raise AssertionError(f"{' '.join(command)} ran longer than {limit:.0f} s:\n{error.stdout}") from None
        return subprocess.CompletedProcess(command, done.returncode, output)

    def start(
        self, *command: str, folder: Path | None = None, user: str = "root", **variables: str
    ) -> subprocess.Popen[str]:
        """Start a command on the head."""
        inside = ["nsenter", "--target", str(self.process), "--mount", "--pid", "--net", "--uts", "--root"]
        known = pwd.getpwnam(user)
        inside += [] if user == "root" else ["--setuid", str(known.pw_uid), "--setgid", str(known.pw_gid)]
        return subprocess.Popen(
            [*inside, f"--wdns={folder or self.folder}", "--", *command],
            env=environment_of_user() | {"SLURM_CONF": str(self.folder / "slurm.conf")} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, script: str, *options: str, folder: Path, **variables: str) -> str:
        """Send a batch script whose output goes to `JOB.out` in `folder`; its job id."""
        path = folder / "batch.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        words = ["sbatch", "--parsable", "--open-mode=append", "-o", "%j.out", *options, str(path)]
        return self.call(*words, folder=folder, **variables).stdout.strip()

    def facts(self, job: str) -> Mapping[str, str]:
        """What Slurm says of a job: JobState, Reason, Restarts, ExitCode …"""
        words = self.call("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, limit: float = 60.0) -> Mapping[str, str]:
        """Until the job is in one of these states, by default over."""
        over = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        until = time.monotonic() + limit
        while (found := self.facts(job)).get("JobState") not in over:
            assert time.monotonic() < until, f"job {job} is not {' or '.join(over)}: {found}"
            time.sleep(0.2)
        return found


def environment_of_user() -> dict[str, str]:
    """This environment, as a user's shell on the head has it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "PYTEST")) and name != LISTENS
    }
    path = os.pathsep.join(part for part in (str(ROOT / "src"), kept.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _closed() -> dict[str, str]:
    """Where Python lies in a folder that root alone may enter: that folder, and what in it others are to see."""
    python = Path(sys.executable).resolve()
    for parent in reversed(python.parents):
        if not parent.stat().st_mode & 0o001:
            return {"CLOSED": str(parent), "OPENED": str(parent / python.relative_to(parent).parts[0])}
    return {}


def which(tool: str) -> str | None:
    """Where a command is that the cluster runs."""
    return shutil.which(tool, path=f"{NEWER}/usr/sbin:{NEWER}/usr/bin" if NEWER else None)


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of tests needs root on Linux"
    tools = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter", "unshare")
    if missing := [tool for tool in tools if which(tool) is None]:
        return f"`{missing[0]}` is not installed: apt-get install --no-install-recommends {PACKAGES}"
    return None


def needs_slurm(config: pytest.Config) -> None:
    """Skip the test where there can be no Slurm; in a night's run (`make suite`) that is a failure."""
    if (why := why_not()) is not None:
        (pytest.fail if config.getoption("hypothesis_profile", None) == "suite" else pytest.skip)(why)


@contextlib.contextmanager
def slurm(
    nodes: int, *, more: str = "", kill_wait: int = 5, name: str = "one", timeout: int = 10, gpus: str = ""
) -> Iterator[Slurm]:
    """A Slurm of `nodes` nodes, n1 and so on. more: lines of slurm.conf. kill_wait: seconds from SIGTERM to SIGKILL.
    timeout: seconds after which Slurm notices a lost node. gpus: `h100:2`, which each node says to have.

    Raises RuntimeError with its logs where it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="meshwise-slurm-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        folder.chmod(0o755)  # for users beside root
        kind, _, count = gpus.partition(":")
        if gpus:
            files = [
                f"File=/dev/{name}" for name in ("null", "zero", "full", "random")[: int(count)]
            ]  # they stand for it
            lines = [f"NodeName=n[1-{nodes}] Name=gpu Type={kind} {file}\n" for file in files]
            (folder / "gres.conf").write_text("".join(lines))
            more += "GresTypes=gpu"
        facts = {
            "name": name,
            "folder": folder,
            "kill_wait": kill_wait,
            "more": more,
            "nodes": nodes,
            "timeout": timeout,
        }
        text = CONFIGURATION.format(**facts, has=f"Gres=gpu:{gpus}" if gpus else "")
        (folder / "slurm.conf").write_text(text)
        known = ["127.0.0.1 localhost", "10.77.0.254 head"]
        known += [f"10.77.0.{at} n{at}" for at in range(1, nodes + 1)]
        (folder / "hosts").write_text("\n".join(known) + "\n")
        command = [str(ROOT / "tests" / "slurm.sh"), str(folder), str(nodes)]
        outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | _closed())
        try:
            until = time.monotonic() + 30
            while not (folder / "ready").exists():
                if outer.poll() is not None or time.monotonic() > until:
                    logs = [f"{path.name}: {path.read_text()}" for path in (folder / "log").glob("*")]
                    raise RuntimeError("Slurm did not come up:\n" + "\n".join(logs))
                time.sleep(0.05)
            (first,) = psutil.Process(outer.pid).children()
            yield Slurm(folder, first.pid)
        finally:
            outer.kill()  # and by --kill-child, what it started
            outer.wait()
