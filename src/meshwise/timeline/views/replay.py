"""Write one collective of a run as a script of its own.

The script needs only torch; it repeats the collective with the same kind, bytes, dtype and ranks, and times it.

Only collectives: a run records no shapes of kernels and operators. Tested in tests/timeline/views/test_replay.py.
"""

from __future__ import annotations

from meshwise.spec.bandwidth import FACTORS
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text, plural, seconds_text
from meshwise.timeline.run_report import CollectiveReport, Report
from meshwise.timeline.spans import collective_name

CALLS = {
    "all-reduce": ("tensor = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)", "dist.all_reduce(tensor)"),
    "broadcast": ("tensor = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)", "dist.broadcast(tensor, src=0)"),
    "reduce": ("tensor = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)", "dist.reduce(tensor, dst=0)"),
    "all-gather": (
        "whole = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)\n    part = whole.chunk(RANKS)[rank].clone()\n"
        "    all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor  # since torch 2.13",
        "all_gather(whole, part)",
    ),
    "reduce-scatter": (
        "whole = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)\n    part = whole.chunk(RANKS)[rank].clone()\n"
        "    reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor",
        "reduce_scatter(part, whole)",
    ),
    "all-to-all": (
        "tensor = torch.zeros(ELEMENTS, dtype=DTYPE, device=device)\n    out = torch.empty_like(tensor)",
        "dist.all_to_all_single(out, tensor)",
    ),
    "barrier": ("", "dist.barrier()"),
}
"""For each collective: the code that makes its tensors, and the call. The whole tensor has ELEMENTS elements."""
DIVIDED = ("all-gather", "reduce-scatter", "all-to-all")
MOST, FEWEST = 200, 20  # repetitions
SCRIPT = '''"""{what}, repeated.

{source}
    torchrun --nproc-per-node {ranks} replay.py
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

RANKS, ELEMENTS, DTYPE = {ranks}, {elements}, torch.{dtype}{unknown}
REPEAT, IN_THE_RUN = {repeat}, {seconds:.9f}  # times; seconds, median
ON_ACCELERATOR = {on_accelerator}
BUS_BYTES = {bus}  # what a link carries, as nccl-tests count it


def main():
    device, backend = torch.device("cpu"), "gloo"
    if ON_ACCELERATOR:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator()
        backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"started on {{dist.get_world_size()}} ranks: use torchrun --nproc-per-node {{RANKS}}")
    {prepare}
    times = []
    for repetition in range(5 + REPEAT):
        dist.barrier()
        if ON_ACCELERATOR:
            torch.accelerator.synchronize()
        began = time.perf_counter()
        {call}
        if ON_ACCELERATOR:
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(times[5:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        slowest = slowest.tolist()
        median = statistics.median(slowest)
        print("{what}")
        for name, seconds in (("here", median), ("in the run", IN_THE_RUN)):
            bus = f"   bus {{BUS_BYTES / seconds / 1e9:.3f}} GB/s" if BUS_BYTES and seconds else ""
            print(f"{{name:12}}median {{seconds * 1e3:.3f}} ms{{bus}}")
        print(f"{{'':12}}{{min(slowest) * 1e3:.3f}} to {{max(slowest) * 1e3:.3f}} ms in {{REPEAT}} times here")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def replay_script(report: Report, what: str) -> str:
    """Return a script that repeats one collective of the run.

    what: which collective to repeat, such as `collective:3` for the third in the report.

    Raises UsageError if the run does not have this collective, or if its size is unknown.
    """
    kind, _, number = what.partition(":")
    if kind == "kernel":
        raise UsageError(f"--replay {what}: kernels cannot be replayed, as their shapes are unknown. Use collective:1.")
    if kind != "collective" or not number.isdigit() or not 1 <= int(number) <= len(report.collectives):
        known = "; ".join(f"collective:{at} {_named(c)}" for at, c in enumerate(report.collectives, 1))
        raise UsageError(f"--replay {what} is not a collective of this run. Use {known or 'another run: it has none'}.")
    found = report.collectives[int(number) - 1]
    if found.name not in CALLS or not (found.bytes or found.name == "barrier"):
        raise UsageError(f"--replay {what}: the size of {_named(found)} was not recorded. Choose another collective.")
    return _script(report, found)


def _script(report: Report, found: CollectiveReport) -> str:
    ranks, dtype = len(report.ranks), found.dtype or "uint8"
    elements = max(found.bytes // BYTES_OF.get(dtype, 1), 1)
    if found.name in DIVIDED:
        elements = -(-elements // ranks) * ranks
    prepare, call = CALLS[found.name]
    factor = FACTORS[found.name](ranks) if found.name in FACTORS else 0.0
    count = plural(found.count, "time")
    source = f"Made by meshwise from {report.folder}: there it ran {count}, in {seconds_text(found.seconds)} (median)."
    return SCRIPT.format(
        what=f"{_named(found)}, on {ranks} ranks",
        source=source,
        ranks=ranks,
        elements=elements,
        dtype=dtype,
        unknown="" if found.dtype else "  # the run did not record its dtype",
        repeat=min(max(found.count, FEWEST), MOST),
        seconds=found.seconds,
        bus=round(factor * found.bytes),
        on_accelerator=any("cpu" not in rank.device for rank in report.ranks),
        prepare=prepare or "pass",
        call=call,
    )


BYTES_OF = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    "complex128": 16,
}
"""Bytes per element of a dtype. A dtype that is not listed has one byte."""


def _named(found: CollectiveReport) -> str:
    """Describe a collective: `all-reduce of gradients, 1.0 MiB of float32`."""
    dtype = f" of {found.dtype}" if found.dtype else ""
    return f"{collective_name(found.name, found.of)}, {bytes_text(found.bytes)}{dtype}"
