"""What a step of the whole view costs over DistributedDataParallel by hand: by turns, 2 workers each.

    python bench/whole_overhead.py [--rounds 12] [--seconds 1] [--only WORD] [--memory]

Both sides read the same data sample by sample through a DataLoader, DDP's with a DistributedSampler. "loss read" calls
`loss.item()` after each backward; "accuracy read" also reads the number of right rows in each step, where DDP reads its
own part alone. "through" is the same model kept from running apart.

Claim: at 2.5 ms at most 1.15 with the loss read, 1.6 with an accuracy; at 25 ms 1.05; through 2.0. The small MLP shows
what the view adds to a step, some 0.3 ms, where little else is in it: no bound.

With `--memory`, the peak of what torch's CPU allocator holds on rank 0 instead, from the making of the model on, in the
first steps and in those after: at most 1.10 of DDP's after.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from keep import RESULTS, keep, ratio_interval
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
import meshwise as mw
from meshwise.training.process.session import default_engine
from meshwise.training.whole import call
from meshwise.training.whole.proof import Verdict
from meshwise.workers.join import join
from tests.pool import Pool

Step = Callable[[], None]
WARM = 70  # the first 64 calls of a model are looked at more often


class Blocks(nn.Module):
    """A GPT of so many layers."""

    def __init__(self, layers: int = 12, width: int = 64, words: int = 1000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(1, 32, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    """Attention and two wide layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, 4, c // 4).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.back(y)
        return x + self.wide(self.two(x))


def words(vocabulary: int, length: int, rows: int) -> TensorDataset:
    """Rows of words, and the same one word on."""
    x = torch.randint(vocabulary, (rows, length + 1))
    return TensorDataset(x[:, :-1].clone(), x[:, 1:].clone())


def pictures(shape: tuple[int, ...], rows: int) -> TensorDataset:
    """Noise, and labels."""
    return TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))


def cnn() -> nn.Module:
    """Two convolutions."""
    convolved = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*convolved, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10))


def lm() -> nn.Module:
    """Words to words."""
    return nn.Sequential(nn.Embedding(8000, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 8000))


def mlp(hidden: int = 384) -> nn.Module:
    """One hidden layer; with 384 numbers in it, a step by DDP takes some 2.5 ms on two quiet cores, with 128 1.5 ms."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], int]] = {
    "MLP": (mlp, lambda: pictures((1, 28, 28), 4096), 64),
    "small MLP": (partial(mlp, 128), lambda: pictures((1, 28, 28), 4096), 64),
    "CNN": (cnn, lambda: pictures((1, 28, 28), 4096), 256),
    "LM of 8,000 words": (lm, lambda: words(8000, 64, 1024), 8),
    "GPT of 12 layers": (Blocks, lambda: words(1000, 32, 1024), 8),
}
BOUNDS = {"MLP": 1.15, "MLP, accuracy read": 1.6, "CNN": 1.05, "LM of 8,000 words": 1.05, "GPT of 12 layers": 1.05}
ROWS = [
    *((name, "loss read") for name in JOBS),
    ("MLP", "accuracy read"),
    ("MLP", "through"),
    ("GPT of 12 layers", "through"),
]


def endless(loader: Any) -> Any:
    """Epoch after epoch."""
    while True:
        yield from loader


def side(name: str, what: str, *, whole: bool) -> Step:
    """A step of one side."""
    torch.manual_seed(0)
    make, data, size = JOBS[name]
    model, rows, world = make(), data(), join().world
    if whole:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader: Any = DataLoader(rows, size, shuffle=True)
        model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")
    else:
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(rows, size // world.size, sampler=DistributedSampler(rows))
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) if out.dim() > 2 else F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if what == "accuracy read":
            (out.argmax(-1) == y).sum().item()

    return step


def turn(folder: str, name: str, what: str, whole: bool, steps: int) -> tuple[float, float, str]:
    """The median time of a step in a turn of so many, the main thread's, and how the model runs."""
    sys.path[:0] = [] if folder in sys.path else [folder]
    here = importlib.import_module("whole_overhead")
    torch.set_num_threads(1)
    if what == "through":
        call.prove = lambda *_: Verdict(why="kept from it")
    step = here.side(name, what, whole=whole)
    for _ in range(WARM):
        step()
    took = []
    for _ in range(steps):
        start, before = time.perf_counter(), time.thread_time()
        step()
        took.append((time.perf_counter() - start, time.thread_time() - before))
    wall, cpu = (statistics.median(each) for each in zip(*took, strict=True))
    return wall, cpu, here.runs() if whole else ""


