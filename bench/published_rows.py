"""A published run becomes a job, a plan and a machine: by the columns of its row and what its framework does.

What a framework does is written down here once, by framework, with where it is from. Nothing here is a time or a size
of memory, and nothing is chosen by what a row measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from published_models import Gpt, Llama, Random, Size, own_loss
from published_vision import Bert, ResNet50
from torch import nn

import meshwise as mw

Row = Mapping[str, str]

PARTS = {
    "A100-80GB-SXM": "A100-SXM-80GB",
    "A100 80GB SXM4": "A100-SXM-80GB",
    "A100-40GB-SXM": "A100-SXM-40GB",
    "A100-SXM": "A100-SXM-80GB",
    "A100 40GB PCIe": "A100-PCIe-40GB",
    "A100 80GB PCIe": "A100-PCIe-80GB",
    "H100-96GB-HBM2e-500W": "H100-SXM-96GB",
    "H100 80GB SXM5": "H100-SXM",
    "H100 80GB PCIe Gen5": "H100-PCIe",
    "H200-141GB-SXM": "H200-SXM",
    "B200-SXM": "B200",
    "V100-16GB-SXM": "V100-SXM2-16GB",
    "V100-32GB-SXM": "V100-SXM2-32GB",
    "V100 16GB": "V100-SXM2-16GB",
    "RTX 3090": "RTX-3090",
    "RTX 4090": "RTX-4090",
    "RTX A6000": "RTX-A6000",
    "RTX 6000 Ada": "RTX-6000-Ada",
    "Quadro RTX 8000": "Quadro-RTX-8000",
    "A10": "A10",
}
FAMILIES = {"MPT": "MPT", "Llama": "Llama", "GPT": "GPT", "ResNet": "ResNet", "BERT": "BERT", "llama": "Llama"}
"""The model families of the split, by how a row's model begins: fixed before the first run."""


class Unusable(Exception):
    """Why a row cannot be built."""


@dataclass(frozen=True)
class Case:
    """job: of so many layers, with a global batch for so many microbatches a step. layers, microbatches: those of the
    row; microbatches may be broken where the last one is smaller. reduces: whether each microbatch ends with the
    reduction of its gradients, not the last one alone: such a row is traced with one. tf32: whether products of float32
    may be. differs: what is known to differ from the row."""

    job: Callable[[int, int], mw.Job]
    plan: Callable[[int], mw.Plan]
    machine: str
    layers: int
    microbatches: float
    reduces: bool = False
    tf32: bool = False
    differs: tuple[str, ...] = ()


def family_of(row: Row) -> str:
    """The model family that a row counts for."""
    return next((family for start, family in FAMILIES.items() if row["model"].startswith(start)), "other")


def case_of(row: Row) -> Case:
    """Raises Unusable."""
    build = BUILDERS.get(row["dataset"])
    if build is None:
        raise Unusable("no builder for this data set yet")
    return build(row)


def number(row: Row, column: str) -> int:
    """A whole number of the row."""
    try:
        return int(float(row[column]))
    except ValueError:
        raise Unusable(f"{column} is not stated ('{row[column]}')") from None


def machine_of(row: Row) -> str:
    """The machine of a row in words."""
    if row["gpu"] not in PARTS:
        raise Unusable(f"{row['gpu']} is not in the catalog")
    each, devices = number(row, "gpus_per_node"), number(row, "n_gpus")
    if devices <= each:
        return f"{devices}x{PARTS[row['gpu']]}"
    return f"{math.ceil(devices / each)}x{each}x{PARTS[row['gpu']]}@{_network(row, each):g}Gb"


def _network(row: Row, each: int) -> float:
    """Gbit/s of a host. A rate without "per node" is that of a port; each GPU is taken to have one."""
    text = row["inter_link"]
    if "RoCE RDMA" in text:  # zero-bubble: the rate is not stated
        raise Unusable("network between hosts is not stated")
    found = re.search(r"(?:(\d+)x )?.*?(\d+) Gb/s", text)
    if found is None:
        raise Unusable(f"network between hosts is not stated ('{text}')")
    ports = 1 if "per node" in text and not found[1] else int(found[1] or each)
    return ports * float(found[2])


