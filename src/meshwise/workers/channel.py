"""Exchange JSON messages between each worker and its launcher.

Their connection, the side channel, works even when collectives do not. It carries messages such as done, failed,
progress and halt. A closed channel is a message too: it tells the launcher that a worker is gone, or a worker that its
launcher is gone, so that no process is left behind.

It is a Unix socket in the temporary folder of the launch, which no other user can enter. The kernel says which user is
at the other end, and nobody but this user is heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Message = dict[str, Any]
ADDRESS = "MESHWISE_CHANNEL"
"""Environment variable: the path of the launcher's socket."""
CONNECT_TIMEOUT = 30.0  # seconds for a worker to reach its launcher
LONGEST = 100  # bytes in the path of a Unix socket; the kernel allows 107
CREDENTIALS = struct.Struct("3i")  # the process, user and group at the other end


class Line:
    """A connection that carries one JSON message a line. Any thread may call `send`, but only one `receive`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._lines = connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection is lost."""
        line = json.dumps(message, default=str).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def receive(self) -> Message | None:
        """Wait for the next message. Return None if the other end has closed the connection."""
        line = self._lines.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the connection. A thread that waits for a message wakes up."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread
        self._lines.close()
        self._connection.close()


class WorkerChannel:
    """A worker's end of the side channel to its launcher. Any thread may call `send`.

    `listeners` maps the kind of a message to the function that is called with the message.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.listeners: dict[str, Callable[[Message], None]] = {}
        threading.Thread(target=self._listen, name="meshwise-channel", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        self._line.send({"kind": kind, **facts})

    def _listen(self) -> None:
        # If the launcher was killed, the connection may be reset or end within a message.
        with contextlib.suppress(OSError, ValueError):
            while message := self._line.receive():
                listener = self.listeners.get(message["kind"])
                if listener is not None:
                    listener(message)
        end_own_process_group()


def end_own_process_group() -> None:
    """Kill this worker and every process that it started, such as loader workers."""
    if os.getpgid(0) == os.getpid():  # a worker leads its own group: any other process may share its parent's group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def connect(environment: Mapping[str, str], rank: int) -> WorkerChannel | None:
    """Connect to the side channel that the environment names. Return None if meshwise did not start this process."""
    address = environment.get(ADDRESS)
    if address is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_TIMEOUT)
    with _short(Path(address)) as path:
        connection.connect(path)
    connection.settimeout(None)
    channel = WorkerChannel(Line(connection))
    channel.send("hello", rank=rank)
    return channel


class LauncherChannel:
    """The launcher's end of the side channel to its workers: one listening socket, and one thread per worker."""

    def __init__(self, folder: Path, deliver: Callable[[int, Message], None]) -> None:
        """folder: a folder that only this user can enter. deliver: called with the rank and each of its messages."""
        self._deliver = deliver
        self._lines: dict[int, Line] = {}
        self._over = False
        self._server = socket.socket(socket.AF_UNIX)
        self.address = str(folder / "channel")
        with _short(folder / "channel") as path:
            self._server.bind(path)
        self._server.listen(512)
        threading.Thread(target=self._run, name="meshwise-channels", daemon=True).start()

    def send(self, rank: int, kind: str, **facts: Any) -> None:
        line = self._lines.get(rank)
        if line is not None:
            with contextlib.suppress(OSError):  # if the worker is gone, its closed connection reports this
                line.send({"kind": kind, **facts})

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which closes the socket
        for line in tuple(self._lines.values()):
            line.close()

    def _run(self) -> None:
        while not self._over:
            try:
                connection, _ = self._server.accept()
            except OSError:  # the socket is shut down, or too many files are open
                time.sleep(0.01)
                continue
            if is_own(connection):
                line = Line(connection)
                threading.Thread(target=self._serve, args=(line,), name="meshwise-channel", daemon=True).start()
            else:
                connection.close()
        self._server.close()

    def _serve(self, line: Line) -> None:
        rank: int | None = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is lost, or no worker
            while message := line.receive():
                if rank is None:
                    rank = int(message["rank"])
                    self._lines[rank] = line
                self._deliver(rank, message)
        line.close()
        if rank is not None:
            self._deliver(rank, {"kind": "closed"})


def is_own(connection: socket.socket) -> bool:
    """Check whether the process at the other end of a Unix socket belongs to this user."""
    if not hasattr(socket, "SO_PEERCRED"):  # on macOS, the mode of the folder must do
        return True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(told)[1] == os.geteuid())


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a path to the same socket that is short enough for the kernel."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
