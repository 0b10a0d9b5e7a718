"""A model of 4 GB on four CPU workers with shard=4: built, and loaded, without any process that holds it whole.

Claim: every process peaks at most at its part + the largest parameter + 0.6 GB (the interpreter with torch counts), and
all together under 1.5 times the model. Peaks are resident memory as the kernel counts it (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from keep import keep
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwise as mw
from meshwise.parallel.apply import apply
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.workers.join import join

ALLOWED = 0.6e9  # bytes beside the part and the largest parameter
WIDTH = 2048


class Layer(nn.Module):
    """A transformer layer of 12 x WIDTH^2 weights: 201 MB."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 16, batch_first=True)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, tokens, width)."""
        seen = self.before(x)
        x = x + self.attend(seen, seen, seen, need_weights=False)[0]
        return x + self.fall(nn.functional.gelu(self.rise(self.between(x))))


class Transformer(nn.Module):
    """Layers between an embedding and a head; every weight drawn anew at the end, as transformers' models do it."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (samples, tokens)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def peak() -> int:
    """The most resident bytes of this process so far. (ru_maxrss would count the parent's, from before the exec.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured(sizes: dict[str, int], checkpoint: str | None, train: bool) -> dict[str, Any]:
    """On each worker: build, or load, then a forward and a backward if asked."""
    session = join()
    torch.set_num_threads(1)
    world = World(rank=session.world.rank, size=session.world.size)
    facts: dict[str, Any] = {"rank": world.rank, "interpreter": peak()}
    torch.manual_seed(0)
    began = time.perf_counter()
    with mw.deferred():
        model = Transformer(**sizes)
    facts["largest"] = max(p.nbytes for p in model.parameters())
    facts["model"] = sum(p.nbytes for p in model.parameters())
    if checkpoint:
        mw.load_weights(model, checkpoint)
    applied = apply(model, Plan(shard=world.size), world)
    facts["seconds"] = time.perf_counter() - began
    facts["part"] = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    facts["peak"] = peak()
    if train:
        tokens = torch.randint(sizes["words"], (1, 8))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward() if applied.reduction is None else applied.reduction.backward(loss)
        gradients = [p.grad for p in model.parameters()]
        facts["gradients"] = sum(g.to_local().nbytes for g in gradients if isinstance(g, DTensor))
        facts["peak with a backward"] = peak()
    return facts


def write_checkpoint(sizes: dict[str, int], folder: Path) -> Path:
    """A checkpoint of the model's shapes, in a file a layer, with its index; never whole in memory."""
    with mw.deferred():
        model = Transformer(**sizes)
    where: dict[str, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        groups.setdefault(".".join(name.split(".")[:2]), {})[name] = p.shape
    for number, (_, shapes) in enumerate(groups.items()):
        torch.manual_seed(number)
        file = f"model-{number:05}.safetensors"
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / file)
        where |= dict.fromkeys(shapes, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return index


def judged(ranks: list[dict[str, Any]], allowed: float) -> dict[str, Any]:
    """The ranks' peaks against the claim."""
    limits = [rank["part"] + rank["largest"] + allowed for rank in ranks]
    together = sum(rank["peak"] for rank in ranks)
    return {
        "model bytes": ranks[0]["model"],
        "largest parameter bytes": ranks[0]["largest"],
        "ranks": ranks,
        "limit a process": limits,
        "all together": together,
        "of the model": together / ranks[0]["model"],
        "holds": all(rank["peak"] <= limit for rank, limit in zip(ranks, limits, strict=True)),
        "holds together": together < 1.5 * ranks[0]["model"],
    }


def run(workers: int, sizes: dict[str, int], *, train: bool, allowed: float = ALLOWED) -> dict[str, Any]:
    """Build and load on `workers` CPU workers."""
    devices = f"{workers}xcpu"
    result = {"construct": judged(mw.launch(measured, sizes, None, train, devices=devices), allowed)}
    with tempfile.TemporaryDirectory() as folder:
        index = write_checkpoint(sizes, Path(folder))
        result["load"] = judged(mw.launch(measured, sizes, str(index), False, devices=devices), allowed)
    return result


def main() -> None:
    """Measure, print, keep."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--layers", type=int, default=20)
    words.add_argument("--workers", type=int, default=4)
    words.add_argument("--train", action="store_true", help="a forward and a backward too, after the first peak")
    given = words.parse_args()
    sizes = {"layers": given.layers, "width": WIDTH, "words": 8192}
    result = {
        "claim": "every process at most its part + the largest parameter + 0.6 GB; all under 1.5 times the model",
        "plan": f"shard={given.workers} on {given.workers}xcpu",
        **run(given.workers, sizes, train=given.train),
    }
    for what in ("construct", "load"):
        peaks = ", ".join(f"{rank['peak'] / 1e9:.2f}" for rank in result[what]["ranks"])
        print(f"{what}: peaks {peaks} GB; together {result[what]['of the model']:.2f} of the model")
    keep("big_model", result)


if __name__ == "__main__":
    main()