# ---- FSDP ------------------------------------------------------------------------------------------------------------


def _job(build: Callable[[int], nn.Module], samples: int, length: int) -> mw.Job:
    """With fused AdamW, clipped to norm 1."""
    data = Random(samples, ((length,), torch.long), ((length,), torch.long))
    return mw.Job(
        name="published", model=build, loss=own_loss, data=data, batch_size=samples,
        optimizer=partial(torch.optim.AdamW, fused=True), clip_norm=1.0,
    )  # fmt: skip


def _size(row: Row, **others: object) -> Size:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
    return replace(Size(*(number(row, name) for name in names)), **others)  # type: ignore[arg-type]


def _llm_foundry(row: Row) -> Case:
    """Composer with FSDP1: bfloat16 gathered; reduced in bfloat16 (PURE) or float32 (DEFAULT). MPT with learned
    positions and biases (n_params says so), norms in bfloat16, and the loss from one kernel (its default)."""
    pure = "mode PURE" in row["notes"]
    size = _size(row, positions=number(row, "seq_len"), stream=torch.bfloat16, loss="one kernel")
    ranks, each = number(row, "n_gpus"), number(row, "micro_batch")
    recompute = "full" if row["activation_ckpt"] == "full" else "none"

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            shard=ranks, accumulate=microbatches, precision="bf16", grad_dtype="bf16" if pure else "fp32",
            recompute=recompute,
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        samples = ranks * each * microbatches
        return _job(partial(Gpt, replace(size, layers=layers)), samples, size.length)

    differs = ("its AdamW is Composer's own, here torch's fused one",)
    return Case(job, plan, machine_of(row), size.layers, number(row, "global_batch") / (ranks * each), True, differs)


def _torchtitan(row: Row) -> Case:
    """FSDP2: bfloat16 gathered, float32 reduced, fused AdamW, clipped to norm 1; TP with sequence parallel."""
    if row["precision"] != "bf16":
        raise Unusable("a plan has no float8")
    shard, tensor, context = number(row, "dp"), number(row, "tp"), number(row, "cp")
    selective = row["activation_ckpt"]
    size = _size(row, stream=torch.bfloat16, selective=selective == "selective (op)")
    each = number(row, "micro_batch")
    if selective == "selective (every 2nd layer)":
        raise Unusable("recompute of every second layer does not go with a model of few layers")
    recompute = "full" if selective == "full" else "none"

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            shard=shard, tensor=tensor, sequence=tensor > 1, context=context, accumulate=microbatches,
            precision="bf16", recompute=recompute,
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        samples = shard * each * microbatches
        return _job(partial(Llama, replace(size, layers=layers)), samples, size.length)

    differs = [
        *(["compiled blocks are traced as they run uncompiled"] if row["compile"] == "yes" else []),
        *(["async tensor parallel is not built"] if "async TP" in row["notes"] else []),
    ]
    return Case(job, plan, machine_of(row), size.layers, 1, differs=tuple(differs))


def _kempnerforge(row: Row) -> Case:
    """FSDP2 and tensor parallel on DTensors. Stored in bfloat16 (`param_dtype`), reduced in float32, fused AdamW,
    the loss on logits of bfloat16 (training/loss.py at 3309cff), gathered before (distributed/tensor_parallel.py)."""
    if row["model"].startswith("MoE"):
        raise Unusable("experts: sizes are not stated")
    if number(row, "pp") > 1:
        raise Unusable("pipeline with batch in a file that is not at hand")
    if row["ffn"].startswith("auto"):
        raise Unusable("width of the feed-forward layers is not stated")
    shard, tensor = number(row, "dp"), number(row, "tp")
    size, batch = _size(row, loss="narrow", gathers=True), number(row, "global_batch")
    each = number(row, "micro_batch")

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            shard=shard, tensor=tensor, sequence=tensor > 1, accumulate=microbatches, precision="bf16",
            param_dtype="bf16", grad_dtype="fp32" if shard > 1 else None, recompute="full",
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        samples = shard * each * microbatches
        return _job(partial(Llama, replace(size, layers=layers)), samples, size.length)

    differs = [
        *(["compiled blocks are traced as they run uncompiled"] if row["compile"] == "yes" else []),
        *(["a tensor axis splits the embedding, which KempnerForge leaves whole"] if tensor > 1 else []),
    ]
    return Case(job, plan, machine_of(row), size.layers, batch / (shard * each), differs=tuple(differs))


