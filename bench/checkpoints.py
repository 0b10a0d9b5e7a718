"""What saving costs: a checkpoint stops training for one copy of the state, and is read back at the speed of memory.

    python bench/checkpoints.py [--gigabytes 4] [--saves 15]

hash: GB/s of hashes on one core, of what is in memory. stall: how long `save` holds the training, against one copy of
the same tensors, in turns (one process, Adam). behind: steps while a checkpoint is written against steps while none is,
in turns. verify: GB/s of reading and comparing a checkpoint, its files in the page cache, on one core. memory: the most
that each of four processes held above what Python and torch take, against its part of the state, while it saves a model
of so many GB under shard=4, loads it, and while two load it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from keep import RESULTS, keep, ratio_interval
from quiet import favoured
from torch import nn

import meshwise as mw
from meshwise.records import checkpoints as files
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.job.run import begun, make_engine
from meshwise.training.recovery.loading import load
from meshwise.training.recovery.saving import Saver
from meshwise.training.recovery.state import RunState, tree_of, unpack
from meshwise.workers.join import join

MiB, GB = 1 << 20, 1e9


def seconds_of(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def hashes() -> dict[str, float]:
    """GB/s of each hash, the best of seven."""
    data = os.urandom(64 * MiB)
    kinds: dict[str, Callable[[], Any]] = {
        "XXH3 128": lambda: xxhash.xxh3_128(data).digest(),
        "SHA-256": lambda: hashlib.sha256(data).digest(),
        "BLAKE2b": lambda: hashlib.blake2b(data).digest(),
        "CRC-32": lambda: zlib.crc32(data),
    }
    try:
        import blake3
    except ImportError:
        print("blake3 is not installed: left out")
    else:
        kinds["BLAKE3"] = lambda: blake3.blake3(data).digest()
    return {name: len(data) / min(seconds_of(kind) for _ in range(7)) / GB for name, kind in kinds.items()}


class Training:
    """A model whose state has so many bytes, with Adam; a step of it."""

    def __init__(self, size: int, batch: int) -> None:
        width = 1024
        layers = max(1, size // (3 * 4 * width * width))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.x = torch.randn(batch, width)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step()
        self.state = RunState(self.model, self.optimizer, None, scaler, 0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        states = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*(p.detach() for p in self.model.parameters()), *states]


def stall(folder: Path, saves: int) -> dict[str, Any]:
    """Seconds of `save` and of a plain copy, in turns."""
    training = Training(384 * MiB, 8)
    copies = [torch.empty_like(tensor) for tensor in training.tensors()]
    saver, numbers = Saver(folder, World(), print), iter(range(1, 10_000))
    held, copied = [], []

    def copy() -> None:
        for into, tensor in zip(copies, training.tensors(), strict=True):
            into.copy_(tensor)

    def save() -> None:
        saver.save(functools.partial(tree_of, training.state), {"step": next(numbers)})

    for turn in range(saves + 2):
        each = seconds_of(copy), seconds_of(save)
        saver.settle()
        if turn > 1:  # the first make their buffers
            copied.append(each[0])
            held.append(each[1])
    size = sum(tensor.nbytes for tensor in copies)
    ratio = ratio_interval(held, copied)
    return {
        "bytes": size,
        "save_ms": 1e3 * statistics.median(held),
        "copy_ms": 1e3 * statistics.median(copied),
        "ratio": ratio,
    }


def behind(folder: Path, saves: int) -> dict[str, Any]:
    """Seconds of a step while a checkpoint is written, and while none is."""
    training = Training(384 * MiB, 256)
    saver, during, without, writing = Saver(folder, World(), print), [], [], []
    for number in range(1, saves + 3):
        quiet = [seconds_of(training.step) for _ in range(6)]
        saver.save(lambda: tree_of(training.state), {"step": number})
        began, busy = time.perf_counter(), []
        while saver._thread is not None and saver._thread.is_alive():
            busy.append(seconds_of(training.step))
        writing.append(time.perf_counter() - began)
        saver.settle()
        if number > 2 and len(busy) > 1:
            during.append(statistics.median(busy[:-1]))  # the last is partly without
            without.append(statistics.median(quiet))
    return {
        "step_ms": 1e3 * statistics.median(without),
        "step_while_writing_ms": 1e3 * statistics.median(during),
        "ratio": ratio_interval(during, without),
        "seconds_of_writing": statistics.median(writing),
    }


def verify(folder: Path) -> dict[str, float]:
    """GB/s of `verified`, the best of five."""
    training, saver = Training(384 * MiB, 8), Saver(folder / "verify", World(), print)
    saver.save(lambda: tree_of(training.state), {"step": 1})
    saver.settle()
    saved = files.checkpoints_in(folder / "verify")[-1]
    size = files.size_of(saved.path)
    return {"bytes": size, "rate": size / min(seconds_of(lambda: files.verified(saved)) for _ in range(5)) / GB}


# Memory of several processes.


def most_since(base: int) -> int:
    """The most that this process held since `reset`, above `base`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - base


