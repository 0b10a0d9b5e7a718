"""Exchange JSON messages between each worker and its launcher.

Their connection, the side channel, works even when collectives do not. It carries messages such as done, failed,
progress and halt. Its end tells a worker that its launcher is gone, so that no process is left behind.

It is a pair of connected sockets. The launcher makes it, and the fork server hands one end to the worker, so no other
process can reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

Message = dict[str, Any]
CHANNEL = "MESHWISE_CHANNEL"
"""Environment variable: the file descriptor of a worker's end of its side channel."""


class Line:
    """One end of a side channel, which carries one JSON message a line. Any thread may call `send`."""

    def __init__(
        self,
        connection: socket.socket,
        heard: Callable[[Message], object],
        over: Callable[[], object] = lambda: None,
    ) -> None:
        """heard: called in a thread with each message. over: called in this thread once the channel has ended."""
        self._connection, self._heard, self._over, self._lock = connection, heard, over, threading.Lock()
        threading.Thread(target=self._listen, name="meshwise-channel", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message. If the other end is gone, nothing happens: its process has ended, which is noticed anyway."""
        line = json.dumps({"kind": kind, **facts}, default=str).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(line)

    def close(self) -> None:
        """End the channel."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the connection

    def _listen(self) -> None:
        # If the other process is killed, the connection may be reset, or end within a message.
        with self._connection, self._connection.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._heard(json.loads(line))
        self._over()


class WorkerChannel(Line):
    """A worker's end of the side channel to its launcher.

    `listeners` maps the kind of a message to the function that is called with the message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.listeners: dict[str, Callable[[Message], None]] = {}
        super().__init__(connection, self._tell, end_own_process_group)

    def _tell(self, message: Message) -> None:
        if (listener := self.listeners.get(message["kind"])) is not None:
            listener(message)


def end_own_process_group() -> None:
    """Kill this worker and every process that it started, such as loader workers."""
    if os.getpgid(0) == os.getpid():  # a worker leads its own group: any other process may share its parent's group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def connect(environment: MutableMapping[str, str]) -> WorkerChannel | None:
    """Open the side channel that the environment names. Return None if meshwise did not start this process."""
    number = environment.pop(CHANNEL, None)  # a process that the worker starts does not get this file
    return None if number is None else WorkerChannel(socket.socket(fileno=int(number)))
