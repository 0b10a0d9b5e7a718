"""Another user of the machine uses up nothing of a run. Needs root, which becomes that other user. Strangers at the
meeting of launchers: test_meeting.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from meshwise.spec.devices import WorkerSlot
from meshwise.workers.clock import ClockProbe, ClockServer
from meshwise.workers.join import join
from meshwise.workers.launch import launch

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
    pytest.mark.usefixtures("processes"),
]

ATTACKER = """
import os, socket, sys
"0".encode("idna")  # nothing can be imported once this is another user
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
where = sys.argv[1]

def flood():
    global held
    held = []
    try:
        for number in range(400):
            held.append(socket.create_connection(("127.0.0.1", int(where)), timeout=2))
            held[-1].sendall(b"GET / HTTP/1.1" * (number % 2))
    except OSError as error:
        return f"{error}, after {len(held)}"
    return "ready"

print(flood(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flood(port: int) -> Iterator[str]:
    """What a process of another user tells, which lives on inside the `with` block."""
    command = [sys.executable, "-I", "-S", "-c", ATTACKER, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=30)


def listens_at() -> set[str]:
    """The addresses at which a rank listens once the ranks have met."""
    join()
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_listen_to_nobody_elsewhere() -> None:
    first, second = launch(listens_at, (), [WorkerSlot("cpu", None, (), 1)] * 2)
    assert first == {"127.0.0.1"} and second <= {"127.0.0.1"}


def test_connections_that_are_held_use_up_no_files_and_the_clock_answers_after_them() -> None:
    server = ClockServer("127.0.0.1", time.perf_counter_ns)
    probe = ClockProbe(("127.0.0.1", server.port), time.perf_counter_ns)
    assert len(probe.sample(4)) == 4
    with flood(server.port) as told:
        assert told == "ready"
        assert psutil.Process().num_fds() < 100
    until = time.monotonic() + 60
    while not (found := probe.sample(4)) and time.monotonic() < until:
        pass
    assert len(found) == 4
    server.close()