def runs() -> str:
    """How the models of the program run."""
    return str({kind: v.why or "apart" for kind, v in default_engine().whole.divided.verdicts.items()})


def peaks(folder: str, name: str, whole: bool) -> tuple[float, float]:
    """The most MiB that torch's CPU allocator holds in the first steps, and in the steps after."""
    sys.path[:0] = [] if folder in sys.path else [folder]
    here = importlib.import_module("whole_overhead")
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = here.side(name, "loss read", whole=whole)
        for _ in range(WARM):
            step()
        with record_function("after"):
            for _ in range(5):
                step()
    events = profiler.profiler.kineto_results.events()
    begun = next(event.start_ns() for event in events if event.name() == "after")
    held, most = 0, [0, 0]
    for start, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        most[start >= begun] = max(most[start >= begun], held)
    return most[0] / 2**20, most[1] / 2**20


def memory_of(name: str, whole: bool, rounds: int) -> dict[str, float]:
    """Medians of one side's peaks, in workers of their own, and how far those of the steps after lie apart."""
    each = []
    for _ in range(rounds):
        pool = Pool(2)
        each.append(pool.run(peaks, str(Path(__file__).parent), name, whole)[0])
        pool.close()
    first, after = zip(*each, strict=True)
    return {
        "first_mib": statistics.median(first),
        "mib": statistics.median(after),
        "spread_mib": max(after) - min(after),
    }


def compare_memory(name: str, rounds: int) -> dict[str, Any]:
    """Both sides' peaks, and their ratios."""
    ours, theirs = memory_of(name, True, rounds), memory_of(name, False, rounds)
    ratios = {"ratio": ours["mib"] / theirs["mib"], "first_ratio": ours["first_mib"] / theirs["first_mib"]}
    return ratios | {"whole": ours, "ddp": theirs}


def compare(name: str, what: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Both sides by turns, each in workers of its own, new ones every 4 turns: ratio of the medians of turns, and its
    interval."""
    sides, steps, said = [Pool(2), Pool(2)], 5, ""
    walls: tuple[list[float], list[float]] = ([], [])
    cpus: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        if number % 4 == 1 and number > 1:  # memory lies elsewhere in other processes
            for pool in sides:
                pool.close()
            sides = [Pool(2), Pool(2)]
        for which in (0, 1) if number % 2 else (1, 0):
            wall, cpu, told = sides[which].run(turn, str(Path(__file__).parent), name, what, not which, steps)[0]
            said = told or said
            if number:
                walls[which].append(wall)
                cpus[which].append(cpu)
            else:
                steps = max(int(seconds / wall), 5)
    for pool in sides:
        pool.close()
    ratio, low, high = ratio_interval(*walls)
    cpu = statistics.median(a / b for a, b in zip(*cpus, strict=True))
    ms = [statistics.median(each) * 1e3 for each in walls]
    found = {"ratio": ratio, "low": low, "high": high, "whole_ms": ms[0], "ddp_ms": ms[1]}
    return found | {"cpu_ratio": cpu, "runs": said}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--only", default="", help="rows with this word")
    parser.add_argument("--memory", action="store_true", help="measure the memory of the rows whose loss is read")
    options = parser.parse_args()
    kept = RESULTS / "whole_overhead.json"
    result = json.loads(kept.read_text()) if kept.exists() else {}
    measured, memory = result.get("measured", {}), result.get("memory", {})
    for name, what in ROWS:
        row = f"{name}, {what}"
        if options.only not in row or (options.memory and what != "loss read"):
            continue
        if options.memory:
            memory[name] = compare_memory(name, options.rounds)
            print(f"{name:20} {memory[name]}", flush=True)
            keep("whole_overhead", {"measured": measured, "memory": memory})
            continue
        figures = compare(name, what, options.rounds, options.seconds)
        measured[row] = figures
        print(
            f"{row:32} {figures['ratio']:.3f}  [{figures['low']:.3f}, {figures['high']:.3f}]  "
            f"{figures['whole_ms']:.2f} ms against {figures['ddp_ms']:.2f} ms, CPU {figures['cpu_ratio']:.3f}",
            flush=True,
        )
        keep("whole_overhead", {"measured": measured, "memory": memory})


if __name__ == "__main__":
    main()