def reset() -> int:
    """Forget the most so far; what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return most_since(0)


def job(size: float) -> mw.Job:
    """A model of so many bytes, with momentum left out: its state is its parameters."""
    width = 2048
    layers = round(size / (4 * width * width))
    return mw.Job(
        name="large",
        model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=lambda: (torch.zeros(4, width),),
        batch_size=4,
        epochs=1,
    )


def of_a_rank(folder: str, size: float, ranks: int, first: bool) -> dict[str, float]:
    """Save (where nothing is there yet) and load under shard: the most that was held, against this rank's part."""
    session = join()
    plan, base, part = Plan(shard=ranks), reset(), size / ranks
    engine = make_engine(session, plan)
    state, found = begun(job(size), plan, engine), {"built": most_since(base) / part}
    want = float(sum(p.detach().to_local().double().sum() for p in state.model.parameters()))
    if first:
        reset()
        saver = Saver(Path(folder), session.world, print)
        found["save_seconds"] = seconds_of(lambda: saver.save(lambda: tree_of(state), {"step": 1}))
        found["write_seconds"] = seconds_of(saver.settle)
        assert saver.saved == 1, saver.wrong
        found["save"] = most_since(base) / part
        del saver
    for p in state.model.parameters():
        p.data.to_local().zero_()
    reset()
    found["load_seconds"] = seconds_of(lambda: unpack(state, load(Path(folder), session.world, print).tree))
    found["load"] = most_since(base) / part
    assert float(sum(p.detach().to_local().double().sum() for p in state.model.parameters())) == want
    engine.close()
    return found


def memory(folder: Path, size: float) -> dict[str, Any]:
    """Of four processes that save and load, and of two that load what four have saved: the largest of each figure."""
    found = {}
    for ranks in (4, 2):
        results = mw.launch(of_a_rank, str(folder), size, ranks, ranks == 4, devices=f"{ranks}xcpu")
        found[f"shard={ranks}"] = {name: max(result[name] for result in results) for name in results[0]}
    return {"bytes": size} | found


def main() -> None:
    """Measure, print and keep."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gigabytes", type=float, default=4.0)
    options.add_argument("--saves", type=int, default=15)
    options.add_argument("--folder", type=Path, default=None, help="on the disk that is measured")
    options.add_argument("--only", nargs="*", default=[], help="of hash, stall, behind, verify, memory")
    given = options.parse_args()
    torch.set_num_threads(1)
    kept = RESULTS / "checkpoints.json"
    result: dict[str, Any] = json.loads(kept.read_text()) if given.only and kept.exists() else {}
    result.pop("machine", None)
    with favoured() as first, tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result["first_on_the_machine"] = first
        for name, measure in (
            ("hash", hashes),
            ("stall", lambda: stall(Path(folder, "stall"), given.saves)),
            ("behind", lambda: behind(Path(folder, "behind"), given.saves)),
            ("verify", lambda: verify(Path(folder))),
            ("memory", lambda: memory(Path(folder, "memory"), given.gigabytes * GB)),
        ):
            if given.only and name not in given.only:
                continue
            result[name] = measure()
            print(name, result[name], flush=True)
    keep("checkpoints", result)


if __name__ == "__main__":
    main()
