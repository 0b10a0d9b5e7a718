"""A published run becomes a job, a plan and a machine: by the columns of its row and what its framework does.

What a framework does is written down here once, by framework, with where it is from. Nothing here is a time or a size
of memory, and nothing is chosen by what a row measured.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs" / "models"))
from published_models import Bert, Gpt, Llama, Random, ResNet50, Size, own_loss
from published_pieces import SWITCHED, Case, Pipeline, Replicas, padded
from torch import nn

import meshwise as mw
from meshwise.hardware.words import machine_from_words
from meshwise.spec.errors import MeshwiseError

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


def family_of(row: Row) -> str:
    """The model family that a row counts for."""
    return next((family for start, family in FAMILIES.items() if row["model"].startswith(start)), "other")


def case_of(row: Row) -> Case:
    """Raises Unusable."""
    if "moe" in row["model"].lower() or "deepseek" in row["model"].lower() or "mixtral" in row["model"].lower():
        raise Unusable("experts: what they hold is not in the columns")
    if row["precision"].startswith(("float8", "fp8", "fp4", "mxfp8", "nvfp4")) or "fp8" in row["precision"]:
        raise Unusable("a plan has no float8")
    if not row["step_time_s"]:
        raise Unusable("no step time, nor what gives it, is in the row")
    for name, build in BUILDERS.items():
        if name in row["dataset"].lower() or name in row["framework"].lower():
            return build(row)
    raise Unusable(f"no builder for {row['framework']}")


def number(row: Row, column: str, otherwise: int | None = None) -> int:
    """A whole number of the row."""
    found = re.match(r"\d+(\.\d+)?(e\d+)?", row[column])
    if found is None:
        if otherwise is not None:
            return otherwise
        raise Unusable(f"{column} is not stated ('{row[column]}')") from None
    return int(float(found[0]))


def part_of(row: Row) -> str:
    """The part of a row: by its name, else the nearest by its family and memory."""
    name, family = row["gpu"], row["gpu_family"]
    for words in (PARTS.get(name, name), name.split(" (")[0], family, re.split(r"[-_ ]", family or name)[0]):
        try:
            return machine_from_words(PARTS.get(words, words)).devices[0].part
        except MeshwiseError:
            continue
    memory = number(row, "gpu_mem_GB", 80)
    return next(part for least, part in ((170, "B200"), (100, "H200-SXM"), (36, "A100-SXM-80GB"), (0, "V100-SXM2-32GB"))
                if memory >= least)  # fmt: skip


def machine_of(row: Row) -> str:
    """The machine of a row in words."""
    part = part_of(row)
    each, devices = number(row, "gpus_per_node", 8), number(row, "n_gpus")
    if devices <= each:
        switched = part.startswith("V100") and "NVSwitch" in row["intra_link"]
        return f"{max(each, devices)}x{part}{SWITCHED if switched else ''}"
    return f"{math.ceil(devices / each)}x{each}x{part}@{_network(row, part, each):g}Gb"


PORTS = {"V100": 100, "A100": 200, "H100": 400, "H200": 400, "GH200": 400, "B200": 400, "GB200": 400, "B300": 800}
"""Gbit/s of the port that the vendor's own servers have for each GPU, where a row does not say."""


