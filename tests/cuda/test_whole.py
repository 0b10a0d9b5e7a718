"""Programs that see whole batches leave on fake GPUs what they leave on as many CPU workers."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.torch_compat.tree import map_tensors
from tests.cuda import whole_programs
from tests.training.whole.running import PROGRAMS, apart, run

pytestmark = pytest.mark.evidence(
    "programs that see whole batches leave on two GPUs what they leave on two CPU workers, and draw what one GPU draws"
)

# fmt: off
OF_WHOLE = [
    "accuracy_beside_loss", "fewer_rows_than_ranks", "minibatches_permuted", "accumulation_by_hand", "loss_scaler",
    "clipped_by_norm_and_value", "batch_norm", "validation_keeps_the_best", "lbfgs", "batch_is_a_dataclass",
    "labels_by_threshold", "weight_of_positives", "dice", "simclr", "clip_with_learned_temperature", "moco", "gan",
    "wgan_with_gradient_penalty", "penalty_on_hidden_gradients", "masked_autoencoder", "meta_learning",
    "graph_of_a_batch", "language_model_returns_its_loss",
]
# fmt: on
OWN = [(name, None) for name in ("autocast", "fp16_that_overflows", "side_stream", "accumulated", "padded")]
OWN += [("accumulated", plan) for plan in (Plan(shard=2), Plan(data=2, zero1=True))]
LATE = ("random", 1)
"""The schedule of streams, under which a missing wait is a wrong number."""


class MadeThere(TorchFunctionMode):
    """What a program of tests/training/whole makes itself is on the GPU, with the numbers that the CPU draws."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = sys._getframe(1), kwargs or {}
        caller = frame.f_back if frame.f_code.co_filename.endswith("splits/constructors.py") else frame
        own = caller is not None and "/whole/programs_" in caller.f_code.co_filename
        if own and func is torch.randn_like:
            func, args = torch.randn, (args[0].shape,)
        made = func(*args, **kwargs)
        return made.to("cuda", non_blocking=True) if own and func in _device_constructors() else made


def of_whole(name: str, device: str) -> Any:
    """What a program of tests/training/whole leaves. Its loaders pin their batches."""

    def distribute(*things: Any) -> Any:
        for loader in things:
            if isinstance(loader, DataLoader):
                loader.pin_memory = device == "cuda"
        return mw.distribute(*things, view="whole")

    if device == "cpu":
        return run(PROGRAMS[name], distribute)
    with MadeThere():
        made = run(PROGRAMS[name], distribute)
    assert all(each.is_cuda for each in made[-1][0].values())
    return map_tensors(torch.Tensor.cpu, made)


def own(name: str, device: str, plan: Plan | None = None) -> Any:
    torch.manual_seed(0)
    return getattr(whole_programs, name)(partial(mw.distribute, view="whole", plan=plan), device)


def assert_equal(every: list[Any], want: Any) -> None:
    for got in every:
        far, at = apart(got, want)
        assert far < 1e-12, f"{far} {at}"


@pytest.mark.parametrize("name", OF_WHOLE)
def test_a_program_leaves_on_gpus_what_it_leaves_on_cpu_workers(gpus: Any, pool: Any, name: str) -> None:
    assert_equal(gpus(2, *LATE).run(of_whole, name, "cuda"), pool(2).run(of_whole, name, "cpu")[0])


@pytest.mark.parametrize(("name", "plan"), OWN, ids=str)
def test_a_program_for_a_gpu_leaves_what_it_leaves_on_cpu_workers(gpus: Any, pool: Any, name: str, plan: Any) -> None:
    want = pool(2).run(own, name, "cpu", plan)[0]
    for schedule in (("immediate", 0), LATE):
        assert_equal(gpus(2, *schedule).run(own, name, "cuda", plan), want)


def test_a_program_draws_on_two_gpus_what_it_draws_on_one(gpus: Any) -> None:
    (want,) = gpus(1).run(own, "drawn", "cuda")
    assert_equal(gpus(2, *LATE).run(own, "drawn", "cuda"), want)


def test_gpus_that_drop_values_out_end_alike(gpus: Any) -> None:
    first, second = gpus(2, *LATE).run(own, "dropped", "cuda")
    assert_equal([second], first)
