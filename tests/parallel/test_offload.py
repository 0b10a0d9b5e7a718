"""Offload: what goes to the host is what the backward needs, without the parameters."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel import offload
from meshwise.parallel.apply import apply
from meshwise.parallel.offload import offload_activations
from meshwise.parallel.recompute import recompute_blocks
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import Transformer, batches, build


@dataclass
class Moved:
    """What was copied while it was entered: tensors and bytes that went to the host, tensors that came back before
    they were requested, and the most bytes of such that were on the device at once."""

    tensors: int = 0
    bytes: int = 0
    ahead: int = 0
    most_ahead: int = 0

    def __enter__(self) -> Moved:
        self._stack = contextlib.ExitStack()
        send, fetch, ahead = offload._send, offload._fetch, offload._SavedTensors._fetch_ahead
        early: list[Any] = []

        def sending(*given: Any) -> Any:
            sent = send(*given)
            self.tensors, self.bytes = self.tensors + 1, self.bytes + sent.copy.nbytes
            return sent

        def fetching(waiting: Any) -> None:
            fetch(waiting)
            early.append(waiting)

        def fetching_ahead(saved: Any, number: int) -> None:
            early[:] = [waiting for waiting in early if waiting.ahead]  # not what was asked for just now
            before = len(early)
            ahead(saved, number)
            self.ahead += len(early) - before
            self.most_ahead = max(self.most_ahead, sum(waiting.copy.nbytes for waiting in early))

        self._stack.enter_context(mock.patch.object(offload, "_send", sending))
        self._stack.enter_context(mock.patch.object(offload, "_fetch", fetching))
        self._stack.enter_context(mock.patch.object(offload._SavedTensors, "_fetch_ahead", fetching_ahead))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def kept_bytes(model: nn.Module, batch: Tensor) -> int:
    """Bytes of the storages that a forward keeps for its backward, parameters and what is small left out: counted by
    torch's hooks."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        source = tensor if tensor._base is None else tensor._base
        if not isinstance(source, nn.Parameter) and tensor.nbytes >= 1024:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def moved_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that a forward under `plan` sends to the host, and those that a plain one keeps."""
    (batch, _), *_ = batches("transformer", 1)
    plain = kept_bytes(build("transformer"), batch)
    model: Any = build("transformer")
    applied = apply(model, plan, World(rank=collectives.get_rank(), size=collectives.world_size()))
    with Moved() as moved:
        backward(applied, model(batch).sum())
        with torch.no_grad():
            model(batch)
    return moved.bytes, plain


def test_all_that_a_forward_keeps_goes_to_the_host() -> None:
    moved, kept = moved_bytes(Plan(offload=("activations",)))
    assert moved == kept > 100_000


def test_gathered_parameters_do_not(pool: Any) -> None:
    for moved, kept in pool(2).run(moved_bytes, Plan(shard=2, offload=("activations",))):
        assert moved == kept


def test_the_copies_are_what_the_backward_sees() -> None:
    model = build("transformer")
    offload_activations(model)
    (batch, _), *_ = batches("transformer", 1)
    loss = model(batch).square().mean()
    plain = build("transformer")
    plain(batch).square().mean().backward()
    loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert type(model) is Transformer and list(model.state_dict()) == list(plain.state_dict())


class Chain(nn.Module):
    """Layers that each keep one tensor of `64 * 8 * 4` bytes: their input."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ONE = 64 * 8 * 4


@pytest.mark.parametrize("window", [0, 1, 3])
def test_what_comes_before_is_fetched_ahead_within_the_window(window: int) -> None:
    model = Chain()
    offload_activations(model, window * ONE + ONE // 2)
    seen: list[tuple[int, int]] = []
    with Moved() as moved:
        loss = model(torch.ones(8, 64, requires_grad=True)).sum()
        for layer in model.layers:  # a weight's gradient is made of the input that was asked for
            layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append((moved.ahead, moved.most_ahead)))
        loss.backward()
    assert moved.tensors == 6 and moved.ahead == (5 if window else 0)
    assert moved.most_ahead == window * ONE
    assert [ahead for ahead, _ in seen] == [min(5, number + window) if window else 0 for number in range(6)]


