"""Whether `meshwise plan` chooses what experts chose: twelve published configurations.

    python bench/experts.py [--only NAME] [--seconds 60] [--score]      goes on where it stopped

Of each: the model, the machine and the global batch as published, and the mesh that its makers ran it on. The search
is that of `mw.plan`, with what the makers' program had: Megatron of 2021 and 2022 had no sharding of parameters, so
that plans of it have `shard=1`. A plan is the experts' if its mesh is theirs, whatever its microbatches and recompute.
An expert's plan that is not among the first three is rehearsed too, and its seconds stand beside those of the first.

Goal: the experts' mesh among the first three plans in at least 9 of 12. Result: bench/results/experts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keep import RESULTS, keep

KEPT = RESULTS / "experts.json"
FIRST = 3
AXES = ("data", "shard", "tensor", "pipeline")
TITAN, PAPER = "torchtitan/benchmarks, llama3_h100_202412", "arXiv:2410.06511, tables 2 to 4"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
SC21, SEQUENCE = "arXiv:2104.04473, table 1", "arXiv:2205.05198, tables 3 and 5"


@dataclass(frozen=True)
class Config:
    """kind, layers, width, heads, groups (heads of keys), hidden, vocabulary, length: of the model. batch: samples of
    the global batch. settings: of every plan. expert: the axes of the mesh that its makers ran, those above 1."""

    kind: str
    sizes: tuple[int, int, int, int, int, int, int]
    batch: int
    machine: str
    expert: dict[str, int]
    source: str
    settings: tuple[str, ...] = ("precision=bf16",)


LLAMA_8B = (32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_70B = (80, 8192, 64, 8, 28672, 128256, 8192)
LLAMA_405B = (126, 16384, 128, 8, 53248, 128256, 8192)
NO_SHARD = ("precision=bf16", "param_dtype=bf16", "shard=1")


def gpt(layers: int, width: int, heads: int, vocabulary: int) -> tuple[int, int, int, int, int, int, int]:
    """Sizes of a GPT of rows of 2,048 tokens."""
    return layers, width, heads, heads, 4 * width, vocabulary, 2048


H100, A80, A40 = "H100-SXM-96GB", "A100-SXM-80GB", "A100-SXM-40GB"
CONFIGS = {
    "Llama 8B on 8": Config("llama", LLAMA_8B, 16, f"8x{H100}", {"shard": 8}, TITAN),
    "Llama 8B on 128": Config("llama", LLAMA_8B, 256, f"16x8x{H100}@3200Gb", {"shard": 128}, TITAN),
    "Llama 70B on 256": Config("llama", LLAMA_70B, 512, f"32x8x{H100}@3200Gb", {"shard": 32, "tensor": 8}, PAPER),
    "Llama 405B on 512": Config(
        "llama", LLAMA_405B, 256, f"64x8x{H100}@3200Gb", {"shard": 8, "tensor": 8, "pipeline": 8}, PAPER
    ),
    "MPT 760M on 8": Config("gpt", gpt(24, 1536, 12, 50432), 384, f"8x{A40}", {"shard": 8}, FOUNDRY),
    "MPT 13B on 8": Config("gpt", gpt(40, 5120, 40, 50432), 48, f"8x{A80}", {"shard": 8}, FOUNDRY),
    "MPT 13B on 64": Config("gpt", gpt(40, 5120, 40, 50432), 1024, f"8x8x{A40}@1600Gb", {"shard": 64}, FOUNDRY),
    "MPT 70B on 64": Config("gpt", gpt(80, 8192, 64, 50432), 2048, f"8x8x{A80}@1600Gb", {"shard": 64}, FOUNDRY),
    "GPT 1.7B on 32": Config("gpt", gpt(24, 2304, 24, 51200), 512, f"4x8x{A80}@1600Gb", {"data": 32}, SC21, NO_SHARD),
    "GPT 39B on 512": Config(
        "gpt", gpt(48, 8192, 64, 51200), 1536, f"64x8x{A80}@1600Gb", {"data": 32, "tensor": 8, "pipeline": 2}, SC21,
        NO_SHARD,
    ),
    "GPT 146B on 1536": Config(
        "gpt", gpt(80, 12288, 96, 51200), 2304, f"192x8x{A80}@1600Gb", {"data": 24, "tensor": 8, "pipeline": 8}, SC21,
        NO_SHARD,
    ),
    "GPT 175B on 64": Config(
        "gpt", gpt(96, 12288, 96, 51200), 64, f"8x8x{A80}@1600Gb", {"tensor": 8, "pipeline": 8}, SEQUENCE, NO_SHARD
    ),
}  # fmt: skip


def job_of(name: str, config: Config) -> Any:
    """The job, with fused AdamW, clipped to norm 1; nobody reads its random data."""
    import torch
    from published_models import Gpt, Llama, Random, Size, own_loss

    import meshwise as mw

    size = Size(*config.sizes, stream=torch.bfloat16)
    length = size.length
    model = partial(Llama, size) if config.kind == "llama" else partial(Gpt, replace(size, positions=length))
    data = Random(2 * config.batch, ((length,), torch.long), ((length,), torch.long))
    return mw.Job(
        name=name, model=model, loss=own_loss, data=data, batch_size=config.batch,
        optimizer=partial(torch.optim.AdamW, fused=True), clip_norm=1.0,
    )  # fmt: skip


def mesh_of(plan: Any) -> dict[str, int]:
    """The axes of a plan's mesh that are above 1."""
    return {axis: getattr(plan, axis) for axis in AXES if getattr(plan, axis) > 1}


