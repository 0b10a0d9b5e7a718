"""Memory of one training step, a rank, under each plan, from torch's own allocator events, against theory.

Claim: what a plan says it divides is divided. Peaks are those of the profiler's events (`profile_memory=True`) over
what lived before the step: bytes asked for. Two things are not the device's, and are told by what surrounds their
allocation: what offload copies to the host, which is counted apart; and what gloo copies inside a collective (a block
that arrives, gradients that are reduced), which NCCL does not. Gloo lets go in threads of its own, which the profiler
does not see: counted, its copies would add up.

Theory, for P bytes of parameters in L blocks of b bytes and a rest R, which keep a activations each, over N ranks with
AdamW (two states a parameter) and the same global batch. The peak is the largest of these moments, each beside the
parameters and the state, 3 P: gradients come as activations go, so a step never holds both whole.

    loss          all activations, and two gradients of the logits
    block k       the activations of the blocks that are left, and the gradients of those that are done; inside, the
                  gradients of what is widest there (before and after GELU) and of one weight beside it
    step          all gradients, and two buffers of the optimizer the size of the largest parameter

    shard         all over N, but gathered whole: R, the block at work, and the next, whose parts arrive in one buffer.
                  Gradients of R until the end, and the buffer out of which the last block's gradients are reduced
    zero1         state over N; parameters are sent a rank's part at a time, out of one buffer
    recompute     of the blocks that are left, their inputs; of the block at work, all
    offload       of the activations what the window fetches ahead, and what is asked for; the host has them all
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from keep import keep
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwise as mw
from meshwise.parallel import offload
from meshwise.parallel.apply import apply, bind
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.workers.join import join

SAMPLES, TOKENS, WIDTH, LAYERS, WORDS = 16, 64, 256, 12, 512
WINDOW = 16 << 20  # of what offload fetches ahead, here: the default is more than this model keeps
TO_HOST = "to the host"


class Layer(nn.Module):
    """A transformer layer without attention weights that are kept: 12 x WIDTH^2 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, tokens, WIDTH)."""
        parts = self.query(self.before(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.fall(nn.functional.gelu(self.rise(self.between(x))))


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (samples, tokens)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def local_bytes(tensors: Any) -> int:
    """Bytes that this rank holds of these tensors."""
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def peaks_of(call: Callable[[], object]) -> dict[str, int]:
    """The most bytes that lived at once during `call`, beside those from before it: on the device, on the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found: list[tuple[int, int, int, str]] = []
    ahead = [(event, "device") for event in seen.profiler.kineto_results.experimental_event_tree()]
    while ahead:
        event, whose = ahead.pop()
        if event.tag.name == "Allocation":
            facts = event.typed[1]
            found.append((event.start_time_ns, facts.ptr, facts.alloc_size, whose))
            continue
        inner = "host" if event.name == TO_HOST else "gloo" if event.name.startswith("c10d::") else whose
        ahead += [(child, inner) for child in event.children]
    now, most, owner = Counter[str](), Counter[str](), dict[int, str]()
    for _, place, size, whose in sorted(found, key=lambda one: one[0]):
        if size > 0:
            owner[place] = whose
        by = owner.get(place, "device") if size > 0 else owner.pop(place, "device")
        now[by] += size
        most[by] = max(most[by], now[by])
    return {"of the step": most["device"], "host": most["host"]}


def told(send: Callable[..., Any]) -> Callable[..., Any]:
    """`send`, with what it allocates marked as the host's."""

    @functools.wraps(send)
    def sent(*arguments: Any) -> Any:
        with torch.profiler.record_function(TO_HOST):
            return send(*arguments)

    return sent


def measured(plan: Plan) -> dict[str, int]:
    """On each rank: bytes by category, and the peak of the third step."""
    session = join()
    torch.set_num_threads(1)
    world = World(rank=session.world.rank, size=session.world.size)
    torch.manual_seed(0)
    with mw.deferred():
        model = Model()
    with mock.patch.object(offload, "WINDOW", WINDOW):
        applied = apply(model, plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    bind(optimizer, plan, world)
    tokens = torch.randint(WORDS, (SAMPLES, TOKENS))[world.rank :: world.size]

    step, states = begun(
        lambda: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), applied, optimizer
    )
    parameters, state = local_bytes(model.parameters()), local_bytes(states)
    with mock.patch.object(offload, "_send", told(offload._send)):
        peaks = peaks_of(step)
    whole = parameters + state + peaks["of the step"]
    return {"parameters": parameters, "state": state, **peaks, "peak": whole}


