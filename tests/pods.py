"""The pods of a manifest on this machine, by podman: the template's own command, as process 1 of a container.

    with pod(read(text), claim=tmp_path) as one:
        one.until("step 1")
        assert one.stop() == 85

Each field of a template that is executed has its own flag of podman, since `podman kube play` makes a folder of a
memory volume. The image is this machine's files, with what is written to them thrown away; the claim is a folder. What
controllers do is in tests/controllers.py. Needs root on Linux, podman and crun: see `why_not`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes import OF_TRAINER, jobs

PACKAGES = "podman crun"
# Hybrid control groups, which crun refuses, are left out in a mount namespace of each command.
ALONE = ["unshare", "--mount", "--propagation", "private", "bash", "-c"]
SETUP = 'mountpoint -q /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified; exec podman "$@"'
LIMITS = ("--ulimit", "nofile=10000:10000", "--ulimit", "nproc=4000:4000")


def why_not() -> str:
    """Why no pod can run here, or ""."""
    missing = [name for name in (*PACKAGES.split(), "unshare") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed: apt-get install --no-install-recommends {PACKAGES}" if missing else ""


@dataclass(frozen=True)
class Pod:
    """A container that runs. private: podman's own files."""

    name: str
    private: Path
    grace: int
    process: subprocess.Popen[str]
    output: Path

    def until(self, text: str, limit: float = 120.0) -> None:
        """Wait until a text was printed."""
        until = time.monotonic() + limit
        while text not in self.shown:
            assert self.process.poll() is None and time.monotonic() < until, self.shown
            time.sleep(0.1)

    @property
    def shown(self) -> str:
        """What the pod has printed."""
        return self.output.read_text()

    def stop(self) -> int:
        """What a deleted pod gets: TERM, and KILL after its grace period. Return its exit code."""
        podman(self.private, "stop", f"--time={self.grace}", self.name)
        return self.wait()

    def wait(self, limit: float = 180.0) -> int:
        return self.process.wait(limit)


def podman(private: Path, *words: str) -> str:
    done = subprocess.run([*ALONE, SETUP, "podman", *own(private), *words], capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def own(private: Path) -> list[str]:
    store = [f"--root={private}/root", f"--runroot={private}/run"]
    return [*store, "--storage-driver=vfs", "--cgroup-manager=cgroupfs"]


@contextlib.contextmanager
def pod(things: list[dict[str, Any]], claim: Path, variables: Mapping[str, str] | None = None) -> Iterator[Pod]:
    """A pod of a manifest's template. variables: others that the image has."""
    private = Path(tempfile.mkdtemp(prefix="pod-"))  # podman takes no long path
    (template,) = [job["template"] for thing in things for _, job in jobs(thing)]
    name = f"{things[-1]['metadata']['name']}-0"
    grace = template["spec"]["terminationGracePeriodSeconds"]
    output = private / "output"
    command = ["run", f"--name={name}", *LIMITS, *flags(template, claim, variables or {}, trainer(things))]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*ALONE, SETUP, "podman", *own(private), *command],
            cwd=private,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield Pod(name, private, grace, process, output)
    finally:
        podman(private, "rm", "--force", "--time=0", name)
        process.wait(30)
        shutil.rmtree(private, ignore_errors=True)


def trainer(things: list[dict[str, Any]]) -> dict[str, Any]:
    """What Trainer writes into the container of a TrainJob, as its sources say."""
    found: dict[str, Any] = {}
    for thing in things:
        if thing["kind"] == "TrainJob":
            found = {key: thing["spec"]["trainer"].get(key) for key in ("image", "command", "args")}
            found["resources"] = thing["spec"]["trainer"].get("resourcesPerNode", {})
            found["env"] = [{"name": each, "value": "1"} for each in sorted(OF_TRAINER)]
    return found


def flags(template: dict[str, Any], claim: Path, variables: Mapping[str, str], written: dict[str, Any]) -> list[str]:
    """The flags of podman for a pod template, and its command."""
    spec = template["spec"]
    (container,) = spec["containers"]
    env = {**variables, **variables_of(container), **variables_of(written), "JOB_COMPLETION_INDEX": "0"}
    env["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"  # what every pod has
    container = {**container, **{key: value for key, value in written.items() if key != "env"}}
    volumes = {each["name"]: each for each in spec["volumes"]}
    found = [
        "--network=none",
        f"--workdir={container['workingDir']}",
        f"--stop-timeout={spec['terminationGracePeriodSeconds']}",
    ]
    found += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    for mount in container["volumeMounts"]:
        volume, path = volumes[mount["name"]], mount["mountPath"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            found += ["--tmpfs", f"{path}:size={amount(volume['emptyDir']['sizeLimit'])}"]
        else:
            found += ["--volume", f"{claim}:{path}"]
    limits = container.get("resources", {}).get("limits", {})
    found += [f"--memory={amount(limits['memory'])}"] if "memory" in limits else []
    words = [expanded(word, env) for word in (*container["command"], *container.get("args", ()))]
    return [*found, "--rootfs", "/:O", *words]


def variables_of(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container. Those that another object holds are 0."""
    return {each["name"]: each.get("value", "0") for each in container.get("env", ())}


def expanded(word: str, env: Mapping[str, str]) -> str:
    """A word of a command, as Kubernetes reads it: $(NAME) is a variable that the container has, $$ is $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda at: "$" if at[0] == "$$" else env.get(at[1], at[0]), word)


def amount(quantity: str) -> int:
    """The bytes of a quantity such as 8Gi."""
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", quantity).groups()  # type: ignore[union-attr]
    powers = {"": 1, **{f"{letter}i": 1024**n for n, letter in enumerate("KMGT", 1)}}
    powers |= {letter: 1000**n for n, letter in enumerate("kMGT", 1)}
    return int(float(number) * powers[unit])