def row_of(estimate: Any) -> dict[str, Any]:
    """What is kept of an estimate."""
    from meshwise.spec.plan_settings import settings_text

    seconds = estimate.seconds and estimate.seconds.value
    gib = estimate.memory.total.value / 2**30
    found = {"plan": settings_text(estimate.plan), "seconds": seconds, "GiB": gib, "verdict": estimate.memory.verdict}
    return found | {"mesh": mesh_of(estimate.plan)}


def searched(name: str, seconds: float) -> dict[str, Any]:
    """Search, and find the experts' mesh."""
    import meshwise as mw
    from meshwise.rehearsal.estimate import FITS, UNKNOWN

    config = CONFIGS[name]
    job, began = job_of(name, config), time.process_time()
    plans = mw.plan(job, machine=config.machine, settings=config.settings, seconds=seconds)
    rows = [row_of(each) for each in plans.found.estimates]
    fitting = [row for row in rows if row["verdict"] in (FITS, UNKNOWN)]
    place = next((n for n, row in enumerate(fitting, 1) if row["mesh"] == config.expert), None)
    guessed = [mesh_of(plan) for plan, _ in plans.found.first]
    return {
        "name": name, "expert": config.expert, "source": config.source, "machine": config.machine, "place": place,
        "seconds of a processor": time.process_time() - began, "guessed first": guessed, "rows": rows[:12],
        "left": len(plans.found.left), "worse": len(plans.found.worse), "refused": len(plans.found.refused),
    }  # fmt: skip


def main() -> None:
    """Each search in a process of its own; then the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a processor, for each search")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(searched(given.inside, given.seconds)))
        return
    rows: list[dict[str, Any]] = json.loads(KEPT.read_text())["rows"] if KEPT.exists() else []
    for name in CONFIGS:
        if given.score or given.only not in name or any(row["name"] == name for row in rows):
            continue
        words = [sys.executable, __file__, "--inside", name, "--seconds", str(given.seconds)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            print(f"{name}: {done.stderr[-1500:]}", flush=True)
            continue
        rows.append(row := json.loads(done.stdout.splitlines()[-1]))
        took = row["seconds of a processor"]
        print(f"{name:18} expert {row['expert']}: place {row['place']}, {took:.0f} s", flush=True)
        for one in row["rows"][:5]:
            figures = f"{one['seconds'] or 0:8.3f} s {one['GiB']:7.1f} GiB"
            print(f"    {figures} {one['verdict']:18} {one['plan']}", flush=True)
        keep_all(rows)
    print(f"{keep_all(rows)} of {len(rows)} searches have the experts' mesh among the first {FIRST}")


def keep_all(rows: list[dict[str, Any]]) -> int:
    """Write the result. Return how many searches have the experts' mesh among the first."""
    among = sum(row["place"] is not None and row["place"] <= FIRST for row in rows)
    keep("experts", {"among the first": among, "of": len(rows), "rows": rows})
    return among


if __name__ == "__main__":
    main()
