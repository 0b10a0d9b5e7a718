"""A model of 470 MB on four workers: built, loaded and trained, and no process ever holds it whole.

The same code as the proof with 4 GB, bench/big_model.py. What a process peaks at is compared with its own peak before
the model, as the interpreter alone is larger than this one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import big_model

cloudpickle.register_pickle_by_value(big_model)

SIZES = {"layers": 8, "width": 1024, "words": 8192}
OVER = 150e6  # bytes beside the part and the largest parameter: what is imported meanwhile, and holes of the heap


@pytest.mark.slow
def test_four_workers_build_load_and_train_what_none_holds_whole() -> None:
    found = big_model.run(4, SIZES, train=True)
    for way in ("construct", "load"):
        ranks: list[dict[str, Any]] = found[way]["ranks"]
        assert sum(rank["part"] for rank in ranks) == ranks[0]["model"]
        for rank in ranks:
            assert rank["part"] + rank["largest"] + OVER < 0.7 * rank["model"]  # else a small peak shows nothing
            assert rank["peak"] - rank["interpreter"] < rank["part"] + rank["largest"] + OVER, (way, rank)
    for rank in found["construct"]["ranks"]:
        assert rank["gradients"] == rank["part"]
