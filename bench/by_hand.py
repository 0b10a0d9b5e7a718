"""Our plans against PyTorch written by hand: collectives and operators counted exactly, time as a ratio.

    python bench/by_hand.py [--steps 200]

One transformer, on each side in the same process group: `fully_shard` on each layer and on the model against `shard`,
DistributedDataParallel against `data`. A step is a forward, a backward, clipping and an AdamW step, once steady.
Counted are the operators that reach the dispatcher, and of collectives the kind, the number and the bytes.
The claims: the same collectives, at most 2 % more operators; time has no verdict where its interval is wider than 3 %.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshwise as mw
from meshwise.compat.dispatch import intercept_operators
from meshwise.compat.tree import tensors_in
from meshwise.parallel.apply import apply
from meshwise.spec.plan import Plan
from meshwise.workers.join import join

Step = Callable[[], None]
WIDEST = 0.03  # of an interval: beyond it a ratio says nothing
WARM = 4  # steps before a steady one: reducers are made, optimizers have their state


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.parts(self.before(x)).unflatten(-1, (3, 4, x.shape[-1] // 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.fall(nn.functional.gelu(self.rise(self.between(x))))


class Transformer(nn.Module):
    """Layers between an embedding and a head that is tied to it."""

    def __init__(self, width: int = 64, layers: int = 4, words: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def side(plan: Plan, ours: bool, width: int, layers: int, tokens: int) -> Step:
    """A step under `plan`, by meshwise or by hand. Both begin with the same parameters and take the same batch."""
    world = join().world
    torch.manual_seed(0)
    model: Any = Transformer(width, layers)
    batch = torch.randint(256, (2, tokens), generator=torch.Generator().manual_seed(world.rank))
    forward, backward = model, Tensor.backward
    if ours:
        reduction = apply(model, plan, world).reduction
        assert reduction is not None  # plans of several devices
        backward = reduction.backward
    elif plan.shard > 1:
        mesh = init_device_mesh(world.kind, (plan.shard,), mesh_dim_names=("shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=plan.reshard)
        fully_shard(model, mesh=mesh)
    else:
        forward = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        output = forward(batch)
        backward(nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def counted(step: Step) -> dict[str, Any]:
    """One step's operators, and its collectives: kind -> number, bytes."""
    operators: Counter[str] = Counter()
    collectives: dict[str, list[int]] = {}

    def seen(operator: Any, args: Any, kwargs: Any) -> Any:
        space, _, name = str(operator._schema.name).partition("::")
        if space == "c10d":
            number, total = collectives.get(name, [0, 0])
            collectives[name] = [number + 1, total + sum(t.nbytes for t in tensors_in(args[:2]))]
        else:
            operators[name] += 1
        return operator(*args, **kwargs)

    with intercept_operators(seen):
        step()
    return {"collectives": dict(sorted(collectives.items())), "operators": operators}


def counts(plan: Plan, width: int = 64, layers: int = 4) -> dict[str, Any]:
    """What a steady step of each side runs, on this rank."""
    found = {}
    for name, ours in (("ours", True), ("by hand", False)):
        step = side(plan, ours, width, layers, 16)
        for _ in range(WARM):
            step()
        found[name] = counted(step)
    return found


def times(plan: Plan, steps: int) -> dict[str, Any]:
    """Interleaved times of both sides, who goes first alternating."""
    from overhead import compare  # beside this script

    ours, hand = (side(plan, mine, 256, 6, 64) for mine in (True, False))
    found = compare(ours, hand, steps)
    width = found["high"] - found["low"]
    found["verdict"] = None if width > WIDEST else "slower" if found["low"] > 1.0 else "not slower"
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Numbers of both sides beside each other."""
    ours, hand = found["ours"], found["by hand"]
    total, theirs = ours["operators"].total(), hand["operators"].total()
    more = copy.copy(ours["operators"])
    more.subtract(hand["operators"])
    return {
        "collectives": ours["collectives"],
        "collectives by hand": hand["collectives"],
        "same collectives": ours["collectives"] == hand["collectives"],
        "operators": total,
        "operators by hand": theirs,
        "more operators %": round(100 * (total - theirs) / theirs, 2),
        "difference by operator": {name: count for name, count in sorted(more.items()) if count},
    }


def main() -> None:
    """Count, measure, print, keep."""
    from keep import keep  # beside this script

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="that are timed; 0 counts alone")
    steps = parser.parse_args().steps
    result: dict[str, Any] = {"claims": ["same collectives", "at most 2 % more operators"], "measured": {}}
    for plan in (Plan(shard=2), Plan(shard=4), Plan(shard=2, reshard=False), Plan(data=2)):
        devices = f"{plan.devices}xcpu"
        facts = summary(mw.launch(counts, plan, devices=devices)[0])
        if plan.devices == 2 and steps:  # more processes than cores measure the scheduler
            facts["time"] = mw.launch(times, plan, steps, devices=devices)[0]
        result["measured"][repr(plan)] = facts
        print(plan, facts, flush=True)
    keep("by_hand", result)


if __name__ == "__main__":
    main()
