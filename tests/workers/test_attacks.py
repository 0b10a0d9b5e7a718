"""Another user of the machine does not come between a launcher and its workers, nor does who holds connections or sends
garbage. Needs root, which becomes that other user. Strangers at the meeting of launchers: test_meeting.py."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshwise.spec.devices import WorkerSlot
from meshwise.workers.channel import LauncherChannel, Line
from meshwise.workers.clock import ClockProbe, ClockServer
from meshwise.workers.join import join
from meshwise.workers.launch import launch
from meshwise.workers.scratch import scratch_folder

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
    pytest.mark.usefixtures("processes"),
]

ATTACKER = """
import os, resource, socket, sys
"0".encode("idna")  # nothing can be imported once this is another user
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
what, where = sys.argv[1:]

def speak():  # as a worker does
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        try:
            connection.connect(where)
            connection.sendall(b'{"kind": "hello", "rank": 0}\\n')
            return connection.recv(100) or "hung up"
        except ConnectionError:
            return "hung up"
        except OSError as error:
            return type(error).__name__

def flood():
    global held
    held = []
    try:
        for number in range(min(5000, most - 100)):
            held.append(socket.create_connection(("127.0.0.1", int(where)), timeout=2))
            held[-1].sendall(b"GET / HTTP/1.1" * (number % 2))
    except OSError as error:
        return f"{error}, after {len(held)}"
    return "ready"

print({"speak": speak, "flood": flood}[what](), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def attack(what: str, where: object) -> Iterator[str]:
    """What a process of another user tells, which lives on inside the `with` block."""
    command = [sys.executable, "-I", "-S", "-c", ATTACKER, what, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=30)


def test_another_user_does_not_reach_the_side_channel_and_is_not_heard_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    told: queue.Queue[tuple[int, Any]] = queue.Queue()
    with scratch_folder() as folder:
        channel = LauncherChannel(folder, lambda *message: told.put(message))
        path = Path(channel.address)
        with attack("speak", path) as told_there:
            assert told_there == "PermissionError"
        folder.chmod(0o755)
        path.chmod(0o777)
        with attack("speak", path) as told_there:
            assert told_there == "hung up"
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(str(path))
            Line(own).send({"kind": "hello", "rank": 1})
            assert told.get(timeout=20) == (1, {"kind": "hello", "rank": 1})
        channel.close()


def listens_at() -> set[str]:
    """The addresses at which a rank listens once the ranks have met."""
    join()
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_listen_to_nobody_elsewhere() -> None:
    first, second = launch(listens_at, (), [WorkerSlot("cpu", None, (), 1)] * 2)
    assert first == {"127.0.0.1"} and second <= {"127.0.0.1"}


@pytest.fixture
def few_files() -> Iterator[None]:
    """As many open files as most systems allow a process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_that_are_held_use_up_no_files_and_keep_no_rank_from_the_clock(few_files: None) -> None:
    server = ClockServer("127.0.0.1", time.perf_counter_ns)
    probe = ClockProbe(("127.0.0.1", server.port), time.perf_counter_ns)
    assert len(probe.sample(4)) == 4
    with attack("flood", server.port) as told:
        assert told == "ready"
        probe.sample(1)  # its connection, the oldest, was closed
        assert len(probe.sample(4)) == 4
        assert psutil.Process().num_fds() < 512
    server.close()
    probe.close()
