"""Weights of a safetensors checkpoint: each rank reads its part; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.apply import apply
from meshwise.parallel.deferred import deferred, materialise
from meshwise.parallel.load import Loaded, load_weights
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.zoo import Transformer


def saved(folder: Path, files: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A transformer's weights (its head is tied and not stored), in one file or in several with an index."""
    torch.manual_seed(5)
    weights = {k: v.detach().clone().to(dtype) for k, v in Transformer().state_dict().items() if k != "head.weight"}
    names, where = sorted(weights), {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number}.safetensors"
        part = {name: weights[name] for name in names[number::files]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return weights


def assert_loaded(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found["head.weight"] is found["embed.weight"]
    for name, value in weights.items():
        p = found[name].detach()
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, value.to(p.dtype)), name


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_plain_or_deferred_model_is_loaded(files: int, late: bool, tmp_path: Path) -> None:
    weights = saved(tmp_path, files)
    if late:
        with deferred():
            model = Transformer()
        assert len(load_weights(model, tmp_path).names) == len(weights)
        materialise(model)
    else:
        model = Transformer()
        assert load_weights(model, tmp_path) == Loaded(tuple(dict(model.named_parameters())))
    assert_loaded(model, weights)


def test_dtypes_are_converted_and_it_is_said(tmp_path: Path) -> None:
    weights = saved(tmp_path, dtype=torch.bfloat16)
    model = Transformer()
    assert "place: bfloat16 to float32" in load_weights(model, tmp_path / "model.safetensors").converted
    assert_loaded(model, weights)


def sharded(folder: Path, when: str) -> list[Any]:
    rank, size = collectives.get_rank(), collectives.world_size()
    torch.manual_seed(rank)
    with deferred():
        model = Transformer()
    if when == "before":
        load_weights(model, folder)
    applied = apply(model, Plan(shard=size), World(rank=rank, size=size))
    if when == "after":
        load_weights(applied.model, folder)
    return [p.detach().full_tensor() for p in model.parameters()], model.head.weight is model.embed.weight


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_its_part(size: int, when: str, tmp_path: Path, pool: Any) -> None:
    weights = saved(tmp_path, files=2)
    order = [name for name, _ in Transformer().named_parameters()]
    for found, tied in pool(size).run(sharded, tmp_path, when):
        assert tied and all(torch.equal(value, weights[name]) for name, value in zip(order, found, strict=True))


def test_what_the_file_lacks_is_constructed(tmp_path: Path) -> None:
    weights = saved(tmp_path)
    del weights["place"], weights["layers.1.rise.weight"]
    save_file(weights, tmp_path / "some.safetensors")
    torch.manual_seed(3)
    want = Transformer()
    torch.manual_seed(3)
    with deferred():
        model = Transformer()
    loaded = load_weights(model, tmp_path / "some.safetensors", strict=False)
    assert loaded.kept == ("place", "layers.1.rise.weight")
    materialise(model)
    assert torch.equal(model.place, want.place)
    assert torch.equal(model.layers[1].rise.weight, want.layers[1].rise.weight)
    assert_loaded(model, weights)


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    weights = saved(tmp_path)
    weights["other"] = weights.pop("place")
    save_file(weights, tmp_path / "names.safetensors")
    model = Transformer()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"it lacks place; it has other, which the model lacks. Use strict=False"):
        load_weights(model, tmp_path / "names.safetensors")
    weights["place"] = weights.pop("other")[:2].clone()
    save_file(weights, tmp_path / "shapes.safetensors")
    with pytest.raises(
        UsageError, match=r"place has shape \(2, 32\) in the checkpoint and \(6, 32\) in the model\. Build the model"
    ):
        load_weights(model, tmp_path / "shapes.safetensors", strict=False)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(UsageError, match=r"does not exist\. Give a \.safetensors file"):
        load_weights(model, tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="is not a safetensors checkpoint"):
        load_weights(model, tmp_path / "bad.safetensors")


def test_a_loaded_model_that_has_no_values_yet_cannot_be_changed(tmp_path: Path) -> None:
    saved(tmp_path)
    with deferred():
        model = Transformer()
    load_weights(model, tmp_path)
    model.double()
    with pytest.raises(UsageError, match=r"was changed \(_to_copy\) after mw.load_weights"):
        materialise(model)
