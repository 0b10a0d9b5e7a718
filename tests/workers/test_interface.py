"""Which interface gloo is told to take, and where it is left its own choice."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from meshwise.workers import join

CARDS = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.7", "fe80::1%eth0"],
    "ib0": ["10.1.0.7"],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with these cards; what it gives back, name to address, is what resolves there."""
    names, routes = {"10.1.0.1": "10.1.0.1"}, {"10.1.0.1": "10.1.0.7", join.ANYWHERE: "10.0.0.7"}

    def address(text: str) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=socket.AF_INET6 if ":" in text else socket.AF_INET)

    cards = {name: [address(text) for text in texts] for name, texts in CARDS.items()}
    monkeypatch.setattr(join.psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(join.psutil, "net_if_stats", lambda: {n: SimpleNamespace(isup=n != "docker0") for n in CARDS})
    monkeypatch.setattr(join.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(join, "_address_of", lambda host: names.get(host, ""))
    monkeypatch.setattr(join, "source_of", lambda host: routes.get(names.get(host, host), ""))
    return names


def test_a_name_with_an_address_of_the_machine_is_glooss_own_choice(machine: dict[str, str]) -> None:
    machine["here"] = "10.0.0.7"
    assert join.interface_towards("10.1.0.1") is None


@pytest.mark.parametrize("own", ["", "127.0.1.1", "198.51.100.9"])
def test_else_it_is_the_one_that_leads_to_rank_0(own: str, machine: dict[str, str]) -> None:
    if own:
        machine["here"] = own
    assert join.interface_towards("10.1.0.1") == "ib0"


def test_where_rank_0_is_here_it_is_the_way_out(machine: dict[str, str]) -> None:
    assert join.interface_towards("127.0.0.1") == "eth0"


def test_without_a_way_out_it_is_one_that_is_up(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "source_of", lambda host: "")
    assert join.interface_towards("nowhere") == "eth0"


def test_no_packet_is_needed_to_know_the_way() -> None:
    assert join.source_of("127.0.0.1") == "127.0.0.1"
    assert join.source_of("no-such-host.invalid") == ""
