"""Ports at which processes of a run listen. The port of a start: test_places.py."""

from __future__ import annotations

import socket

import pytest

from meshwise.workers.ports import LISTENING_PORTS, listening


def test_a_port_is_held_from_when_it_is_chosen() -> None:
    with listening("127.0.0.1") as server:
        with pytest.raises(OSError):
            socket.create_server(server.getsockname())
        assert server.getsockname()[0] == "127.0.0.1" and server.getsockname()[1] in LISTENING_PORTS
    with listening() as everywhere, socket.create_connection(("127.0.0.1", everywhere.getsockname()[1])):
        pass
