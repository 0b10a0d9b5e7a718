"""Split tensors at tensor=2: how much is split, what memory falls to, and what it costs beside `parallelize_module`.

share       parameters of which a rank holds a part, of all; goals: 90 % of a transformer's, 60 % of the ResNet's
memory      of one rank against one device: parameters, optimizer state (AdamW), and the peak of a step beside them, by
            the allocator events of the profiler. Gloo's copies are not counted (bench/memory.py)
operators   of forward and backward of two layers of Llama, on one rank: aten operators that call no other, and
            collectives with their elements, against the same layers under torch's `parallelize_module`, by hand
            column and row; goal: the same collectives, and at most 5 % more operators

`python bench/split_tensors.py`; needs transformers.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory
import torch
from keep import keep
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import meshwise as mw
from meshwise.parallel.apply import apply, bind
from meshwise.parallel.mesh import divide_work
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.workers.join import join

WORDS, WIDTH, LAYERS, HEADS, TOKENS, SAMPLES = 512, 256, 4, 8, 64, 8
GOALS = {"resnet": 0.6}
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def transformer(kind: str) -> nn.Module:
    """A small model of transformers, with the proportions of a large one."""
    import transformers as T

    common = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": WORDS}
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": TOKENS, "vocab_size": WORDS}
        return T.GPT2LMHeadModel(T.GPT2Config(**sizes, use_cache=False))
    if kind == "llama":
        return T.LlamaForCausalLM(
            T.LlamaConfig(**common, intermediate_size=3 * WIDTH, num_key_value_heads=4, use_cache=False)
        )
    if kind == "bert":
        return T.BertForMaskedLM(T.BertConfig(**common, intermediate_size=4 * WIDTH, max_position_embeddings=TOKENS))
    common.pop("vocab_size")
    sizes = {"intermediate_size": 4 * WIDTH, "image_size": 64, "patch_size": 8, "num_labels": 10}
    return T.ViTForImageClassification(T.ViTConfig(**common, **sizes))


def resnet() -> nn.Module:
    """As the equivalence suite has it."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.equivalence.models_to_check import the_job

    return the_job("resnet").model()


def gpt() -> nn.Module:
    """The built-in job's."""
    from meshwise.jobs.registry import find_job

    return find_job("gpt").model()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(transformer, name) for name in ("llama", "gpt2", "bert", "vit")},
    "gpt": gpt,
    "resnet": resnet,
}


def loss_of(name: str, model: nn.Module) -> Tensor:
    """Of one batch, which is the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "resnet"):
        pixels = torch.randn(SAMPLES, 3, *(2 * [64 if name == "vit" else 16]), generator=generator)
        made = model(pixels)
        return (made.logits if name == "vit" else made).pow(2).mean()
    words = torch.randint(WORDS if name != "gpt" else 64, (SAMPLES, TOKENS), generator=generator)
    return model(words).pow(2).mean() if name == "gpt" else model(input_ids=words, labels=words).loss


def measured(name: str, plan: Plan) -> dict[str, float]:
    """On each rank: the share that is split, and bytes by category in the third step."""
    session = join()
    torch.set_num_threads(1)
    world = divide_work(plan, World(rank=session.world.rank, size=session.world.size))
    torch.manual_seed(0)
    model = MODELS[name]()
    applied = apply(model, plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    bind(optimizer, plan, world)

    step, states = memory.begun(lambda: loss_of(name, model), applied, optimizer)
    every = list(model.parameters())
    split = [p for p in every if isinstance(p, DTensor) and not p.placements[-1].is_replicate()]
    found = {"parameters": memory.local_bytes(every), "state": memory.local_bytes(states)}
    found["of the step"] = memory.peaks_of(step)["of the step"]
    return found | {"peak": sum(found.values()), "share": sum(p.numel() for p in split) / sum(p.numel() for p in every)}


class Pair(nn.Module):
    """Two layers of Llama, with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        whole = transformer("llama").model
        self.layers, self.turn = whole.layers[:2], whole.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, tokens, WIDTH)."""
        place = torch.arange(TOKENS)[None]
        turned = self.turn(x, place)
        for layer in self.layers:
            x = layer(x, position_embeddings=turned, position_ids=place)
        return x


def called(by_hand: bool) -> dict[str, Any]:
    """Operators and collectives of one forward and backward."""
    session = join()
    torch.manual_seed(0)
    model, plan = Pair(), Plan(tensor=2)
    if by_hand:
        ways = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        for layer in model.layers:
            for inner in (layer.self_attn, layer.mlp):
                parallelize_module(
                    inner,
                    init_device_mesh("cpu", (2,)),
                    {name: way for name, way in ways.items() if hasattr(inner, name)},
                )
    else:
        apply(model, plan, divide_work(plan, World(rank=session.world.rank, size=session.world.size)))
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step() -> Tensor:
        made = model(x)
        made.pow(2).mean().backward()
        return made.detach()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        value = float(step().double().sum())
    operators, sent = Counter[str](), Counter[str]()
    for event in seen.events():
        if event.name.startswith("aten::") and not any(child.name.startswith("aten::") for child in event.cpu_children):
            operators[event.name] += 1
        if event.name.startswith("gloo:"):
            sent[f"{event.name} {sum(math.prod(shape) for shape in event.input_shapes if shape)}"] += 1
    return {"value": value, "operators": sum(operators.values()), "by name": dict(operators), "collectives": dict(sent)}


def main() -> None:
    """Measure, print, keep."""
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    plans = [(name, name, Plan(tensor=2)) for name in MODELS]
    for label, name, plan in [*plans, ("llama, sequence", "llama", Plan(tensor=2, sequence=True))]:
        alone = measured(name, Plan())
        ranks = mw.launch(measured, name, plan, devices="2xcpu")
        ratio = {key: ranks[0][key] / alone[key] for key in ("parameters", "state", "of the step", "peak")}
        rows[label] = {"share": ranks[0]["share"], "goal": GOALS.get(name, 0.9), "of one device": ratio}
        rows[label] |= {"one device": alone, "ranks": ranks}
        said = ", ".join(f"{key} {value:.2f}" for key, value in ratio.items())
        print(f"{label}: {ranks[0]['share']:.1%} split; bytes of one device: {said}", flush=True)
    ours, hand = (mw.launch(called, by_hand, devices="2xcpu")[0] for by_hand in (False, True))
    assert abs(ours["value"] / hand["value"] - 1) < 1e-4, (ours["value"], hand["value"])
    ratio = ours["operators"] / hand["operators"]
    print(f"operators: {ours['operators']}, by hand {hand['operators']}, {ratio:.3f}")
    print(f"collectives: {ours['collectives']}, by hand {hand['collectives']}")
    keep("split_tensors", {"models": rows, "llama pair": {"ours": ours, "by hand": hand, "operators": ratio}})


if __name__ == "__main__":
    main()
