"""Looking for races where torch has no CUDA; with it: tests/cuda/test_races.py. Of torch_compat/gpu_trace.py too."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwise.checker.races.watch import find_races
from meshwise.torch_compat import gpu_trace


@pytest.mark.skipif(gpu_trace.can_listen(), reason="torch has CUDA here")
def test_without_cuda_there_is_nothing_to_see_and_nothing_is_changed() -> None:
    run, query = threading.Thread.run, torch.cuda.Event.query
    with find_races() as found:
        torch.ones(3).add_(1)
        assert (threading.Thread.run, torch.cuda.Event.query) == (run, query)
    assert found == []
