"""Break a link silently, as when a cable is pulled.

`--fault drop-link` does this. `--fault reset-link` closes the link instead, so that both ends notice.

To break a connection to a peer, its file descriptor is replaced by a socket that is connected to nothing. The real
socket stays open, so that the peer does not notice an end.
Tested in tests/injection/test_faults.py and tests/faults/test_disks_and_links.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwise.workers.channel import ADDRESS

FDS = Path("/dev/fd")


def connections_to_peers() -> list[int]:
    """Return the file descriptors of this process's TCP connections, except those to the process group's store and to
    the launcher."""
    known = os.environ.get("MASTER_PORT", "0"), os.environ.get(ADDRESS, "").rpartition(":")[2] or "0"
    return [fd for fd, ends in _connections() if not {*map(int, known)} & {*ends}]


def _connections() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the file descriptor of each TCP connection, with the port numbers of both ends."""
    for fd in _open_files():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield fd, (each.getsockname()[1], each.getpeername()[1])


def freeze(connections: Sequence[int]) -> None:
    """Stop all data on these connections, in both directions, without closing them."""
    polls = _polls()
    for fd in connections:
        mine, _ = (end.detach() for end in socket.socketpair())  # its other end stays open, as does what was here
        os.dup(fd)
        waited = [poll for poll in polls if _taken_out(poll, fd)]
        os.dup2(mine, fd)
        os.close(mine)
        for poll in waited:  # its owner takes it out again when it closes it
            poll.register(fd, 0)


def close(connections: Sequence[int]) -> None:
    """Shut down network connections of this process. The processes at both ends then get an error or an end of file."""
    for fd in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
            each.shutdown(socket.SHUT_RDWR)


def _polls() -> list[select.epoll]:
    """Return copies of this process's epoll objects, with which threads of libraries wait for data on connections."""
    found = []
    for fd in _open_files():
        with contextlib.suppress(OSError):
            if str((FDS / str(fd)).readlink()) == "anon_inode:[eventpoll]":
                found.append(select.epoll.fromfd(os.dup(fd)))
    return found


def _open_files() -> list[int]:
    return [int(path.name) for path in FDS.iterdir()]


def _taken_out(poll: select.epoll, fd: int) -> bool:
    try:
        poll.unregister(fd)
    except OSError:
        return False
    return True
