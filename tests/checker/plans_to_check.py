"""The plans that every model is checked under: each technique alone, and combinations of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.spec.plan import Plan
from tests.checker.jobs_to_check import SIZES
from tests.checker.models_to_check import MODELS

ACTIVATIONS = ("activations",)

TECHNIQUES = {
    "data": Plan(data=2),
    "shard": Plan(shard=2),
    "shard, kept after the forward": Plan(shard=2, reshard=False),
    "zero1": Plan(data=2, zero1=True),
    "accumulate": Plan(accumulate=2),
    "recompute full": Plan(recompute="full"),
    "recompute selective": Plan(recompute="selective"),
    "recompute of one block": Plan(recompute=("a block",)),
    "offload activations": Plan(offload=ACTIVATIONS),
    "bf16": Plan(precision="bf16"),
    "tensor": Plan(tensor=2),
}
"""Each alone. `a block` stands for the first block of the model."""

COMBINATIONS = {
    "data × shard": Plan(data=2, shard=2),
    "shard × recompute × accumulate": Plan(shard=2, recompute="full", accumulate=2),
    "shard 4 × recompute selective × accumulate": Plan(shard=4, recompute="selective", accumulate=2),
    "shard, kept × recompute selective": Plan(shard=2, reshard=False, recompute="selective"),
    "zero1 × recompute × accumulate": Plan(data=2, zero1=True, recompute="full", accumulate=2),
    "zero1 4": Plan(data=4, zero1=True),
    "data × shard × accumulate × recompute": Plan(data=2, shard=2, accumulate=2, recompute="full"),
    "bf16 × data × offload": Plan(data=2, precision="bf16", offload=ACTIVATIONS),
    "shard × offload": Plan(shard=2, offload=ACTIVATIONS),
    "zero1 × recompute × offload": Plan(data=2, zero1=True, recompute="full", offload=ACTIVATIONS),
    "tensor 4": Plan(tensor=4),
    "data × tensor": Plan(data=2, tensor=2),
    "shard × tensor": Plan(shard=2, tensor=2),
    "shard × tensor × recompute × accumulate": Plan(shard=2, tensor=2, recompute="full", accumulate=2),
    "tensor × recompute selective × offload": Plan(tensor=2, recompute="selective", offload=ACTIVATIONS),
    "tensor × bf16 × accumulate": Plan(tensor=2, precision="bf16", accumulate=2),
    "8 devices: data 2 × shard 2 × tensor 2": Plan(data=2, shard=2, tensor=2),
    "8 devices: data 2 × shard 4": Plan(data=2, shard=4),
    "8 devices: data 8": Plan(data=8),
    "unequal shares": Plan(data=3, shares=(5, 1, 2)),
    "data × shard × accumulate × unequal shares": Plan(data=2, shard=2, accumulate=2, shares=(1, 3, 0.5, 1)),
}
"""Several at once. Six of the models clip the gradient of the whole step, under every plan."""

LATER = {
    "offload parameters": Plan(shard=2, offload=("parameters",)),
    "offload optimizer": Plan(offload=("optimizer",)),
    "gradients in bf16": Plan(data=2, grad_dtype="bf16"),
    "compile": Plan(compile=True),
}
"""Each alone, as in `TECHNIQUES`. In float64 gradients are reduced in float64 too, whatever `grad_dtype` says: there
the check shows that nothing else changes, and what is sent shows the dtype. A check leaves the compiler out."""

CONTEXT = {
    "context": Plan(context=2),
    "context × recompute selective × bf16": Plan(context=2, recompute="selective", precision="bf16"),
    "data × context": Plan(data=2, context=2),
    "shard × context × recompute × accumulate": Plan(shard=2, context=2, recompute="full", accumulate=2),
    "context × tensor": Plan(context=2, tensor=2),
    "context × tensor × recompute selective × bf16 × offload": Plan(
        context=2, tensor=2, recompute="selective", precision="bf16", offload=ACTIVATIONS
    ),
    "8 devices: data 2 × context 2 × tensor 2": Plan(data=2, context=2, tensor=2),
    "8 devices: shard 2 × context 2 × tensor 2 × accumulate": Plan(shard=2, context=2, tensor=2, accumulate=2),
}
"""Of models whose samples have positions."""
WITH_POSITIONS = ("llama", "gpt2", "bert", "gpt")

PIPELINES = {
    "pipeline": Plan(pipeline=2, accumulate=2),
    "data × pipeline × bf16": Plan(data=2, pipeline=2, accumulate=2, schedule="gpipe", precision="bf16"),
    "shard × pipeline × recompute": Plan(shard=2, pipeline=2, accumulate=2, recompute="full"),
    "tensor × pipeline": Plan(tensor=2, pipeline=2, accumulate=2),
    "8 devices: shard 2 × tensor 2 × pipeline 2": Plan(shard=2, tensor=2, pipeline=2, accumulate=2),
}
"""Of models that are cut into stages."""
WITH_STAGES = ("llama", "gpt2", "bert", "vit", "gpt", "mlp")
PIPELINES_OF_POSITIONS = {"context × pipeline": Plan(context=2, pipeline=2, accumulate=2)}

NAMES = (*SIZES, *MODELS)
BLOCKS = {
    "mnist-mlp": "1",
    "mnist-cnn": "conv1",
    "mlp": "0",
    "gpt": "blocks.0",
    "resnet": "layer1.0",
    "unet": "down.0",
    "lstm-tagger": "lstm",
    "two-tower": "users.layers.0",
    "llama": "model.layers.0",
    "gpt2": "transformer.h.0",
    "bert": "bert.encoder.layer.0",
    "vit": "vit.layers.0",
}
"""A block of each model, to recompute alone."""


REFUSED = {("lstm-tagger", "selective"): "LSTM writes in place into a result that must be kept"}
"""Model and way of recomputing that are refused, and what is said."""

IN_TURN = ("mnist-mlp", "mnist-cnn", "mlp", "two-tower", "lstm-tagger", "resnet", "vit", "gpt2", "bert", "llama")
"""Which models `make test` runs, each under the next plan: large ones not on four devices, and those that recompute
alone on models that have something to recompute. gpt takes longest, and is left to `make suite`."""

QUICK_ON = {
    "offload parameters": "mnist-mlp",
    "offload optimizer": "two-tower",
    "tensor × recompute selective × offload": "unet",
}
"""The model on which `make test` runs a plan that is not run in turn. The U-Net's `bottom` is recomputed whole, and is
no repeated block."""

STEPS = 5
STEPS_QUICK = 3
"""Of a case that `make test` runs: two whole batches and a ragged one."""


@dataclass(frozen=True)
class Case:
    """A model under a plan, which has a name among the plans."""

    model: str
    label: str
    plan: Plan
    quick: bool

    @property
    def steps(self) -> int:
        """How many steps a check of it takes."""
        return STEPS_QUICK if self.quick else STEPS

    @property
    def refused(self) -> str:
        """What of the plan is refused for this model; empty where nothing is."""
        return next((what for model, what in REFUSED if model == self.model and what == self.plan.recompute), "")

    def __str__(self) -> str:
        return f"{self.model}-{self.label}"


def cases(each: int = 1) -> list[Case]:
    """Every model under every technique and combination; each: check a plan on one model of so many. `quick` is each
    plan once, on the models in turn, but none on eight devices, whose workers take long to start."""
    found = []
    for n, name in enumerate(NAMES):
        for p, (label, plan) in enumerate({**TECHNIQUES, **COMBINATIONS}.items()):
            if isinstance(plan.recompute, tuple):
                plan = replace(plan, recompute=(BLOCKS[name],))
            quick = name == QUICK_ON.get(label, IN_TURN[p % len(IN_TURN)]) and plan.devices < 8
            found += [(n + p, Case(name, label, plan, quick))]
        more = CONTEXT if name in WITH_POSITIONS else {}
        stages = PIPELINES | (PIPELINES_OF_POSITIONS if name in WITH_POSITIONS else {})
        more = more | (stages if name in WITH_STAGES else {}) | LATER
        for p, (label, plan) in enumerate(more.items()):
            quick = (name, label) == ("llama", "context") or QUICK_ON.get(label) == name
            found += [(n + p, Case(name, label, plan, quick))]
    return [case for number, case in found if case.quick or number % each == 0]
