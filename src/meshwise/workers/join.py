"""Join a run: read the environment, take a device, initialize torch.distributed.

By default, gloo listens at the address to which the machine's own name resolves. On many machines this is a loopback
address (Debian writes 127.0.1.1 into /etc/hosts), or the name has no address. Other machines cannot reach the rank
then. `interface_towards` finds the network interface that gloo must use.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.torch_compat.driver import shown_gpus
from meshwise.torch_compat.reducer import default_store
from meshwise.workers import divergence
from meshwise.workers.channel import WorkerChannel, connect
from meshwise.workers.environment import LISTENER, VISIBLE, read_world, visible
from meshwise.workers.gate import StepGate
from meshwise.workers.place import address_of, place_in
from meshwise.workers.places.place import ALONE, Place
from meshwise.workers.rendezvous import OTHER_PORT, reached, served
from meshwise.workers.stopping import agree_to_stop

ANYWHERE = "192.0.2.1"
"""A reserved address that no host has. The route to it shows by which interface packets leave this machine."""


@dataclass(frozen=True)
class RankContext:
    """What this process knows about its run.

    world: the rank of this process, and the number of ranks.
    channel: the side channel to the launcher. None if meshwise's launcher did not start this process.
    gate: counts the steps of this rank, and can stop all ranks after the same step.
    place: the position of this process among the processes that a launcher such as srun has started.
    """

    world: World
    channel: WorkerChannel | None
    gate: StepGate
    place: Place = ALONE


_session: RankContext | None = None
_made_group = _stands = False
_store: object = None  # keeps the store alive until this process ends


def rank_context() -> RankContext:
    """Return what this process knows about its run, without joining the process group.

    The first call chooses the device and opens the side channel to the launcher.
    """
    global _session
    if _session is None:
        place = place_in(os.environ)
        os.environ.update(place.variables() | os.environ)
        world = read_world(os.environ)
        if place.size > 1 and place.key and place.address is None:
            _meet(place, address_of(place))
        world = _take_device(world)
        channel = connect(os.environ)
        _session = RankContext(world, channel, StepGate(channel), place)
    return _session


def _meet(place: Place, address: tuple[str, int]) -> None:
    """Set MASTER_ADDR and MASTER_PORT. Serve the store there on rank 0; on other ranks, wait for it."""
    global _store
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    if place.rank == 0:
        _store = served(address, place.key)
        return
    try:
        reached(address, place.key, f"rank {place.rank} of {place.size}")
    except OSError as error:
        raise UsageError(f"rank {place.rank} of {place.size} did not find rank 0: {error}. {OTHER_PORT}") from None


@contextlib.contextmanager
def standing_for(context: RankContext) -> Iterator[None]:
    """Inside the `with` block, let this process act as the rank of `context`. A rehearsal uses this to act as one rank
    of a larger run."""
    global _session, _stands
    before, (_session, _stands) = (_session, _stands), (context, True)
    try:
        yield
    finally:
        _session, _stands = before


def join() -> RankContext:
    """Join the process group of all ranks. Return what this process knows about its run.

    The call is collective if the process group must be made.
    """
    session = rank_context()
    if session.world.size > 1 and not dist.is_initialized():
        enter_process_group(session.world)
        if session.channel is None:
            divergence.begin(session.world, default_store())
            if session.world.rank == 0 and (told := session.place.told(session.world.size)):
                print(told, file=sys.stderr, flush=True)
    if session.channel is None and not _stands:
        agree_to_stop(session.world, session.gate)
    return session


def rejoin() -> None:
    """Destroy the process group that the program itself has made, and make a new process group. Does nothing if
    meshwise made the process group. Collective.

    The program's process group may have no backend for CPU tensors, which meshwise needs.
    """
    if dist.is_initialized() and not (_made_group or _stands) and rank_context().world.size > 1:
        store = default_store()
        dist.destroy_process_group()
        enter_process_group(rank_context().world, dist.PrefixStore("meshwise/again", store))  # type: ignore[attr-defined]


def made_process_group() -> bool:
    """Check whether `join`, and not the program, made the process group that this process is or was in."""
    return _made_group


def _take_device(world: World) -> World:
    """Make this worker see only its own accelerator, if possible, as `cuda:0`.
    Return `world` with this device."""
    given = os.environ.get(VISIBLE)
    if not world.device and world.size > 1:
        _see_one_gpu(world.local_rank)  # before the first use of the driver, which reads the environment once
    kind = world.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = "cuda:0" if kind == "cuda" else kind
    if kind == "cuda" and (world.size > 1 or world.device):
        if world.size > 1 and shown_gpus() > 1:
            device = f"cuda:{world.local_rank}"  # the driver was used before meshwise: all devices stay visible
            os.environ.pop(VISIBLE, None)
            os.environ |= {} if given is None else {VISIBLE: given}
        torch.cuda.set_device(torch.device(device))
    return World(world.rank, world.size, world.local_rank, world.local_size, device, given=bool(world.device))


def _see_one_gpu(local_rank: int) -> None:
    count = torch.cuda.device_count()  # torch asks NVML, if possible, which leaves CUDA uninitialized
    if count < 2:  # nothing to choose: no GPU is visible, or only one, perhaps chosen by the parent process
        return
    if local_rank >= count:
        raise UsageError(f"torch finds only {count} GPUs, so local rank {local_rank} has none. Start fewer processes.")
    if not torch.cuda.is_initialized():
        os.environ[VISIBLE] = visible(local_rank)


def enter_process_group(world: World, store: Any = None) -> None:
    """Make the process group, with gloo for CPU tensors and, if there is CUDA, nccl for CUDA tensors."""
    global _made_group
    _refuse_without_rank_0(world)
    alone = world.local_size == world.size  # then use `lo`, since this machine's host name may not resolve
    interface = "lo" if alone else interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Pipeline stages send in separate groups, one for each direction, so NCCL's warning about ordering does not apply.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    backend = "cpu:gloo,cuda:nccl" if world.kind == "cuda" else "gloo"
    device = torch.device(world.device) if world.kind == "cuda" else None
    _made_group = True
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(minutes=30),
        device_id=device,
    )
    atexit.register(leave)


def _refuse_without_rank_0(world: World) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"RANK={world.rank} and WORLD_SIZE={world.size} are set without {' and '.join(missing)}, so rank 0 cannot "
            "be found. Start all ranks with meshwise run, torchrun or srun. For one process, unset RANK and WORLD_SIZE."
        )


def store_of_ranks() -> Any:
    """Return a connection to a key-value store that all ranks can reach before there is a process group. If torchrun
    starts the ranks again, they do not see the keys of the earlier start.

    Raises UsageError if MASTER_ADDR or MASTER_PORT is not set.
    """
    global _store
    world = rank_context().world
    _refuse_without_rank_0(world)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store
    serves = world.rank == 0 and not agents
    store = dist.TCPStore(*address, None, serves, wait_for_workers=False, multi_tenant=serves)  # type: ignore[attr-defined]
    if serves and _store is None:  # keep the store alive: it serves until this process ends
        _store = store
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"meshwise/start-{start}", store)  # type: ignore[attr-defined]


def keep_store() -> None:
    """On rank 0, serve the process group's store on a socket that the launcher opened, so that no other program takes
    the port. A process group that is made with MASTER_ADDR and MASTER_PORT uses this store."""
    global _store
    listener = os.environ.pop(LISTENER, None)
    if listener is not None:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            *address, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=int(listener)
        )


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def interface_towards(host: str) -> str | None:
    """Return the network interface that gloo must use to reach `host`, such as `eth0`.
    None if gloo needs no hint."""
    own = dict[str, str]()
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo":
            own |= {each.address: name for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)}
    if _address_of(socket.gethostname()) in own:
        return None
    for target in (host, ANYWHERE):
        if (found := own.get(source_of(target))) is not None:
            return found
    up = psutil.net_if_stats()
    return next((name for name in own.values() if name in up and up[name].isup), None)


def _address_of(host: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None)[0][4][0])
    return ""


def source_of(host: str) -> str:
    """Return the address from which this machine would send a packet to `host`, or "".
    No packet is sent."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""
