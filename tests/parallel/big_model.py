"""Builds, loads and trains a transformer with its shards on workers, and looks at their memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwise as mw
from meshwise.parallel.apply import apply
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.workers.join import join


class Layer(nn.Module):
    """A transformer layer of 12 x width^2 weights."""

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
    with mw.deferred():
        model = Transformer(**sizes)
    facts["largest"] = max(p.nbytes for p in model.parameters())
    facts["model"] = sum(p.nbytes for p in model.parameters())
    if checkpoint:
        mw.load_weights(model, checkpoint)
    applied = apply(model, Plan(shard=world.size), world)
    facts["part"] = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    facts["peak"] = peak()
    if train:
        tokens = torch.randint(sizes["words"], (1, 8))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward() if applied.reduction is None else applied.reduction.backward(loss)
        gradients = [p.grad for p in model.parameters()]
        facts["gradients"] = sum(g.to_local().nbytes for g in gradients if isinstance(g, DTensor))
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


def run(workers: int, sizes: dict[str, int], *, train: bool) -> dict[str, list[dict[str, Any]]]:
    """Build and load on `workers` CPU workers; what each rank found."""
    devices = f"{workers}xcpu"
    built = mw.launch(measured, sizes, None, train, devices=devices)
    with tempfile.TemporaryDirectory() as folder:
        index = write_checkpoint(sizes, Path(folder))
        return {"construct": built, "load": mw.launch(measured, sizes, str(index), False, devices=devices)}
