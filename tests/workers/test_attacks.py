"""Another user of the machine does not come between a launcher and its workers, nor does who holds connections or sends
garbage. Needs root, which becomes that other user. Strangers at the meeting of launchers: test_meeting.py."""

from __future__ import annotations

import queue
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import os

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
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
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
        for number in range(5000):
            held.append(socket.create_connection(("127.0.0.1", int(where)), timeout=2))
            held[-1].sendall(b"GET / HTTP/1.1" * (number % 2))
    except OSError as error:
        return f"{error} after {len(held)}"
    return "ready"

print({"speak": speak, "flood": flood}[what](), flush=True)
sys.stdin.read()
"""


class Attacker:
    """A process of another user that does one thing, and then waits for its end."""

    def __init__(self, what: str, where: object) -> None:
        command = [sys.executable, "-I", "-S", "-c", ATTACKER, what, str(where)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=30)


def said_by(attacker: Attacker) -> str:
    attacker.end()
    return attacker.said


def test_another_user_does_not_reach_the_side_channel_and_is_not_heard_there() -> None:
    told: queue.Queue[tuple[int, Any]] = queue.Queue()
    with scratch_folder() as folder:
        channel = LauncherChannel(folder, lambda *message: told.put(message))
        path = Path(channel.address)
        assert said_by(Attacker("speak", path)) == "PermissionError"
        for opened, mode in ((folder, 0o777), (path, 0o777)):
            opened.chmod(mode)
        assert said_by(Attacker("speak", path)) == "hung up"
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


def test_5000_connections_that_are_held_keep_no_rank_from_the_clock(few_files: None) -> None:
    server = ClockServer("127.0.0.1", time.perf_counter_ns)
    probe = ClockProbe(("127.0.0.1", server.port), time.perf_counter_ns)
    assert len(probe.sample(4)) == 4
    attacker = Attacker("flood", server.port)
    print("attacker", attacker.said)
    b = time.process_time(), time.perf_counter()
    for i in range(4):
        print("held", len(probe.sample(4)), time.perf_counter() - b[1])
    time.sleep(1)
    print("cpu", time.process_time() - b[0], time.perf_counter() - b[1], "files", psutil.Process().num_fds())
    attacker.end()
    for i in range(3):
        print("held", len(probe.sample(4)), time.perf_counter() - b[1])
    server.close()
    probe.close()
    assert 0