def _network(row: Row, part: str, each: int) -> float:
    """Gbit/s of a host. A rate without "per node" is that of a port; each GPU is taken to have one."""
    text = row["inter_link"]
    found = re.search(r"(?:(\d+)x )?.*?(\d+) Gb/s", text)
    if found is None:
        return each * PORTS.get(part.split("-")[0], 100)
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
    positions and biases (n_params says so), norms in bfloat16, the loss from one kernel (its default), and again as a
    metric of training; AdamW takes one operator after the other."""
    pure = "mode PURE" in row["notes"]
    size = _size(row, positions=number(row, "seq_len"), stream=torch.bfloat16, loss="one kernel", measured=True)
    ranks, each = number(row, "n_gpus"), number(row, "micro_batch")
    recompute = "full" if row["activation_ckpt"] == "full" else "none"

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            shard=ranks, accumulate=microbatches, precision="bf16", grad_dtype="bf16" if pure else "fp32",
            recompute=recompute,
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        samples = ranks * each * microbatches
        found = _job(partial(Gpt, replace(size, layers=layers)), samples, size.length)
        return replace(found, optimizer=partial(torch.optim.AdamW, foreach=False))

    return Case(
        job, plan, machine_of(row), size.layers, number(row, "global_batch") / (ranks * each), reduces=True,
        attention=kernel_of(row),
    )  # fmt: skip


def _torchtitan(row: Row) -> Case:
    """FSDP2: bfloat16 gathered, float32 reduced, fused AdamW, clipped to norm 1; TP with sequence parallel."""
    shard, tensor, context = number(row, "dp"), number(row, "tp"), number(row, "cp")
    selective = row["activation_ckpt"]
    size = _size(row, stream=torch.bfloat16, selective=selective == "selective (op)")
    each = number(row, "micro_batch")
    if selective == "selective (every 2nd layer)":
        raise Unusable("recompute of every second layer does not go with a model of few layers")
    recompute = "full" if selective == "full" else "none"
    compiled = row["compile"] == "yes"

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(
            shard=shard, tensor=tensor, sequence=tensor > 1, context=context, accumulate=microbatches,
            precision="bf16", recompute=recompute,
        )  # fmt: skip

    def job(layers: int, microbatches: int) -> mw.Job:
        samples = shard * each * microbatches
        return _job(partial(Llama, replace(size, layers=layers)), samples, size.length)

    differs = [
        *(["async tensor parallel is not built"] if "async TP" in row["notes"] else []),
    ]
    return Case(
        job, plan, machine_of(row), size.layers, 1, compiled=compiled, memory=bool(row["peak_mem_GiB"]),
        differs=tuple(differs),
    )  # fmt: skip


def _kempnerforge(row: Row) -> Case:
    """FSDP2 and tensor parallel on DTensors. Stored in bfloat16 (`param_dtype`), reduced in float32, fused AdamW,
    the loss on logits of bfloat16 (training/loss.py at 3309cff), gathered before (distributed/tensor_parallel.py)."""
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
        *(["a tensor axis splits the embedding, which KempnerForge leaves whole"] if tensor > 1 else []),
    ]
    return Case(
        job, plan, machine_of(row), size.layers, batch / (shard * each), compiled=row["compile"] == "yes",
        memory=bool(row["peak_mem_GiB"]), differs=tuple(differs),
    )  # fmt: skip


def _fsdp(row: Row) -> Case:
    """PyTorch's FSDP1 around a Llama: bfloat16 gathered and reduced."""
    if "CPU Adam" in row["notes"]:
        raise Unusable("an optimizer that computes on the host: no estimate")
    ranks, each = number(row, "n_gpus"), number(row, "micro_batch")
    size = _size(row, stream=torch.bfloat16)
    recompute = "full" if row["activation_ckpt"] == "full" else "none"

    def plan(microbatches: int) -> mw.Plan:
        return mw.Plan(shard=ranks, accumulate=microbatches, precision="bf16", grad_dtype="bf16", recompute=recompute)

    def job(layers: int, microbatches: int) -> mw.Job:
        return _job(partial(Llama, replace(size, layers=layers)), ranks * each * microbatches, size.length)

    count = number(row, "global_batch") / (ranks * each)
    return Case(
        job, plan, machine_of(row), size.layers, count, attention=kernel_of(row), compiled=row["compile"] == "yes"
    )


FLASH_1 = ("Composer", "lit-gpt")
"""Frameworks of rows whose attention is the first FlashAttention: their tables are of torch 2.0 and before (2023).
fms-fsdp's page says that it has the second one."""


def kernel_of(row: Row) -> str:
    """The kernel of attention, asked from the framework and its time; empty for torch's own of today."""
    return "flash1" if any(name in row["framework"] for name in FLASH_1) else ""


# ---- Megatron -------------------------------------------------------------------------------------------------------

