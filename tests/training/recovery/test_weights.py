"""Final weights load in plain PyTorch, without us."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from meshwise.training.recovery.weights import save_weights


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_load_in_plain_torch_and_stay_tied(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "weights.safetensors"
    save_weights(model, path)
    fresh = Tied()
    loaded = load_file(path)
    assert loaded.keys() == model.state_dict().keys()
    fresh.load_state_dict(loaded)
    assert fresh.head.weight is fresh.embed.weight
    assert fresh.head.weight.equal(model.embed.weight)


def test_every_kind_of_tensor_is_kept_as_it_is(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("bf16", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    model.register_buffer("counter", torch.tensor(2**40))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("turned", torch.arange(6.0, dtype=torch.float64).view(2, 3).t())  # not contiguous
    model.register_buffer("slice", torch.arange(100.0)[10:12])
    save_weights(model, tmp_path / "w")
    loaded = load_file(tmp_path / "w")
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].equal(tensor)
    assert (tmp_path / "w").stat().st_size < 1000  # the slice does not bring its whole storage along


def test_saving_leaves_the_model_alone(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model, tmp_path / "w")
    assert model.embed.weight.requires_grad
    assert model.head.weight is model.embed.weight