def test_a_graph_that_is_dropped_or_run_twice_leaves_nothing_and_asks_again() -> None:
    model = Chain()
    offload_activations(model, 100 * ONE)
    with Moved() as moved:
        kept = model(torch.ones(8, 64, requires_grad=True)).sum()
        dropped = model(torch.ones(8, 64, requires_grad=True)).sum()
        del dropped
        gc.collect()
        kept.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        kept.backward()
    assert moved.tensors == 12 and moved.ahead == 5
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), first, strict=True))  # type: ignore[arg-type]


def with_recompute(plan: Plan) -> tuple[int, int, int]:
    """Bytes that went to the host, those that the inputs of blocks take, and how often a block's operator ran."""
    (batch, _), *_ = batches("transformer", 1)
    model: Any = build("transformer")
    inputs, ran = [], []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].nbytes))
        layer.rise.register_forward_hook(lambda *_: ran.append(1))
    applied = apply(model, plan, World(rank=collectives.get_rank(), size=collectives.world_size()))
    with Moved() as moved:
        backward(applied, model(batch).sum())
    return moved.bytes, sum(inputs), len(ran)


@pytest.mark.parametrize("plan", [Plan(), Plan(shard=2)], ids=repr)
def test_a_block_that_runs_again_sends_its_input_alone(plan: Plan, pool: Any) -> None:
    plan = replace(plan, offload=("activations",), recompute="full")
    without, _ = moved_bytes(Plan(offload=("activations",)))
    for sent, inputs, ran in [with_recompute(plan)] if plan.devices == 1 else pool(2).run(with_recompute, plan):
        assert ran == 6  # three layers, twice
        beside = sent - inputs  # what the embedding, the last norm and the head keep
        assert 0 <= beside < inputs and sent < without / 5


class Named(nn.Module):
    """A block whose input is given by name, beside an object that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, *, cache: list[int], x: Tensor) -> Tensor:
        cache.append(len(cache))
        return self.linear(x).tanh() * len(cache)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Named() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[int] = []
        for block in self.blocks:
            x = block(cache=cache, x=x)
        return x


def test_an_input_that_is_given_by_name_goes_too() -> None:
    model, plain = Holder(), Holder()
    plain.load_state_dict(model.state_dict())
    recompute_blocks(model, "full")
    offload_activations(model)
    x = torch.randn(8, 64)
    with Moved() as moved:
        model(x).sum().backward()
    plain(x).sum().backward()
    assert moved.tensors == 2
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_views_share_one_copy_and_come_back_as_they_lay() -> None:
    model = nn.Linear(64, 96)
    strides = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *views: Tensor) -> Tensor:
            ctx.save_for_backward(*views)
            strides.append([view.stride() for view in views])
            return views[0] * views[1] + views[2]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            one, two, _ = ctx.saved_tensors
            strides.append([view.stride() for view in ctx.saved_tensors])
            return gradient * two, gradient * one, gradient

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: Tensor) -> Tensor:
            return Noted.apply(*self.linear(x).unflatten(-1, (3, 32)).unbind(1))

    split = Split()
    offload_activations(split)
    with Moved() as moved:
        split(torch.randn(32, 64)).sum().backward()
    assert strides[0] == strides[1] and strides[0][0] == (96, 1)
    assert moved.tensors == 2 and moved.bytes == 32 * 64 * 4 + 32 * 96 * 4  # the input, and what the views lie in


def test_models_in_a_list_are_each_laid_into_it() -> None:
    models = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    offload_activations(models)
    with Moved() as moved:
        (models[1](models[0](torch.ones(8, 64)))).sum().backward()
    assert moved.tensors == 2 and moved.bytes == 2 * 8 * 64 * 4


class Gates(nn.Module):
    """As an LSTM does: parts of one result that are no views of it, each changed in place before it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).unsafe_chunk(2, 1)
        return one.sigmoid_() * other.tanh_()


def test_parts_of_a_storage_that_change_one_after_another_are_kept_as_they_were() -> None:
    torch.manual_seed(0)
    x, plain, moved = torch.randn(64, 16), Gates(), Gates()
    moved.load_state_dict(plain.state_dict())
    offload_activations(moved)
    for model in (plain, moved):
        model(x).sum().backward()
    assert torch.equal(plain.both.weight.grad, moved.both.weight.grad)
