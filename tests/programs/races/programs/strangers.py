"""Programs as ordinary users write them, for the faults that were planted without having read the checker."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

SIZE = 1 << 18
MARKS = deque[tuple[torch.cuda.Event, torch.cuda.Event]]()


def show(*tensors: torch.Tensor) -> None:
    """Print the sum of each."""
    print(*(float(tensor.detach().double().sum()) for tensor in tensors))


def three_stages() -> None:
    """Chunks of an array go to the device, are worked on and come back, on a stream for each of the three."""
    loading, computing, storing = (torch.cuda.Stream() for _ in range(3))
    source = torch.arange(6.0).repeat_interleave(SIZE).view(6, SIZE).pin_memory()
    result = torch.zeros(6, SIZE, pin_memory=True)
    inputs, outputs = (torch.zeros(2, SIZE, device="cuda") for _ in range(2))
    loaded, computed, stored = ([torch.cuda.Event() for _ in range(2)] for _ in range(3))
    torch.cuda.synchronize()
    for chunk in range(6):
        slot = chunk % 2
        with torch.cuda.stream(loading):
            loading.wait_event(computed[slot])
            inputs[slot].copy_(source[chunk], non_blocking=True)
            loaded[slot].record()
        with torch.cuda.stream(computing):
            computing.wait_event(loaded[slot])
            computing.wait_event(stored[slot])
            torch.add(inputs[slot], 1, out=outputs[slot])
            outputs[slot].square_()
            computed[slot].record()
        with torch.cuda.stream(storing):
            storing.wait_event(computed[slot])
            result[chunk].copy_(outputs[slot], non_blocking=True)
            stored[slot].record()
    torch.cuda.synchronize()
    print(result.double().sum(1).tolist())


def pipeline_of_two_devices() -> None:
    """Two halves of a model on two devices, a stream on each: while the second has one microbatch, the first has the
    next."""
    first, second = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    weights = [torch.full((64, 64), 0.01, device=f"cuda:{index}") for index in range(2)]
    boxes = [torch.zeros(32, 64, device="cuda:1") for _ in range(4)]
    outputs = torch.zeros(4, device="cuda:1")
    for index in range(2):
        torch.cuda.synchronize(index)
    for micro in range(4):
        sent = torch.cuda.Event()
        with torch.cuda.stream(first):
            x = torch.full((32, 64), micro + 1.0, device="cuda:0")
            hidden = (x @ weights[0]).relu()
            boxes[micro].copy_(hidden, non_blocking=True)
            sent.record(first)
        with torch.cuda.stream(second):
            second.wait_event(sent)
            outputs[micro] = (boxes[micro] @ weights[1]).sum()
    second.synchronize()
    print(outputs.tolist())


def all_on_my_own_stream() -> None:
    """The whole work is on a stream that is not the default one, and another one compresses its gradients."""
    work, compressing = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(work):
        total = torch.zeros(SIZE, device="cuda")
        for step in range(5):
            gradient = torch.full((SIZE,), step + 0.5, device="cuda").mul_(2)
            compressing.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(compressing):
                small = gradient.half()
                gradient.record_stream(compressing)
            torch.cuda.current_stream().wait_stream(compressing)
            small.record_stream(work)
            total += small
        show(total)


def rows_into_one_buffer() -> None:
    """A loader that stacks rows into one pinned buffer, again and again."""
    rows = [torch.full((SIZE // 8,), float(row)) for row in range(8)]
    pinned, sent = torch.empty(8, SIZE // 8, pin_memory=True), torch.cuda.Event()
    total = torch.zeros(8, SIZE // 8, device="cuda")
    for step in range(5):
        shifted = [row + step for row in rows]
        sent.synchronize()
        torch.stack(shifted, out=pinned)
        batch = pinned.to("cuda", non_blocking=True)
        sent.record()
        total += batch.square()
    show(total)


def loss_scale_by_hand() -> None:
    """A step is left out where a gradient has overflown; the host looks at a flag that was copied."""
    weight, scale = torch.ones(SIZE, device="cuda"), 2.0**18
    for step in range(6):
        gradient = (weight * (step + 1) * scale).half()
        overflown = torch.isinf(gradient).any().to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        if overflown.item():
            scale /= 4
        else:
            weight -= gradient.float() / scale * 0.01
        print(scale)
    show(weight)


def average_of_the_second_half() -> None:
    """A frozen half on one device, a trained one on the other, and a running average of that on a side stream there."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64).to("cuda:0").requires_grad_(False), nn.Linear(64, 64).to("cuda:1")
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    averaging, average = torch.cuda.Stream("cuda:1"), second.weight.detach().clone()
    for step in range(4):
        loss = second(first(torch.full((8, 64), step + 1.0, device="cuda:0")).to("cuda:1")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaging.wait_stream(torch.cuda.current_stream("cuda:1"))
        with torch.no_grad(), torch.cuda.stream(averaging):
            average.lerp_(second.weight, 0.5)
        torch.cuda.current_stream("cuda:1").wait_stream(averaging)
    show(average, second.weight)


def accuracy_over_ranks() -> None:
    """ranks: 2. Each rank counts what it had right, and the counts are summed."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    guesses, labels = torch.arange(64, device=device) % 4, torch.arange(64, device=device) // (rank + 1) % 4
    counts = torch.tensor([int((guesses == labels).sum()), len(labels)], device=device)
    dist.all_reduce(counts)
    print(counts.tolist())
    dist.destroy_process_group()


def _leaves(tensor: torch.Tensor, host: torch.Tensor, side: torch.cuda.Stream) -> None:
    """Begin to copy a tensor to the host, which its owner may then forget."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)


def gradients_leave() -> None:
    """What is worked out in passing goes to the host on a side stream."""
    side, weight = torch.cuda.Stream(), torch.ones(SIZE, device="cuda")
    hosts = [torch.zeros(SIZE, pin_memory=True) for _ in range(5)]
    for step, host in enumerate(hosts):
        _leaves(weight * (step + 1), host, side)
        weight += weight * 0.5
    side.synchronize()
    print(*(float(host.double().sum()) for host in hosts))
    show(weight)


def timed_steps() -> None:
    """Each step is between two events; its time is asked four steps later, so that nothing waits."""
    x, asked = torch.zeros(1 << 12, device="cuda"), 0
    for step in range(150):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x.add_(step)
        end.record()
        MARKS.append((start, end))
        if len(MARKS) > 4:
            start, end = MARKS.popleft()
            end.synchronize()
            asked += start.elapsed_time(end) >= 0
    show(x)
    print(asked)


def _score(weights: torch.Tensor, to: Connection) -> None:
    """In a process of its own."""
    to.send(weights.square().mean().item())
    to.close()


def scored_beside() -> None:
    """A process is forked to score the weights on the processor while the device goes on."""
    fork = multiprocessing.get_context("fork")
    weights = torch.full((1 << 12,), 3.0, device="cuda")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_score, args=(weights.cpu(), there))
    child.start()
    there.close()
    weights.mul_(2)
    try:
        print(here.recv())
    except EOFError:
        print("no score")
    child.join()
    show(weights)