def begun(
    loss_of: Callable[[], Tensor], applied: Any, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], None], list[Tensor]]:
    """A training step after which nothing is left of gradients, done twice, and the optimizer's state then."""

    def step() -> None:
        loss = loss_of()
        loss.backward() if applied.reduction is None else applied.reduction.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    return step, [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor) and v.ndim]


def activations() -> tuple[int, int]:
    """Bytes that a forward of the whole batch keeps for its backward, each storage once: of all, and of one block."""
    model, found = Model(), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(WORDS, (SAMPLES, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        every = sum(found.values())
        found.clear()
        inner = model.layers[0](torch.randn(SAMPLES, TOKENS, WIDTH))
    del loss, inner
    return every, sum(found.values())


def theory(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes of a rank at each moment of its step, by the formulas above."""
    model, ranks = Model(), plan.devices
    whole, block = local_bytes(model.parameters()), local_bytes(model.layers[0].parameters())
    head, largest = local_bytes(model.head.parameters()), max(p.nbytes for p in model.parameters())
    every, inside = (size / ranks for size in activations())
    stream, logits = (SAMPLES * TOKENS * size * 4 / ranks for size in (WIDTH, WORDS))
    left = {k: (LAYERS - k) * inside for k in range(LAYERS)}
    if plan.recompute == "full":
        left = {k: (LAYERS - k - 1) * stream + inside for k in range(LAYERS)}
        every += LAYERS * (stream - inside)
    if "activations" in plan.offload:
        left = {k: min(kept, WINDOW + 4 * stream) for k, kept in left.items()}
        every = logits
    parts = plan.shard
    lasting = {"parameters": whole / parts, "state": 2 * whole / (ranks if plan.zero1 else parts)}
    sent = whole / ranks if plan.zero1 else 2 * largest / parts
    found = {
        "loss": lasting | {"activations": every + 2 * logits, "gathered": _gathered(plan, 0)},
        "step": lasting | {"gradients": whole / parts, "buffers": sent},
    }
    for k in range(LAYERS):
        found[f"block {k}"] = lasting | {
            "gradients": k * block / parts + head,
            "reduced": block * (parts > 1 and k > 0),
            "activations": left[k] + stream + (8 - 4) * stream,  # two of width 4, and one that is kept has gone
            "weight at work": largest,
            "gathered": _gathered(plan, min(2, LAYERS - k)),
        }
    return found


def _gathered(plan: Plan, blocks: int) -> float:
    """Bytes of parameters that are whole on a rank: the rest, and so many blocks or copies of them."""
    if plan.shard == 1:
        return 0.0
    model = Model()
    block = local_bytes(model.layers[0].parameters())
    return local_bytes(model.parameters()) - (LAYERS - blocks) * block


PLANS = {
    "one device": Plan(),
    "recompute full": Plan(recompute="full"),
    "offload activations": Plan(offload=("activations",)),
    "shard 2": Plan(shard=2),
    "shard 4": Plan(shard=4),
    "shard 8": Plan(shard=8),
    "shard 4, recompute full": Plan(shard=4, recompute="full"),
    "zero1 4": Plan(data=4, zero1=True),
}


def main() -> None:
    """Measure, print, keep."""
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name, plan in PLANS.items():
        ranks = [measured(plan)] if plan.devices == 1 else mw.launch(measured, plan, devices=f"{plan.devices}xcpu")
        moments = theory(plan)
        when = max(moments, key=lambda moment: sum(moments[moment].values()))
        peak, should = max(rank["peak"] for rank in ranks), sum(moments[when].values())
        rows[name] = {"plan": repr(plan), "peak": peak, "theory": should, "ratio": peak / should, "moment": when}
        rows[name] |= {"by theory": moments[when], "within 10 %": abs(peak / should - 1) <= 0.1, "ranks": ranks}
        rows[name] |= {"of one device": peak / rows["one device"]["peak"], "host": max(rank["host"] for rank in ranks)}
        if "activations" in plan.offload:
            logits = SAMPLES * TOKENS * WORDS * 4  # of the loss, which is outside of the model
            rows[name]["host by theory"] = (activations()[0] - logits) / plan.devices
        print(
            f"{name}: {peak / 1e6:.1f} MB, theory {should / 1e6:.1f} MB ({when}), ratio {peak / should:.3f}", flush=True
        )
    keep("memory", {"claim": "memory a rank is what theory says, within 10 %", "window": WINDOW, "plans": rows})


if __name__ == "__main__":
    main()
