"""Measure the links between the hosts of a cluster.

Any launcher works that starts one rank on each host.

Tested in tests/cli/test_bench_hosts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.api.bench import Measured, sizes_for, stop_by
from meshwise.api.machines import find_machine
from meshwise.machine.bench import Bench, merged
from meshwise.machine.find import accelerators, find_devices
from meshwise.machine.measure.processes import WHAT, measure_hosts
from meshwise.machine.measure.result import SILENT, Progress, listeners, sent_over
from meshwise.spec.devices import has_streams, parse_devices
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.transfer.collectives import gather_objects
from meshwise.workers.environment import started_by_launcher
from meshwise.workers.join import join, rank_context
from meshwise.workers.launch import launch
from meshwise.workers.node_options import NodeOptions

SECONDS = 60.0


def bench_hosts(
    *,
    what: Sequence[str] = WHAT,
    sizes: str | None = None,
    seconds: float | None = None,
    nodes: NodeOptions | None = None,
    progress: Progress = SILENT,
) -> Bench | None:
    """Measure the paths between hosts, check every byte, and judge the results. Return the bench on the first host, and
    None on all others.

    Every host must call this function, under torchrun, srun or mpirun, or with `nodes`. Raises UsageError if there is
    only one host, or for sizes that do not fit in memory.

    what: what to measure.
    sizes: the sizes of messages, such as `1K:1G`.
    seconds: how long to measure, in all.
    nodes: how the hosts meet, if no launcher started this process.
    progress: callbacks for what is measured now and for each result.
    """
    # One worker on the first accelerator of this host, or on all its cores.
    kind, _ = accelerators()
    slot = find_devices(parse_devices(f"{kind}:0" if has_streams(kind) else "1xcpu"))[0]
    arguments = (sizes_for([slot], sizes), seconds or SECONDS, tuple(what))
    measured, stopped = Measured(progress), None
    if started_by_launcher():
        first = rank_context().world.rank == 0
        _measure_as_host(*arguments, measured.progress if first else SILENT)
        return measured.bench(merged(measured.machines), None) if first else None
    met = None if nodes is None else nodes.rendezvous(1)
    if met is None:
        raise UsageError(
            "--hosts measures between hosts, but only this host takes part. Start meshwise bench --hosts --nnodes 2 "
            "--node-rank 0 --rdzv HOST:29500 on the first host and with --node-rank 1 on the second, or use torchrun."
        )
    try:
        launch(_worker, arguments, [slot], listeners=listeners(measured.progress), nodes=met.nodes)
    except (KeyboardInterrupt, WorkerFailed) as error:
        stopped = stop_by(error)
    met.leave(0)
    if met.leads:
        return measured.bench(merged(measured.machines or [find_machine()]), stopped)
    if stopped is not None:
        raise WorkerFailed(stopped.why, exit_code=stopped.code)
    return None


def _measure_as_host(sizes: tuple[int, ...], seconds: float, what: Sequence[str], progress: Progress) -> None:
    facts = gather_objects((join().world.local_rank, find_machine()))
    progress.found([machine for local_rank, machine in facts if local_rank == 0])
    measure_hosts(sizes, seconds, what, progress)


def _worker(sizes: tuple[int, ...], seconds: float, what: Sequence[str]) -> None:
    """Measure the paths between hosts. Every host runs this function in one worker process.

    Rank 0 alone reports the progress to the process that started its worker.
    """
    session = join()
    _measure_as_host(sizes, seconds, what, SILENT if session.world.rank else sent_over(session.channel))
