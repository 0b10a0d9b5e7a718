"""Blocks are found from the module tree alone, and a block that is sharded is gathered however it is called."""

import pytest
import torch
from torch import nn

from meshwise.parallel.blocks import blocks_of, repeated_blocks
from meshwise.parallel.shard_units import StaysGathered
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.modules import hooks_at_forward
from meshwise.training.jobs.registry import find_job


def test_the_entries_of_lists_are_blocks_and_what_stands_beside_them() -> None:
    names = [name for name, _ in blocks_of(find_job("gpt:tiny").model())]
    assert "blocks.0" in names and "blocks.1" in names and "embed" in names
    assert not any(name.startswith("blocks.0.") for name in names)


def test_lists_inside_other_modules_are_looked_into() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.norm = nn.LayerNorm(2)
            self.drop = nn.Dropout()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.head = nn.Linear(2, 2)

    names = [name for name, _ in blocks_of(Whole())]
    assert names == ["body.layers.0", "body.layers.1", "body.layers.2", "body.norm", "head"]


def test_a_sequence_and_a_plain_module() -> None:
    assert [n for n, _ in blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))] == ["0", "2"]
    assert blocks_of(nn.Linear(2, 2)) == []


def test_a_list_of_lists_is_looked_into() -> None:
    """Funnel's encoder is a list of stages, each a list of one layer or more: a list is never called."""
    layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())  # noqa: E731
    stages = nn.ModuleList(nn.ModuleList([layer()]) for _ in range(2))
    assert [name for name, _ in repeated_blocks(nn.ModuleDict({"blocks": stages}))] == ["blocks.0.0", "blocks.1.0"]


def test_a_forward_that_is_called_by_itself_comes_past_the_hooks_once() -> None:
    layer, seen = nn.Linear(2, 2), list[str]()
    layer.register_forward_pre_hook(lambda *unused: seen.append("before"))
    layer.register_forward_hook(lambda *unused: seen.append("after"))
    hooks_at_forward(layer)
    x = torch.ones(1, 2)
    for _ in range(2):
        assert torch.equal(layer.forward(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(x), layer.forward(x))
    assert seen == ["before", "after"] * 6


def test_a_forward_that_casts_a_gathered_layer_is_refused() -> None:
    """NLLB's router does `self.classifier = self.classifier.to(dtype)`: a cast layer would keep the first step's."""

    class Router(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.classifier, self.dtype = nn.Linear(2, 2), dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.classifier = self.classifier.to(self.dtype)
            found: torch.Tensor = self.classifier(x.to(self.dtype))
            return found

    for dtype in (torch.float32, torch.bfloat16):
        router = Router(dtype)
        StaysGathered(router)
        if dtype == torch.float32:
            router(torch.ones(1, 2))
        else:
            with pytest.raises(PlanError, match=r"changes its parameter classifier.weight"):
                router(torch.ones(1, 2))
