"""More programs that use our own code of streams, for the faults that were planted without having read the checker."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import meshwise as mw

SIZE = 1 << 20


def show(*tensors: torch.Tensor) -> None:
    """Print the sum of each."""
    print(*(float(tensor.double().sum()) for tensor in tensors))


class Foreign:
    """An array of another library on the device: its memory, and the stream on which that one writes it."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__: dict[str, Any] = {
            **tensor.__cuda_array_interface__,
            "version": 3,
            "stream": stream.cuda_stream,
        }


def foreign_array() -> None:
    """An array that another library writes on a stream of its own, and says so."""
    theirs, memory, target = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    for step in range(4):
        theirs.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(theirs):
            memory.fill_(step + 0.5)
            memory.mul_(3)
        mw.copy(target, Foreign(memory, theirs))
        show(target)


def verified_copy() -> None:
    """A copy on a stream of the caller's into pinned memory, checked at once."""
    stream, host = torch.cuda.Stream(), torch.zeros(SIZE, pin_memory=True)
    for step in range(3):
        mw.copy(host, torch.full((SIZE,), step + 1.5, device="cuda"), stream=stream, verify=True)
        print(float(host.double().sum()))


def staged_from_a_side_stream() -> None:
    """Through the host, of what a side stream made, whose memory goes back to that stream at once."""
    from meshwise.transfer.path import staged

    making, main = torch.cuda.Stream(), torch.cuda.current_stream()
    target = torch.zeros(SIZE, device="cuda:1")
    for step in range(4):
        with torch.cuda.stream(making):
            source = torch.full((SIZE,), step + 1.0, device="cuda:0")
        main.wait_stream(making)
        staged(target, source)
        del source
        with torch.cuda.stream(making):
            again = torch.full((SIZE,), -1.0, device="cuda:0")
        main.wait_stream(making)
        show(target, again)


def read_ahead_for_long() -> None:
    """Many batches that are copied to the device ahead."""
    from meshwise.transfer.prefetch import prefetch

    batches = (((torch.full((1 << 16,), float(step)), torch.arange(1 << 16)), step) for step in range(60))
    total = torch.zeros(1 << 16, device="cuda")
    for (x, y), _ in prefetch(batches, "cuda:0"):
        total.add_(x * (y % 7))
        del x, y
    show(total)


def launched_and_quiet() -> None:
    """Workers of our own, forked from a process that has imported what they need; only numbers are printed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(sys.stderr):
            done = mw.run("mlp", devices="2xcuda", batch_size=4096, epochs=1)
        print(done.status, done.steps, done.metrics)


def summed_over_devices() -> None:
    """Tensors of one process, one on each device, summed by NCCL."""
    for step in range(3):
        parts = [torch.full((SIZE,), step + index + 1.0, device=f"cuda:{index}") for index in range(2)]
        mw.all_reduce(parts)
        show(*parts)


def exchanged() -> None:
    """ranks: 2. What both ranks have is exchanged, as the stages of a pipeline do, and used at once."""
    from meshwise.torch_compat.collectives import send_receive

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    total = torch.zeros(SIZE, device=device)
    for step in range(4):
        mine, theirs = torch.full((SIZE,), step + rank + 1.0, device=device), torch.zeros(SIZE, device=device)
        send_receive([(mine, 1 - rank)], [(theirs, 1 - rank)], dist.group.WORLD)
        total.add_(theirs)
    show(total)
    torch.cuda.synchronize()
    dist.destroy_process_group()
