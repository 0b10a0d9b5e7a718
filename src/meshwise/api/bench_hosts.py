"""Measure the links between the hosts of a cluster: one rank a host, under any launcher that starts one."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

from meshwise.api.bench import Done, Heard, Tell, sizes_for, stamp, stop_by
from meshwise.api.machines import find_machine
from meshwise.machine.bench import Bench, Stop, bench_of, merged
from meshwise.machine.find import accelerators, find_devices
from meshwise.machine.measure.processes import WHAT, heard_by, measure_hosts, told_to
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.machine import Machine
from meshwise.transfer.collectives import gather_objects
from meshwise.workers.channel import Message
from meshwise.workers.join import join, rank_context, started_by_launcher
from meshwise.workers.launch import Listeners, launch
from meshwise.workers.nodes import NodeOptions

SECONDS = 60.0


def bench_hosts(
    *,
    what: Sequence[str] = WHAT,
    sizes: str | None = None,
    seconds: float | None = None,
    machines: NodeOptions | None = None,
    tell: Tell = lambda text: None,
    done: Done = lambda result: None,
) -> Bench | None:
    """Measure between hosts, check every byte, and judge. None on all hosts but the first.

    Every host calls this: under torchrun, srun or mpirun, or by itself with `machines`. Raises UsageError when it is
    alone, or for sizes that do not fit in memory.
    """
    began, heard = time.perf_counter(), Heard(done)
    slot = _slot()
    arguments = (sizes_for([slot], sizes), seconds or SECONDS, tuple(what))
    if started_by_launcher():
        if rank_context().world.rank:
            tell, heard.done = (lambda text: None), (lambda result: None)
        found = _be_a_host(*arguments, heard.path, tell)
        return _bench(found, heard, began, None) if join().world.rank == 0 else None
    nodes = None if machines is None else machines.rendezvous(1)
    if nodes is None:
        raise UsageError(
            "--hosts measures between hosts, and this one is alone. Start it on each: meshwise bench --hosts "
            "--nnodes 2 --node-rank 0 --rdzv HOST:29500 on the first, --node-rank 1 on the second; or under torchrun."
        )

    measuring = heard_by(heard.path, tell)

    def told(rank: int, message: Message) -> None:
        if message["kind"] == "hosts":
            known.append(pickle.loads(bytes.fromhex(message["machines"])))
        measuring(rank, message)

    known: list[list[Machine]] = []
    stopped = None
    try:
        launch(_worker, arguments, [slot], listeners=Listeners(message=told), nodes=nodes)
    except (KeyboardInterrupt, WorkerFailed) as error:
        stopped = stop_by(error)
    if nodes.node_rank:
        if stopped is not None:
            raise WorkerFailed(stopped.why, exit_code=stopped.code)
        return None
    return _bench(known[0] if known else [find_machine()], heard, began, stopped)


def _slot() -> WorkerSlot:
    """One worker on the first accelerator of this host, or on all its cores."""
    return find_devices(parse_devices("cuda:0" if accelerators()[0] == "cuda" else "1xcpu"))[0]


def _be_a_host(
    sizes: tuple[int, ...], seconds: float, what: Sequence[str], report: Any, tell: Tell, known: Any = None
) -> list[Machine]:
    session = join()
    facts = gather_objects((session.world.local_rank, find_machine()))
    found = [machine for local_rank, machine in facts if local_rank == 0]
    if known is not None:
        known(found)
    measure_hosts(sizes, seconds, what, report, tell)
    return found


def _worker(sizes: tuple[int, ...], seconds: float, what: Sequence[str]) -> None:
    """What the worker of one host does; rank 0's tells its launcher."""
    channel = join().channel
    assert channel is not None  # workers of `launch` always have one

    def known(found: list[Machine]) -> None:
        channel.send("hosts", machines=pickle.dumps(found).hex())

    _be_a_host(sizes, seconds, what, *told_to(channel), known)


def _bench(found: Sequence[Machine], heard: Heard, began: float, stopped: Stop | None) -> Bench:
    machine = merged(found)
    took = time.perf_counter() - began
    return bench_of(machine, heard.results, heard.computed, measured=stamp(machine), seconds=took, stopped=stopped)
