"""A small cluster on one machine: network namespaces as hosts, a bridge between them, links as slow as they are asked.

    with hosts(3, "200mbit") as cluster:
        results = run_on(cluster, function, *arguments)

Each link is a veth pair, shaped by a token bucket (tc-tbf) at both of its ends: what the host sends, and what it gets.
A host may have a clock of its own, through a time namespace. Needs root, `ip` and `tc`: see `why_not`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

INTERFACE = "eth0"
NAMESPACES = Path("/run/netns")
ROOT = Path(__file__).parents[1]
PORT = 29500
_PREFIX = "meshwise"
LEAST_BURST = 64 * 1024
BURST_SECONDS = 0.002
"""Of the rate, that a link which was idle carries at once. A timer that fires later than this loses what the link could
have carried: with 0.5 ms two busy cores brought a 1 Gbit/s link to half of its rate as soon as both directions ran."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_numbers = itertools.count()
NAME = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'  # hosts have names: reports count them


def free_port() -> int:
    """A TCP port on which nobody listens now, and from which no connection goes out."""
    from meshwise.workers.ports import listening

    with listening() as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class Host:
    """One host. ahead: seconds by which its monotonic clock is ahead of this machine's."""

    namespace: str
    address: str
    ahead: float = 0.0
    _started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False)

    def popen(self, args: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; it ends with the host. env: on top of this process's own."""
        clock = ["unshare", "--time", "--monotonic", str(round(self.ahead)), "--"] if self.ahead else []
        named = ["unshare", "--uts", "--", "sh", "-c", NAME, self.namespace]
        command = ["ip", "netns", "exec", self.namespace, *named, *clock, *args]
        process = subprocess.Popen(command, env=os.environ | dict(env or {}), cwd=ROOT, **more)
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kill what was started on this host and is still there."""
        _kill_inside(self.namespace)
        for process in self._started:
            process.kill()
            process.wait()


@functools.cache
def why_not(own_clocks: bool = False) -> str | None:
    """Why hosts cannot be made here; None where they can. own_clocks: each with a clock of its own."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (package {package})"
    try:
        with hosts(1, "1gbit", ahead=[1.0] if own_clocks else ()) as (host,):
            done = host.popen(["true"], stderr=subprocess.PIPE, text=True)
            said = done.communicate()[1].strip()
            return f"no process starts in a namespace: {said}" if done.returncode else None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` fails here: {error.stderr.strip()}"


@contextlib.contextmanager
def hosts(count: int, rate: str | Sequence[str | None] | None, ahead: Sequence[float] = ()) -> Iterator[list[Host]]:
    """`count` hosts at 10.77.0.1, .2 and so on, which end with the with-statement, and so does all that runs on them.

    rate: of the links, in both directions, as tc writes it (`200mbit`), or one a host; None leaves a link as it is.
    ahead: whole seconds by which each host's monotonic clock is ahead. Raises CalledProcessError where it cannot be.
    """
    _remove_leftovers()
    rates = [rate] * count if rate is None or isinstance(rate, str) else list(rate)
    name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    switch = f"{name}-switch"
    made = [Host(f"{name}-host{at}", f"10.77.0.{at + 1}", ahead[at] if at < len(ahead) else 0.0) for at in range(count)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for at, host in enumerate(made):
            _connect(host, switch, f"host{at}", rates[at])
        yield made
    finally:
        for host in made:
            host.end()
            _remove(host.namespace)
        _remove(switch)


def _connect(host: Host, switch: str, port: str, rate: str | None) -> None:
    """Make the host's namespace, and the link from it to the switch."""
    inside = ("ip", "-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    peer = ("peer", "name", INTERFACE, "netns", host.namespace)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", INTERFACE, "up")
    if rate is not None:
        shape = ("rate", rate, "burst", str(burst_of(rate)), "latency", "50ms")
        _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "tbf", *shape)
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)


def bits_of(rate: str) -> float:
    """Bits a second of a rate as tc writes it: `200mbit`."""
    number, unit = rate[:-4], rate[-4:]
    return float(number) * _UNITS[unit]


def burst_of(rate: str) -> int:
    """Bytes that a link of this rate carries at once after it was idle."""
    return max(LEAST_BURST, round(bits_of(rate) / 8 * BURST_SECONDS))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove(namespace: str) -> None:
    if (NAMESPACES / namespace).exists():
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _kill_inside(namespace: str) -> None:
    """Kill every process of a namespace of ours."""
    found = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove_leftovers() -> None:
    """Remove the hosts of earlier processes that were killed before they could."""
    for path in NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _kill_inside(path.name)
            _remove(path.name)


def run_on(cluster: Sequence[Host], function: Callable[..., Any], *arguments: Any, limit: float = 300.0) -> list[Any]:
    """Call `function` on every host, each as one rank of a run; what they return, in rank order.

    limit: seconds after which they are ended. Raises RuntimeError with what a rank printed when one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"rank{rank}" for rank in range(len(cluster))]
        ranks = []
        for rank, host in enumerate(cluster):
            with answers[rank].with_suffix(".txt").open("w") as printed:
                command = [sys.executable, "-m", "tests.hosts", str(answers[rank])]
                environment = _rank_environment(cluster, rank)
                ranks.append(
                    host.popen(command, environment, stdin=subprocess.PIPE, stdout=printed, stderr=subprocess.STDOUT)
                )
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((function, arguments)))
            process.stdin.close()
        failed = _wait(ranks, limit)
        if failed is not None:
            said = answers[failed].with_suffix(".txt").read_text()
            raise RuntimeError(f"rank {failed} ended with {ranks[failed].returncode}: {said}")
        return [pickle.loads(answer.read_bytes()) for answer in answers]


def _rank_environment(cluster: Sequence[Host], rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(cluster)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "MESHWISE_DEVICE": "cpu",
    }


def _wait(ranks: Sequence[subprocess.Popen[Any]], limit: float) -> int | None:
    """Until all have ended. The first that failed, or still ran after `limit` seconds; the others are then killed."""
    until = time.monotonic() + limit
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed or time.monotonic() > until:
            late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
            for rank in late:
                ranks[rank].kill()
                ranks[rank].wait()
            return [*failed, *late][0]
        time.sleep(0.02)
    return next((rank for rank, process in enumerate(ranks) if process.returncode), None)


def _be_a_rank(answer: Path) -> None:
    function, arguments = pickle.loads(sys.stdin.buffer.read())
    answer.write_bytes(pickle.dumps(function(*arguments)))


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
