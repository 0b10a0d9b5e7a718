"""Recompute: what runs again in the backward, and that the second run is the first."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.apply import apply
from meshwise.parallel.recompute import recompute_blocks
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.dispatch import intercept_operators, operator_name
from tests.parallel.zoo import ZOO, ConvNet, Transformer, batches, build


def run_twice(recompute: Any) -> Counter[str]:
    """Operators that a backward of the transformer runs."""
    model = build("transformer")
    recompute_blocks(model, recompute)
    (batch, target), *_ = batches("transformer", 1)
    loss = ZOO["transformer"].score(model(batch), target)
    seen: Counter[str] = Counter()

    def counted(operator: Any, args: Any, kwargs: Any) -> Any:
        seen[operator_name(operator)] += 1
        return operator(*args, **kwargs)

    with intercept_operators(counted):
        loss.backward()
    return seen


DEAR = ("addmm", "_scaled_dot_product_flash_attention_for_cpu")
CHEAP = ("gelu", "native_layer_norm")


@pytest.mark.parametrize(
    ("recompute", "dear", "cheap"),
    [
        ("none", (0, 0), (0, 0)),
        ("full", (12, 3), (3, 6)),
        ("selective", (0, 0), (3, 6)),
        (("layers.1",), (4, 1), (1, 2)),
    ],
)
def test_what_runs_again_is_what_the_plan_says(recompute: Any, dear: Any, cheap: Any) -> None:
    seen = run_twice(recompute)
    # A product that ends a block runs again only where something after it needs its result.
    assert dear[0] * 3 // 4 <= seen[DEAR[0]] <= dear[0] and seen[DEAR[1]] == dear[1]
    assert tuple(seen[name] for name in CHEAP) == cheap


def kept_bytes(recompute: Any) -> int:
    """Bytes that the graph of a forward keeps for its backward, the parameters left out."""
    return kept_by(build("transformer"), recompute, next(iter(batches("transformer", 1)))[0])


def kept_by(model: nn.Module, recompute: Any, batch: Tensor) -> int:
    recompute_blocks(model, recompute)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model(batch)
    total = sum(kept.values())
    del output
    return total


def test_a_block_under_full_recompute_keeps_nothing_but_its_input() -> None:
    none, full = kept_bytes("none"), kept_bytes("full")
    assert full < none / 3


class Double(nn.Module):
    """Two convolutions, as every U-Net has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        pairs = ((nn.Conv2d(i, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()) for i in (inputs, outputs))
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Double(1, 8)
        self.down, self.deep = (nn.Sequential(nn.MaxPool2d(2), Double(n, 2 * n)) for n in (8, 16))
        self.rise, self.up = (nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (16, 8))
        self.mid, self.last, self.out = Double(32, 16), Double(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.down(x)
        y = self.mid(torch.cat([y, self.rise(self.deep(y))], 1))
        return self.out(self.last(torch.cat([x, self.up(y)], 1)))


def test_single_layers_are_recomputed_by_what_holds_them() -> None:
    assert recompute_blocks(UNet(), "full") == ["first.layers", "down.1", "deep.1", "mid.layers", "last.layers"]
    none, full = (kept_by(UNet(), how, torch.rand(2, 1, 32, 32)) for how in ("none", "full"))
    assert full < none / 2
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert recompute_blocks(plain, "full") == ["0", "1", "2", "3"]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_dropout_drops_the_same_in_the_second_run(recompute: str) -> None:
    def gradients(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Transformer(drop=0.4).double()
        recompute_blocks(model, how)
        torch.manual_seed(3)
        batch = torch.randint(29, (4, 6))
        model(batch).square().mean().backward()
        after = torch.rand(1).double()
        return [*(p.grad for p in model.parameters() if p.grad is not None), after]

    for got, want in zip(gradients(recompute), gradients("none"), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


class Attends(nn.Module):
    """Attention that draws random numbers, and a dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.way(x).unflatten(-1, (2, 4)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return nn.functional.dropout(seen.transpose(1, 2).flatten(2), 0.5)


def test_attention_with_dropout_is_not_kept_so_that_later_draws_are_the_same() -> None:
    def gradients(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Attends(), Attends()).double()
        recompute_blocks(model, how)
        model(torch.randn(2, 5, 8).double()).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for got, want in zip(gradients("selective"), gradients("none"), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_running_statistics_are_written_once(recompute: str) -> None:
    def run(how: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = ConvNet().double()
        recompute_blocks(model, how)
        for _ in range(2):
            (
                model(torch.randn(4, 3, 6).double()).sum() + model(torch.randn(4, 3, 6).double()).square().sum()
            ).backward()
        return dict(model.state_dict()) | {
            f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None
        }

    got, want = run(recompute), run("none")
    assert got.keys() == want.keys() and want["blocks.0.1.num_batches_tracked"] == 4
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12, msg=name)


class Cache:
    """What a language model appends to at every layer."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"all": []}


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen["all"].append(torch.tanh(self.way(x)))
        return torch.cat(cache.seen["all"]).sum(0, keepdim=True) + x


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_an_object_that_a_block_changes_is_as_before_in_the_second_run(recompute: str) -> None:
    def run(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(Appends() for _ in range(3)).double()
        recompute_blocks(layers, how)
        cache, x = Cache(), torch.randn(1, 4).double()
        for layer in layers:
            x = layer(x, cache)
        x.square().sum().backward()
        assert len(cache.seen["all"]) == 3
        return [p.grad for p in layers.parameters() if p.grad is not None]

    for got, want in zip(run(recompute), run("none"), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_model_stays_what_it_is_and_a_copy_runs_its_own_parameters() -> None:
    model = build("transformer")
    keys, text = list(model.state_dict()), repr(model)
    recompute_blocks(model, "full")
    recompute_blocks(model, "full")  # the second time changes nothing
    assert list(model.state_dict()) == keys and repr(model) == text and type(model) is Transformer
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data.zero_()
    (batch, _), *_ = batches("transformer", 1)
    assert twin(batch).abs().sum() == 0 and model(batch).abs().sum() > 0


def test_an_evaluation_runs_without_it() -> None:
    model = build("transformer")
    recompute_blocks(model, "full")
    (batch, _), *_ = batches("transformer", 1)
    with torch.no_grad():
        assert not model(batch).requires_grad


def test_a_kept_result_that_is_written_in_place_is_told() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)])
    recompute_blocks(model, "selective")
    with pytest.raises(PlanError, match=r"Sequential writes in place into a result .* Use recompute='full'"):
        model(torch.randn(2, 4)).sum().backward()


def test_a_block_that_the_model_does_not_have_is_told() -> None:
    with pytest.raises(PlanError, match=r"no module 'layers\.7'. Did you mean 'layers\.\d'\? Its blocks are layers\.0"):
        apply(build("transformer"), Plan(recompute=("layers.7",)), World())


def test_what_runs_again_is_said() -> None:
    notes = apply(build("transformer"), Plan(recompute="selective"), World()).notes
    assert notes == [
        "recompute: the backward runs 3 blocks again (except matrix products and attention): "
        "layers.0, layers.1, layers.2."
    ]


def test_a_gradient_penalty_is_that_without_recompute() -> None:
    """A double backward runs each block again twice."""
    found = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]).double()
        recompute_blocks(model, recompute)
        x = torch.linspace(-1, 1, 12).double().view(3, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_second_run_begins_with_the_buffers_and_the_parameters_of_the_first() -> None:
    def slopes(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 1))
        if recompute:
            recompute_blocks(model, "full")
        x, held = torch.randn(6, 4), dict(model.named_parameters())
        model(x).square().mean().backward()
        lent = {name: (p * 2).detach().requires_grad_() for name, p in held.items()}  # by functional_call
        loss = torch.func.functional_call(model, lent, (x,)).square().mean()
        return [p.grad for p in held.values() if p.grad is not None] + [*torch.autograd.grad(loss, [*lent.values()])]

    for one, other in zip(slopes(True), slopes(False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