# ---- Replicas --------------------------------------------------------------------------------------------------------

BERTS = {"BERT-base SQuAD": (12, 768, 12), "BERT-large SQuAD": (24, 1024, 16)}


def _replicas(row: Row) -> Case:
    """NVIDIA's examples: DistributedDataParallel, AMP or float32; in their containers TF32 is on."""
    ranks = number(row, "n_gpus")
    each = number(row, "micro_batch")
    half = "AMP" in row["precision"]
    precision = ("bf16" if "bf16" in row["precision"] else "fp16") if half else "fp32"
    if row["model"] == "ResNet-50 v1.5":
        layers, build = 1, partial(ResNet50, last=half)
        rows: tuple[object, ...] = (((3, 224, 224), torch.float32), ((), torch.long))
        optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    elif row["model"] in BERTS:
        layers, width, heads = BERTS[row["model"]]
        build = partial(Bert, width=width, heads=heads)
        rows = (((384,), torch.long), ((2,), torch.long))
        optimizer = partial(torch.optim.AdamW, fused=True)
    else:
        raise Unusable("sizes of this model are not in the row")

    def plan(microbatches: int) -> mw.Plan:
        norm = "local" if ranks > 1 and layers == 1 else "global"
        return mw.Plan(data=ranks, precision=precision, batch_norm=norm)

    def job(layers: int, microbatches: int) -> mw.Job:
        data = Random(ranks * each, *rows)  # type: ignore[arg-type]
        return mw.Job(
            name="published", model=partial(build, layers), loss=own_loss, optimizer=optimizer, data=data,
            batch_size=ranks * each,
        )  # fmt: skip

    differs = ("its loader, its fused norms and optimizers are not built",)
    return Case(job, plan, machine_of(row), layers, 1, tf32="FP32" not in row["precision"], differs=differs)


def _megatron_single(row: Row) -> Case:
    """Megatron-LM on one host: replicas of tensor parallel of pipelines, 1F1B, full recompute, fp16 with float32
    masters, attention without flash attention. Vocabulary padded to a multiple of 128 and of the tensor ranks."""
    data, tensor, pipeline = (number(row, name) for name in ("dp", "tp", "pp"))
    each, batch = number(row, "micro_batch"), number(row, "global_batch")
    names = ("layers", "hidden", "heads", "kv_heads", "ffn")
    padded = math.ceil(50257 / (128 * tensor)) * 128 * tensor
    length = number(row, "seq_len")
    size = Size(*(number(row, name) for name in names), padded, length, length, torch.bfloat16, flash=False)

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            data=data, pipeline=pipeline, tensor=tensor, accumulate=microbatches, precision="bf16", recompute="full",
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        found = _job(partial(Gpt, replace(size, layers=layers)), data * each * microbatches, length)
        return replace(found, stage_cost=lambda name, block: 1.0 if name.startswith("blocks") else 0.0)

    if pipeline > 1:
        raise Unusable("pipelines are not extrapolated yet")
    return Case(job, plan, machine_of(row), size.layers, batch / (data * each), differs=("dtype is not stated",))


BUILDERS: dict[str, Callable[[Row], Case]] = {
    "llm-foundry": _llm_foundry,
    "torchtitan": _torchtitan,
    "kempnerforge": _kempnerforge,
    "lambda": _replicas,
    "nvidia-dle": _replicas,
    "vtrain-single": _megatron_single,
}
