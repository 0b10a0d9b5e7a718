"""Define the constants of the performance model, with errors and sources.

The error (spread) of a constant says how far the true value may lie from it.

Figures of a device model or a link are in hardware/catalog.toml. Some constants were fitted to published runs by
bench/fit.py, as their source says. They change only if it is run again. No constant is specific to a model, a data set
or a published run. `digest()` identifies this table in a scoreboard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

OURS = "our judgement, no source"


@dataclass(frozen=True, slots=True)
class Figure:
    """A constant of the performance model."""

    value: float
    spread: float
    source: str


_FITTED = "fitted to published runs by bench/fit.py, docs/internals/accuracy.md; rows that say most"
_GUIDE = "NVIDIA, Matrix Multiplication Background guide (order of tiles and alignment); the figure is ours"
_TABLES = "VIA-Research/vTrain@f8dda84, trace/: all-reduces of 1 to 32 MB on A100 and V100 over NCCL's tuning.cc"
_EAGER = "stas00/ml-engineering@744d01e18b: a step of 16 blocks, host-bound on a B200, 58.8 ms, compiled 18.7 ms"
_OVERLAP = "arXiv 2507.03114: overlapped compute slows by 18.9 % on average, 40 % at most; Galvatron: 1.1 to 1.3"
_GLOO_AND_COMPUTE = (
    "our measurement, two workers of a core each: a sum of gradients and products that last as long take 1.9 to 2.1 "
    "times as long at once inside a host, whose messages the same cores copy, and 1.3 to 1.5 times over links of 0.1 "
    "to 1 Gbit/s"
)
_NVSMI = "stas00/ml-engineering@744d01e18b: CUDA context 0.47 GiB lazily loaded, 0.92 GiB eagerly"
_NCCL_MEMORY = "NVIDIA/nccl#964: 544 to 688 MB a group on A100; #1685: 1.06 GB with the context on 8 H100; #864: 1.6 GB"

FIGURES: Mapping[str, Figure] = {
    # Fractions of the best matmul rate that the catalog knows (`achievable`); for attention, of the peak rate.
    "matmul": Figure(0.845, 1.15, f"{_FITTED}: language models in 16 bits"),
    "matmul.hopper": Figure(0.742, 1.15, f"{_FITTED}: language models on H100 and H200"),
    "matmul.blackwell": Figure(0.682, 1.15, f"{_FITTED}: language models on B200 and GB200"),
    "matmul.tf32": Figure(0.952, 1.2, f"{_FITTED}: encoders in TF32, over what 16 bits reach"),
    "matmul.fp32": Figure(1.1, 1.2, f"{_FITTED}: encoders in float32 on Volta and Turing, likewise"),
    "matmul.unknown-share": Figure(0.75, 1.25, "median of `achievable` over the catalog's parts"),
    "matmul.shape-unknown": Figure(0.85, 1.3, f"{OURS}: a product whose shape is not seen"),
    "matmul.misaligned": Figure(0.6, 1.4, _GUIDE),
    "matmul.fill": Figure(115.0, 1.5, f"{_FITTED}: small products of tensor axes"),
    "convolution": Figure(0.734, 1.35, f"{_FITTED}: convolutional networks in 16 bits"),
    "convolution.tf32": Figure(0.902, 1.35, f"{_FITTED}: the same in TF32"),
    "convolution.fp32": Figure(1.02, 1.35, f"{_FITTED}: the same in float32 (Winograd among them)"),
    "recurrent": Figure(0.4, 1.6, f"{OURS}: of a matmul of the same size"),
    "attention.ampere.forward": Figure(0.562, 1.25, f"{_FITTED}: FSDP2 on A100"),
    "attention.ampere.backward": Figure(0.467, 1.25, f"{_FITTED}: FSDP2 on A100"),
    "attention.hopper.forward": Figure(0.363, 1.3, f"{_FITTED}: FSDP2 on H100 and H200"),
    "attention.hopper.backward": Figure(0.299, 1.35, f"{_FITTED}: FSDP2 on H100 and H200"),
    "attention.other.forward": Figure(0.30, 1.7, f"{OURS}: no figure of this architecture"),
    "attention.other.backward": Figure(0.24, 1.7, f"{OURS}: no figure of this architecture"),
    "attention.cudnn": Figure(1.6, 1.3, "FlashAttention-3, arXiv 2407.08608, figure 5: cuDNN over FlashAttention-2"),
    "attention.flash1": Figure(0.564, 1.3, f"{_FITTED}: 512 to 65,536 positions under FSDP1 on A100"),
    "attention.efficient": Figure(0.6, 1.4, f"{OURS}: of flash attention"),
    # Memory rates as fractions of the rate of a copy; for a copy, as a fraction of the nominal memory bandwidth.
    "memory.copy": Figure(0.89, 1.1, "catalog.toml, [[reached]] memory: device-to-device copy on an H200"),
    "memory.elementwise": Figure(0.882, 1.15, f"{_FITTED}: all"),
    "memory.reduction": Figure(0.605, 1.3, f"{_FITTED}: all"),
    "memory.batch-norm": Figure(0.54, 1.3, f"{_FITTED}: convolutional networks"),
    "memory.dropout": Figure(0.613, 1.3, f"{_FITTED}: encoders and Megatron"),
    "memory.gather": Figure(0.434, 1.8, f"{_FITTED}: all"),
    "memory.optimizer": Figure(0.856, 1.2, f"{_FITTED}: all"),
    "memory.transpose": Figure(0.768, 1.4, f"{_FITTED}: convolutional networks in TF32"),
    "memory.depthwise": Figure(0.35, 1.6, f"{OURS}: of what a copy reaches; convolutions of one channel a group"),
    # Seconds, and factors on seconds.
    "kernel": Figure(2.03e-06, 1.5, f"{_FITTED}: all"),
    "launch": Figure(1.18e-5, 1.3, _EAGER),
    "compile.memory": Figure(0.484, 1.4, f"{_FITTED}: compiled blocks on H100 and H200"),
    "compile.launch": Figure(0.26, 1.4, _EAGER),
    "program.forward": Figure(3.0, 1.7, f"{OURS}: modules and Python, of a launch; eager inference of small batches"),
    "program.backward": Figure(1.7, 1.6, f"{OURS}: autograd, of a launch"),
    "program.optimizer": Figure(2.0, 1.7, f"{OURS}: Python, of a launch"),
    "program.other": Figure(2.0, 1.7, f"{OURS}: Python, of a launch"),
    "launch.collective": Figure(25e-6, 1.6, f"{OURS}: the host's share of one collective of torch.distributed"),
    # CPUs whose operators were not measured, then spreads of measured times.
    "cpu.matmul": Figure(1.0, 1.35, f"{OURS}: interpolated between measured products"),
    "cpu.convolution": Figure(0.6, 1.6, f"{OURS}: of a matmul of the same size"),
    "cpu.attention": Figure(0.6, 1.6, f"{OURS}: of a matmul of the same size"),
    "cpu.recurrent": Figure(0.5, 1.6, f"{OURS}: of a matmul of the same size"),
    "cpu.memory": Figure(1.0, 1.7, f"{OURS}: of the measured copy; caches are faster, exponentials slower"),
    "measured.operator": Figure(1.0, 1.12, f"{OURS}: the same operator, other data in the caches"),
    "measured.program": Figure(1.0, 1.4, f"{OURS}: what one small model adds to an operator, for another model"),
    "measured.matmul": Figure(1.0, 1.15, f"{OURS}: between measured products of a GPU"),
    "measured.copy": Figure(1.0, 1.15, f"{OURS}: between measured sizes"),
    "measured.collective": Figure(1.0, 1.2, f"{OURS}: the same collective, other loads"),
    "measured.scaled": Figure(1.0, 1.35, f"{OURS}: from another number of ranks"),
    # Collectives.
    "nccl.large": Figure(1.0, 1.15, "catalog.toml, [[reached]]: bus bandwidths measured inside hosts"),
    "nccl.small": Figure(2.2, 1.4, _TABLES),
    "nccl.network": Figure(0.912, 1.3, f"{_FITTED}: shards over hosts"),
    "nccl.pcie": Figure(0.593, 1.5, f"{_FITTED}: replicas on consumer cards"),
    "nccl.unknown": Figure(0.75, 1.3, "nearest of the catalog's shares"),
    "gloo.step": Figure(150e-6, 2.0, f"{OURS}: one step of gloo over TCP"),
    "gloo.network": Figure(0.95, 1.15, "our measurement of gloo on links shaped to 200 Mbit/s by tc tbf"),
    "gloo.pairs": Figure(1.0, 1.6, f"{OURS}: a ring made of measured pairs"),
    "step": Figure(
        1.0, 1.25, "bench/pairs.py on four of its jobs, and two sets of published runs: what no price knows"
    ),
    "step.gpu": Figure(1.0, 1.1, "bench/fit.py: four of five runs lie in the interval, units counted alike"),
    # How much computing and communication slow each other, as factors on the part that overlaps.
    "overlap.compute.gpu": Figure(1.18, 1.1, _OVERLAP),
    "overlap.communication.gpu": Figure(1.15, 1.15, "Galvatron: 1.1 to 1.3"),
    "overlap.compute.cpu": Figure(1.3, 1.3, _GLOO_AND_COMPUTE),
    "overlap.communication.cpu": Figure(1.5, 1.4, _GLOO_AND_COMPUTE),
    "overlap.compute.cpu.inside": Figure(2.0, 1.1, _GLOO_AND_COMPUTE),
    "overlap.communication.cpu.inside": Figure(2.0, 1.1, _GLOO_AND_COMPUTE),
    # Bytes outside the allocator.
    "context": Figure(0.55 * 2**30, 1.5, _NVSMI),
    "communicator": Figure(0.5 * 2**30, 1.7, _NCCL_MEMORY),
    "communicator.peer": Figure(0.25 * 2**30, 2.0, "NVIDIA/nccl#1685: 3.3 GB for sends to 7 peers on 8 H100"),
    "allocated": Figure(1.0, 1.01, "our measurement, bench/edge.py: small tensors that no operator shows"),
    "reserved": Figure(1.0, 1.03, f"{OURS}: blocks that other streams hold longer, addresses of segments"),
    "workspace.hopper": Figure(32 * 2**20, 1.1, "torch: cuBLAS workspace of 4096 × 8 KiB on compute capability 9"),
    "workspace.other": Figure(8.125 * 2**20, 1.1, "torch: cuBLAS workspace :4096:2:16:8"),
}

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.65))
"""Tile sizes of a matmul, each as (rows, columns, rate relative to the best tile)."""
LL, LL128, SIMPLE = 0, 1, 2
NEVER = float("inf")
BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4), "nvls": (NEVER, NEVER, 8.4), "pat": (NEVER, NEVER, 8.4)}
"""NCCL's base latency in microseconds by algorithm, for LL, LL128, Simple. NEVER: the protocol is not supported."""
HOP = {
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("nvlink", "tree"): (0.6, 1.25, 4.0),
    ("nvlink", "nvls"): (NEVER, NEVER, 25.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("pcie", "tree"): (1.0, 1.9, 4.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
    ("network", "tree"): (5.0, 8.5, 14.0),
    ("network", "pat"): (NEVER, NEVER, 14.0),
}
"""NCCL's microseconds per hop by (link, algorithm), for the protocols (LL, LL128, Simple). xGMI counts as NVLink."""
PROTOCOL = (0.25, 0.92, 1.0)
"""The share of the bus bandwidth that each protocol reaches, for LL, LL128 and Simple."""
IN_NETWORK = {4: 0.767, 5: 0.875, 6: 0.922, 7: 0.973, 8: 1.0}
"""The all-reduce rate of NVLS on n ranks, relative to 8 ranks, on H200. Source: stas00/ml-engineering@744d01e18b."""


def digest() -> str:
    """Return a hash of all constants in this file, as twelve hexadecimal digits."""
    table = [(name, one.value, one.spread) for name, one in sorted(FIGURES.items())]
    text = repr((table, TILES, BASE, sorted(HOP.items()), PROTOCOL, sorted(IN_NETWORK.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
