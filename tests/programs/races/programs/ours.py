"""Programs that use our own code of streams, one a place: they print what they compute."""

from __future__ import annotations

import contextlib
import os
import tempfile

import torch
from torch import nn

import meshwise as mw


def numbers(count: int = 1 << 20, device: str = "cuda:0") -> torch.Tensor:
    """0, 0.5, 1 and so on."""
    return torch.arange(count, device=device, dtype=torch.float32) * 0.5


def show(*tensors: torch.Tensor) -> None:
    """Print the sum of each."""
    print(*(float(tensor.double().sum()) for tensor in tensors))


def staged_copy() -> None:
    """Between two devices through the host, chunk by chunk."""
    from meshwise.transfer.path import staged

    source, target = numbers(), torch.zeros(1 << 20, device="cuda:1")
    for step in range(3):
        source.add_(step)
        staged(target, source)
        target.mul_(2)
        source.zero_()
        show(target)
        source.copy_(numbers())


def staged_copy_in_pieces() -> None:
    """The same of many small tensors, that come and go, with other work on both devices."""
    from meshwise.transfer.path import staged

    for size in (1 << 18, 1 << 19, 1 << 21, 1 << 18):
        source, target = numbers(size) + 1, torch.empty(size, device="cuda:1")
        staged(target, source)
        del source
        other = torch.full((size,), 7.0, device="cuda:0")
        show(target, other)


def copy_on_a_stream() -> None:
    """mw.copy with a stream of the caller's."""
    stream = torch.cuda.Stream()
    for step in range(3):
        source, host = numbers() + step, torch.zeros(1 << 20, pin_memory=True)
        mw.copy(host, source, stream=stream)
        stream.synchronize()
        print(float(host.sum()))
        target = torch.empty_like(source)
        mw.copy(target, host, stream=stream)
        torch.cuda.current_stream().wait_stream(stream)
        del source
        show(target, torch.full((1 << 20,), 3.0, device="cuda"))


def copy_and_let_go() -> None:
    """mw.copy with a stream, whose source is let go at once and its memory used again."""
    stream, target = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    for step in range(4):
        source = numbers() + step
        mw.copy(target, source, stream=stream)
        del source
        again = torch.full((1 << 20,), -1.0, device="cuda")
        torch.cuda.current_stream().wait_stream(stream)
        show(target, again)


def read_ahead() -> None:
    """Batches that are copied to the device ahead."""
    from meshwise.transfer.prefetch import prefetch

    batches = (((torch.full((1 << 18,), float(step)), torch.arange(1 << 18)), step) for step in range(6))
    weight = torch.ones(1 << 18, device="cuda")
    for (x, y), step in prefetch(batches, "cuda:0"):
        weight.add_(x * y)
        del x, y
        if step == 5:
            show(weight)


def offloaded_activations() -> None:
    """What the backward needs waits in the host's memory."""
    from meshwise.parallel.offload import offload_activations

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(256, 1)).cuda()
    offload_activations(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(numbers(1 << 16).view(256, 256) / (1 << 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss.detach())


def offloaded_optimizer() -> None:
    """Adam's state waits in the host's memory."""
    from meshwise.parallel.offload_state import OffloadedState

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    OffloadedState(optimizer)
    for _ in range(4):
        loss = model(numbers(1 << 16).view(256, 256) / (1 << 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(sum(float(entry["exp_avg"].double().sum()) for entry in optimizer.state.values()))
        show(loss.detach())


def device_collectives() -> None:
    """Scatter, reduce and gather between devices of one process."""
    parts = mw.scatter(numbers(), ["cuda:0", "cuda:1"])
    parts = [part + 1 for part in parts]
    mw.all_reduce(parts, "mean")
    copies = mw.broadcast(parts[0], ["cuda:0", "cuda:1"])
    whole = mw.gather(copies, "cuda:1")
    show(whole, *parts)


def arrays() -> None:
    """An array over two devices."""
    xp = mw.array_namespace("2xcuda")
    x = xp.reshape(xp.arange(40_000, dtype=xp.float64), (200, 200))
    print(float(xp.sum(x @ x.T)), float(xp.max(xp.sort(x, axis=0))))


def timed_copies() -> None:
    """What a copy took, without waiting for it."""
    with mw.comm_log() as log:
        show(mw.to(numbers(), "cuda:1"), mw.to(numbers() + 1, "cuda:1"))
    print(len(log.rows) if hasattr(log, "rows") else "")


def trained_with(**plan: object) -> None:
    """A script with the two lines, as torchrun starts it."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = mw.distribute(
        model, optimizer, loader, plan=mw.Plan(**plan) if plan else None, view="rank"
    )
    for _ in range(2):
        for x, y in loader:
            loss = mw.backward((model(x.cuda()) - y.cuda()).square().mean())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(float(loss))


def trained_data() -> None:
    """ranks: 2"""
    trained_with(data=2)


def trained_shard() -> None:
    """ranks: 2"""
    trained_with(shard=2)


def trained_zero1() -> None:
    """ranks: 2"""
    trained_with(data=2, zero1=True)


def trained_tensor() -> None:
    """ranks: 2"""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("tensor = 2\n")
        file.flush()
        os.environ["MESHWISE_PLAN"] = file.name
        trained_with()


def trained_recompute() -> None:
    """ranks: 2"""
    trained_with(shard=2, recompute="full")


def trained_bf16() -> None:
    """ranks: 2"""
    trained_with(data=2, precision="bf16")


def trained_offload() -> None:
    """ranks: 2"""
    trained_with(data=2, offload=("activations",))


def trained_parts_on_host() -> None:
    """ranks: 2"""
    trained_with(shard=2, offload=("parameters",))


def job(name: str, *settings: str, batch_size: int = 1024, **options: object) -> None:
    """An epoch of a Job, joined as torchrun's ranks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        done = mw.run(name, settings=settings, batch_size=batch_size, epochs=1, **options)
        print(done.status, done.steps, done.metrics)


def job_mlp() -> None:
    """ranks: 2"""
    job("mlp")


def job_saves() -> None:
    """ranks: 2. Checkpoints are written beside the training."""
    job("mlp", "shard=2", save_every=3, keep=1)


def job_digits() -> None:
    """ranks: 2. Microbatches."""
    job("mnist-mlp", "data=2", "accumulate=2", batch_size=8192)


def job_convolutions() -> None:
    """ranks: 2."""
    job("mnist-cnn", batch_size=8192)


def decoder(*settings: str) -> None:
    """A small GPT."""
    job("gpt:tiny", *settings, batch_size=1024)


def job_tensor() -> None:
    """ranks: 2."""
    decoder("tensor=2")


def job_pipeline() -> None:
    """ranks: 2."""
    decoder("pipeline=2", "accumulate=2")


def job_context() -> None:
    """ranks: 2."""
    decoder("context=2")


def job_recompute() -> None:
    """ranks: 2."""
    decoder("shard=2", "recompute=full", "precision=bf16")


def launched() -> None:
    """Workers of our own, forked from a process that has imported what they need."""
    job("mlp", devices="2xcuda", batch_size=4096)
