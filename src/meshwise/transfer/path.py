"""Choose the path between two devices: direct, peer, or via host.

- direct: a copy on one device, or between the host and a device
- peer: one device writes into the memory of the other device
- staged: two overlapping copies through pinned host memory

If the machine's links were measured, the faster of peer and staged at the copy's size is taken. Otherwise, the `peer`
flag of the link decides. If no link is known, torch says whether the devices have peer access.
"""

from __future__ import annotations

import torch

from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.machine import HOST, Link, Machine, link_between
from meshwise.spec.timings import seconds_at

AUTO, DIRECT, PEER, STAGED = "auto", "direct", "peer", "staged"
PATHS = (AUTO, DIRECT, PEER, STAGED)


def choose(source: str, target: str, size: int, *, wanted: str = AUTO, links: Machine | None = None) -> str:
    """Choose the path of a copy of `size` bytes between two devices. Raises UsageError if the path is impossible.

    source, target: the names of the devices, such as `host` or `cuda:0`.
    wanted: `auto`, or the path to take.
    links: the machine, as described or measured.
    """
    check_known("path", wanted, PATHS)
    if source == target or HOST in (source, target):
        if wanted in (PEER, STAGED):
            raise UsageError(f"path {wanted!r} copies from device to device, not from {source} to {target}. Omit path.")
        return DIRECT
    if wanted == DIRECT:
        raise UsageError(f"path 'direct' cannot copy from {source} to {target}. Use 'peer' or 'staged', or omit path.")
    link = link_between(links, source, target) if links is not None else None
    if wanted == STAGED:
        return STAGED
    peer = _reaches(link, source, target)
    if wanted == PEER:
        if not peer:
            raise UsageError(f"path 'peer' needs peer access, which {source} and {target} do not have. Use 'staged'.")
        return PEER
    return _faster(link, size) or (PEER if peer else STAGED)


def _faster(link: Link | None, size: int) -> str | None:
    """Return the path that was measured to be faster for a copy of `size` bytes: "peer" or "staged". Returns None if
    one of the paths was not measured, or if the link has no peer access."""
    if link is None or not {PEER, STAGED} <= link.timings.keys() or link.peer is False:
        return None
    peer, staged = (seconds_at(link.timings[path], size) for path in (PEER, STAGED))
    return PEER if peer <= staged else STAGED


def _reaches(link: Link | None, source: str, target: str) -> bool:
    if link is not None and link.peer is not None:
        return link.peer
    ends = [torch.device(source), torch.device(target)]
    return reads_directly(*ends) if all(map(has_streams, ends)) else True  # virtual devices: all in one memory


def reads_directly(reader: torch.device, owner: torch.device) -> bool:
    """Check whether device `reader` can read the memory of device `owner` without going through the host."""
    return bool(torch.get_device_module(reader).can_device_access_peer(reader, owner))