SC21: Mapping[int, tuple[int, int | None]] = {
    **dict.fromkeys((2304, 3072, 4096), (16, None)), 6144: (8, None), 8192: (4, None), 10240: (2, 5), 12288: (2, 5),
    16384: (1, 3), 20480: (1, 1), 25600: (1, None),
}  # fmt: skip
"""By width: samples of a microbatch, and blocks of a virtual stage, of NVIDIA/Megatron-LM examples/sc21/run_table_1.sh:
the script of the table whose rows do not say them."""
GATED = ("llama", "qwen", "mistral", "yi-", "gemma")


def _megatron(row: Row) -> Case:
    """Megatron-LM: replicas of pipelines of tensor parallel stages.

    Weights in 16 bits, the optimizer on float32 copies (52 bytes a parameter moved: gradients widened, scaled, their
    norm, Adam, weights narrowed; 20 of them are traced: Adam and the norm in 16 bits); gradients are reduced behind the
    last backward, in 16 bits where training is in fp16, else in float32. Attention has no kernel of its own until 2023,
    but one for its softmax; blocks are those of Llamas where the model is one."""
    data, tensor, stages = (number(row, name, 1) for name in ("dp", "tp", "pp"))
    each, batch = number(row, "micro_batch", 1), number(row, "global_batch")
    if number(row, "ep", 1) > 1:
        raise Unusable("experts: what they hold is not in the columns")
    if row["model"].startswith("t5"):
        raise Unusable("an encoder and a decoder: no builder")
    context = number(row, "cp", 1)
    names = ("layers", "hidden", "heads")
    layers, width, heads = (number(row, name) for name in names)
    held = None
    if "SC21" in row["framework"] and not row["micro_batch"] and width in SC21:
        each, held = SC21[width]
    hidden, groups = number(row, "ffn", 4 * width), number(row, "kv_heads", heads)
    vocabulary, length = padded(number(row, "vocab", 50257), tensor), number(row, "seq_len")
    if context > 1:
        raise Unusable("Megatron with a context axis: no builder")
    gated = hidden != 4 * width or any(word in row["model"].lower() for word in GATED)
    flash = any(word in row["framework"] for word in ("TE", "Core", "NeMo", "Bridge", "nanotron"))
    selective = row["activation_ckpt"].startswith("selective")
    size = Size(layers, width, heads, groups, hidden, vocabulary, length, stream=torch.bfloat16)
    size = size if gated else replace(size, positions=length, flash=flash, selective=selective and not flash)
    size = replace(size, megatron=True)
    full = row["activation_ckpt"].startswith("full")
    sequence = tensor > 1 and ("sequence parallel" in row["notes"] or "TE" in row["framework"])
    plan_of = partial(
        mw.Plan, tensor=tensor, sequence=sequence, precision="bf16", param_dtype="bf16",
        recompute="full" if full else "none",
    )  # fmt: skip

    def plan(microbatches: int) -> mw.Plan:
        return plan_of(accumulate=microbatches)

    def job(layers: int, microbatches: int) -> mw.Job:
        return _job(partial(Llama if gated else Gpt, replace(size, layers=layers)), each * microbatches, length)

    wide = 2 if "fp16" in row["precision"] else 4
    block = width * (width + 2 * groups * (width // heads) + width) + (3 if gated else 2) * width * hidden
    rest = vocabulary * width
    zero = "ZeRO-1" in row["fsdp_or_zero"]
    replicas = Replicas(data, wide * block / tensor, wide * rest / tensor, 32 / wide, zero)
    word, notes = row["vpp"], row["notes"]
    chunks = math.ceil(layers / stages) if word.startswith("max") else number(row, "vpp", 1)
    if said := re.search(r"num-layers-per-virtual-pipeline-stage=(\d+)", notes):  # the column holds this number there
        held = int(said[1])
    if held is not None:
        chunks = max(layers // stages // held, 1)
    kind = re.search(r"schedule (ZB-[12]p|1F1B(?:-interleaved)?)", notes)
    schedule = {"ZB-1p": "zb-1p", "ZB-2p": "zb-2p"}.get(kind[1] if kind else "", "1f1b")
    message = each * length * width * 2 // (tensor if sequence else 1)
    even = (layers + 2) % stages == 0 and layers % stages != 0  # first and last stage hold one block less
    return Case(
        job, plan, machine_of(row), layers, batch / (data * each), replicas=replicas, within=tensor,
        pipeline=Pipeline(stages, chunks, schedule, message, even), attention="" if not flash else kernel_of(row),
        fused="overlapped" if _overlaps(row) else "fused",
    )  # fmt: skip


def _overlaps(row: Row) -> bool:
    """Whether a sum over tensor ranks runs beside the product for the gradient of the weights: since arXiv 2205.05198
    (section 4.2.2), where nobody switched it off."""
    later = row["framework"] == "Megatron-LM" or "Core" in row["framework"] or "TE" in row["framework"]
    return later and "disabled on purpose" not in row["notes"]


# ---- Replicas --------------------------------------------------------------------------------------------------------

BERTS = {
    "BERT-base": (12, 768, 12),
    "BERT-large": (24, 1024, 16),
    "DistilBERT": (6, 768, 12),
}


def _replicas(row: Row) -> Case:
    """NVIDIA's examples: DistributedDataParallel, AMP or float32; in their containers TF32 is on. Encoders in fp16 are
    apex's O2: all of the model in 16 bits (bfloat16 here, priced as fp16 where a device has none), and an optimizer on
    float32 copies, which moves 44 bytes a parameter: gradients in float32, Adam, weights; 30 more than the trace."""
    ranks = number(row, "n_gpus")
    each = number(row, "micro_batch")
    half = "AMP" in row["precision"] or row["precision"].startswith(("fp16", "bf16"))
    precision = ("bf16" if "bf16" in row["precision"] else "fp16") if half else "fp32"
    sizes = next((size for name, size in BERTS.items() if row["model"].startswith(name)), None)
    length, stored, replicas = number(row, "seq_len", 384), None, Replicas()
    if row["model"].startswith("ResNet-50"):
        layers, build = 1, partial(ResNet50, last=half)
        rows: tuple[object, ...] = (((3, 224, 224), torch.float32), ((), torch.long))
        optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    elif sizes is not None and row["seq_len"]:
        layers, width, heads = sizes
        build = partial(Bert, width=width, heads=heads)
        if half:
            block, rest = 2.0 * 12 * width**2, 2.0 * 31_000 * width
            replicas, stored = Replicas(1, block, rest, 30 / 2), "bf16"
        rows = (((length,), torch.long), ((2,), torch.long))
        optimizer = partial(torch.optim.AdamW, fused=True)
    else:
        raise Unusable(f"{row['model'].split(' ')[0]}: sizes of this model are not in the row")
    part = part_of(row)
    tf32 = "FP32" not in row["precision"] and not part.startswith(("V100", "Quadro"))
    traced = min(ranks, 2)

    def plan(microbatches: int) -> mw.Plan:
        norm = "local" if ranks > 1 and layers == 1 else "global"
        return mw.Plan(data=traced, precision=stored or precision, param_dtype=stored, batch_norm=norm)

    def job(layers: int, microbatches: int) -> mw.Job:
        data = Random(traced * each, *rows)  # type: ignore[arg-type]
        return mw.Job(
            name="published", model=partial(build, layers), loss=own_loss, optimizer=optimizer, data=data,
            batch_size=traced * each,
        )  # fmt: skip

    differs = ("its loader, its fused norms and optimizers are not built",)
    return Case(
        job, plan, machine_of(row), layers, 1, tf32=tf32, ranks=ranks, deep=layers > 1, differs=differs,
        replicas=replicas,
    )  # fmt: skip


BUILDERS: dict[str, Callable[[Row], Case]] = {
    "llm-foundry": _llm_foundry,
    "composer": _llm_foundry,
    "torchtitan": _torchtitan,
    "kempnerforge": _kempnerforge,
    "lambda": _replicas,
    "nvidia-dle": _replicas,
    "deeplearningexamples": _replicas,
    "megatron": _megatron,
    "vtrain": _megatron,
    "nanotron": _megatron,
    "nemo": _megatron,
    "fsdp": _fsdp,
}
"""By what a data set's or a framework's name holds; the first counts."""
