"""A model of 470 MB on four workers: built, loaded and trained, and no process ever holds it whole. One above what a
process may hold: it predicts divided, where one device cannot.

What a process peaks at is compared with its own peak before the model, as the interpreter alone is larger than this
one.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwise as mw
from tests.parallel import big_model

SIZES = {"layers": 8, "width": 1024, "words": 8192}
OVER = 150e6  # bytes beside the part and the largest parameter: what is imported meanwhile, and holes of the heap


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_four_workers_build_load_and_train_what_none_holds_whole() -> None:
    found = big_model.run(4, SIZES, train=True)
    for way in ("construct", "load"):
        ranks = found[way]
        assert sum(rank["part"] for rank in ranks) == ranks[0]["model"]
        for rank in ranks:
            assert rank["part"] + rank["largest"] + OVER < 0.7 * rank["model"]  # else a small peak shows nothing
            assert rank["peak"] - rank["interpreter"] < rank["part"] + rank["largest"] + OVER, (way, rank)
    for rank in found["construct"]:
        assert rank["gradients"] == rank["part"]


WIDTH, LAYERS = 2048, 24
MODEL = 4 * LAYERS * WIDTH * (WIDTH + 1)  # bytes


def whole() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def above_the_cap() -> nn.Module:
    """From here on this process may map 0.8 of the model more than it does; holes of the heap would count."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: larger blocks are given back when they are freed
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    most = int(held.split()[1]) * 1024 + int(0.8 * MODEL)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return whole()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not count what a process maps")
def test_a_model_above_the_cap_of_a_process_predicts_divided(processes: None) -> None:
    x = torch.randn(13, WIDTH)
    found = mw.predict(above_the_cap, (x,), devices="2xcpu", plan=mw.Plan(shard=2), batch_size=8)
    assert found.samples == 13
    with torch.no_grad():
        assert torch.allclose(found.outputs, whole()(x), atol=1e-5)
    with pytest.raises(mw.WorkerFailed, match="memory"):
        mw.predict(above_the_cap, (x,), devices="1xcpu", batch_size=8)
