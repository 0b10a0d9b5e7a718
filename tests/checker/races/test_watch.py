"""Looking for races where torch has no CUDA; with it: tests/cuda/test_races.py. Of torch_compat/gpu_trace.py too."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwise.checker.races.watch import find_races


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has CUDA here")
def test_without_cuda_nothing_is_changed_and_it_is_said_that_nothing_was_watched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start, query = threading.Thread.start, torch.cuda.Event.query
    with find_races() as found:
        torch.ones(3).add_(1)
        assert (threading.Thread.start, torch.cuda.Event.query) == (start, query)
    assert found == [] and "watched nothing: the program has used no CUDA device" in capsys.readouterr().err
