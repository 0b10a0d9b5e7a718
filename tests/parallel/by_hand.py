"""Makes a step of a plan, and the same step as PyTorch written by hand, and counts what each runs.

`fully_shard` on each layer and on the model stands against `shard`, DistributedDataParallel against `data`, in one
process group. A step is a forward, a backward, clipping and an AdamW step, once steady. Counted are the operators that
reach the dispatcher, and of collectives the kind, the number and the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwise.parallel.apply import apply
from meshwise.spec.plan import Plan
from meshwise.torch_compat.dispatch import intercept_operators
from meshwise.torch_compat.tree import tensors_in
from meshwise.workers.join import join

Step = Callable[[], None]
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


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Numbers of both sides beside each other."""
    ours, hand = found["ours"], found["by hand"]
    total, theirs = ours["operators"].total(), hand["operators"].total()
    return {
        "collectives": ours["collectives"],
        "same collectives": ours["collectives"] == hand["collectives"],
        "operators": total,
        "more operators %": round(100 * (total - theirs) / theirs, 2),
    }
