"""Sharding: what each rank holds and sends, and the contract of its backward, beside equality with one device."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.parallel import shard
from meshwise.parallel.apply import apply
from meshwise.parallel.shard_units import check_can_be_sharded, units_of
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat import sharding
from meshwise.torch_compat.dispatch import intercept_operators, operator_name
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import ZOO, Transformer, batches, build
from tests.pool import CaseFailed


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def held_bytes(model: nn.Module) -> int:
    """Bytes of parameter storage that this rank keeps, each storage once."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in locals_)}.values())


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


# --- what is held and sent


def held_and_sent(plan: Plan) -> tuple[int, Counter[str], Counter[str]]:
    model = build("transformer")
    applied = apply(model, plan, here())
    (batch, target), *_ = batches("transformer", 1)
    seen: list[Counter[str]] = []

    def counted(operator: Any, args: Any, kwargs: Any) -> Any:
        seen[-1][operator_name(operator)] += 1
        return operator(*args, **kwargs)

    for _ in range(2):
        for run in ("forward", "backward"):
            seen.append(Counter())
            with intercept_operators(counted):
                if run == "forward":
                    loss = ZOO["transformer"].score(model(batch), target)
                else:
                    backward(applied, loss)
    return held_bytes(model), seen[2], seen[3]


BLOCKS = 3
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        # The whole model stays gathered from its forward to its backward; each block is gathered for both.
        (Plan(shard=2), {GATHER: BLOCKS + 1}, {GATHER: BLOCKS, SCATTER: BLOCKS + 1}),
        (Plan(shard=2, reshard=False), {GATHER: BLOCKS + 1}, {SCATTER: BLOCKS + 1}),
        (Plan(shard=2, recompute="full"), {GATHER: BLOCKS + 1}, {GATHER: BLOCKS, SCATTER: BLOCKS + 1}),
        (Plan(data=2, shard=2), {GATHER: BLOCKS + 1}, {GATHER: BLOCKS, SCATTER: BLOCKS + 1, REDUCE: BLOCKS + 1}),
    ],
    ids=repr,
)
def test_a_rank_holds_its_part_and_sends_each_block_once(plan: Plan, forward: Any, backward: Any, pool: Any) -> None:
    parameters = sum(p.numel() * 8 for p in build("transformer").parameters())
    for held, there, back in pool(plan.devices).run(held_and_sent, plan):
        assert parameters / plan.shard <= held <= 1.05 * parameters / plan.shard  # rows that do not divide are padded
        assert {name: count for name, count in there.items() if name in (GATHER, SCATTER, REDUCE)} == forward
        assert {name: count for name, count in back.items() if name in (GATHER, SCATTER, REDUCE)} == backward


# --- the same objects


def objects_kept() -> None:
    model = build("transformer")
    keys, kinds, mark = list(model.state_dict()), [type(m).__name__ for m in model.modules()], object()
    model.mark = mark  # type: ignore[assignment]
    text = repr(model)
    applied = apply(model, Plan(shard=2), here())
    assert applied.model is model and isinstance(model, Transformer) and model.mark is mark
    assert list(model.state_dict()) == keys
    assert [type(m).__name__ for m in model.modules()] == kinds and repr(model) == text
    assert model.head.weight is model.embed.weight
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    assert len(meshes) == 1 and all(isinstance(p, DTensor) for p in model.parameters())


def test_objects_attributes_and_names_stay_and_all_parameters_lie_on_one_mesh(pool: Any) -> None:
    pool(2).run(objects_kept)


# --- the contract of backward


class Choice(nn.Module):
    """Layers of one block, of which each call uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((3,), float(i + 1))) for i in range(4))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        return sum((self.parts[i] * x).sum() for i in use)  # type: ignore[return-value]


def choices(plan: Plan, steps: list[list[list[int]]]) -> list[list[list[float] | None]]:
    """Each step is what each rank uses; gradients after each, left standing."""
    world = here()
    model = Choice().double()
    applied = apply(model, plan, world)
    found = []
    for uses in steps:
        backward(applied, model(torch.full((3,), world.rank + 1.0, dtype=torch.float64), uses[world.rank]))
        found.append([None if g is None else g.tolist() for g in gradients(model).values()])
        for p in model.parameters():
            p.grad = None
    return found


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2)], ids=repr)
def test_parameters_that_some_ranks_do_not_reach_count_as_zero_and_those_of_none_stay_without(
    plan: Plan, pool: Any
) -> None:
    mean = [1.5] * 3
    steps = [[[0, 1], [0, 2]], [[0, 1], [0, 1]], [[0], [0]], [[0, 2], [0, 1]], [[0, 3], [0, 3]], [[0], [0, 3]]]
    want = [
        [mean, [0.5] * 3, [1.0] * 3, None],
        [mean, mean, None, None],
        [mean, None, None, None],
        [mean, [1.0] * 3, [0.5] * 3, None],
        [mean, None, None, mean],
        [mean, None, None, [1.0] * 3],
    ]
    if plan.data == 2:  # DataParallel refuses the last: its reducers are made for what a loss reaches
        steps, want = steps[:-1], want[:-1]
    for got in pool(2).run(choices, plan, steps):
        assert got == want


def late_alone() -> None:
    with MonkeyPatch.context() as patch:
        patch.setattr(shard, "GRACE", 0.5)
        choices(Plan(shard=2), [[[0], [0]], [[0, 1], [0]]])


def test_a_parameter_that_one_rank_alone_reaches_late_is_told(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"this rank uses parts\.1 for the first time, and other ranks do not"):
        pool(2).run(late_alone)


class Either(nn.Module):
    """Two layers of one size, run in the order that each call is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(72, 72) for _ in range(2))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x.sum()


def run_orders(*orders: list[list[int]]) -> None:
    torch.manual_seed(0)
    either, world = Either(), here()
    applied = apply(either, Plan(shard=2), world)
    with MonkeyPatch.context() as patch:
        patch.setattr(shard, "GRACE", 0.5)
        for uses in orders:
            backward(applied, either(torch.ones(2, 72, requires_grad=True), uses[world.rank]))


def test_a_rank_that_runs_its_blocks_in_another_order_is_told_before_a_step(pool: Any) -> None:
    pool(2).run(run_orders, [[0, 1], [0, 1]], [[1, 0], [1, 0]], [[0, 1], [0, 1]])
    here = r"computes gradients in the block of layers\.\d\.weight after 0 blocks, and "
    with pytest.raises(CaseFailed, match=here + "other ranks do not"):
        pool(2).run(run_orders, [[0, 1], [0, 1]], [[0, 1], [1, 0]])
    with pytest.raises(CaseFailed, match=here + "another rank differs: "):  # in the first backward: at once
        pool(2).run(run_orders, [[0, 1], [1, 0]])


def contributions(plan: Plan) -> list[list[float]]:
    """Sums of gradients after backwards of many kinds: kept back, weighed in part and whole, added up, and reduced."""
    world = here()
    model = nn.Linear(3, 2, bias=False).double()
    applied = apply(model, plan, world)
    x = torch.full((1, 3), world.rank + 1.0, dtype=torch.float64)
    own = lambda: torch.tensor(2.0 + world.rank, dtype=torch.float64)  # noqa: E731
    found = []

    def note() -> None:
        value = whole(model.weight.grad)
        found.append([] if value is None else [round(v, 9) for v in value.flatten().tolist()])

    def run(**settings: Any) -> Any:
        return backward(applied, model(x).sum(), **settings)

    mean = run(value=torch.tensor(4.0 + world.rank))
    assert mean.item() == 4.5 and model.weight.grad is not None
    note()
    run(factor=own)
    note()
    run(factor=own, whole=True)
    note()
    run(reduce=False)
    run(reduce=False, factor=own)
    assert applied.reduction is not None and applied.reduction.unreduced
    run()
    assert not applied.reduction.unreduced
    note()
    model.zero_grad()
    run(reduce=False)
    run(factor=own)
    note()
    model.zero_grad()
    run(reduce=False)
    run(factor=own, whole=True)
    note()
    model.zero_grad()
    run(reduce=False)
    run(reduce=False, factor=own, whole=True)
    applied.reduction.reduce_now()
    assert not applied.reduction.unreduced
    note()
    return found


def test_backward_means_the_same_sharded_as_in_data_parallel(pool: Any) -> None:
    (sharded, same), (data, _) = pool(2).run(contributions, Plan(shard=2)), pool(2).run(contributions, Plan(data=2))
    assert sharded == same == data
    assert sharded[0] == [1.5] * 6 and sharded[1] == [1.5 + (2 + 6) / 2] * 6


def forwards(plan: Plan) -> dict[str, Tensor | None]:
    """One loss of three forwards, one of them without gradient, after an evaluation."""
    model = build("mlp")
    applied = apply(model, plan, here())
    (batch, _), *_ = batches("mlp", 1)
    with torch.no_grad():
        model.eval()(batch)
        other = model.train()(batch * 2)
    loss = (model(batch) * model(batch + 1)).sum() + (model(batch) * other).mean()
    backward(applied, loss)
    return gradients(model)


def test_several_forwards_add_up_in_one_backward(pool: Any) -> None:
    want = forwards(Plan())
    for got in pool(2).run(forwards, Plan(shard=2)):
        for name, gradient in want.items():
            assert gradient is not None and got[name] is not None
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-9)


def frozen_later(plan: Plan) -> list[list[bool]]:
    """Which parameters have a gradient while one is frozen and after it is thawed."""
    model = build("mlp")
    applied = apply(model, plan, here())
    (batch, _), *_ = batches("mlp", 1)
    found = []
    for trained in (False, True):
        next(iter(model.parameters())).requires_grad_(trained)
        backward(applied, model(batch).sum())
        found.append([p.grad is not None for p in model.parameters()])
    return found


def test_a_parameter_is_frozen_and_thawed(pool: Any) -> None:
    for first, then in pool(2).run(frozen_later, Plan(shard=2)):
        assert first == [False] + [True] * (len(first) - 1) and all(then)


def in_float32() -> float:
    model = build("mlp", torch.float32)
    applied = apply(model, Plan(shard=2), here())
    (batch, _), *_ = batches("mlp", 1, torch.float32)
    backward(applied, model(batch).sum())
    plain = build("mlp", torch.float32)
    plain(batch).sum().backward()
    pairs = zip(gradients(model).values(), plain.parameters(), strict=True)
    return max(float((a - p.grad).abs().max()) for a, p in pairs if a is not None and p.grad is not None)


def test_float32_is_averaged_too(pool: Any) -> None:
    assert all(apart < 1e-4 for apart in pool(2).run(in_float32))


# --- what is a block, and what cannot be sharded


def test_blocks_are_the_repeated_layers_that_share_nothing() -> None:
    model = Transformer()
    assert units_of(model) == list(model.layers)
    model.layers[1].out.weight = nn.Parameter(model.layers[0].out.weight.detach())
    model.place = model.layers[1].out.weight
    assert units_of(model) == [model.layers[0], model.layers[2]]
    assert units_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []  # too small to be gathered alone


class Conditioned(nn.Module):
    """A part of one block makes what all blocks are given, as in diffusers' DiT; two modules hold the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(3))
        self.again = nn.ModuleDict({"layers": self.layers})

    def forward(self, x: Tensor) -> Tensor:
        given = self.layers[0].linear1(x).mean()
        for layer in self.layers:
            layer.self_attn.in_proj_bias.mean()
            x = layer(x) + given
        return x


def test_a_block_is_one_once_and_if_its_parts_are_not_called_alone() -> None:
    model = Conditioned()
    assert units_of(model) == list(model.layers[1:])


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Scalar(), "parameter scale is a single number"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), r"0\.bias in float32, 1\.bias in float16"),
    ],
)
def test_what_cannot_be_sharded_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_can_be_sharded(model, model)


def test_what_has_waited_is_reduced_over_replicas_too() -> None:
    """Of data × shard, `set_requires_gradient_sync(False)` stops both reductions, and `reduce_now` begins both."""
    State = Enum("State", ("IDLE", "BUSY"))
    seen: list[tuple[bool, bool]] = []
    group = SimpleNamespace(
        fsdp_params=[],
        reduce_grads=False,
        all_reduce_grads=False,
        _training_state=State.BUSY,  # type: ignore[attr-defined]
        post_backward=lambda: seen.append((group.reduce_grads, group.all_reduce_grads)),
        finalize_backward=lambda: None,
    )
    sharding.Group(group).reduce_now()
    assert seen == [(True, True)]


def of_something_else(kind: str, number: int) -> None:
    """One rank's loss is not of the model, in one step."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 1), nn.Parameter(torch.ones(3))
    data = TensorDataset(torch.ones(12, 4))
    model, loader = mw.distribute(model, DataLoader(data, batch_size=4), plan=Plan(shard=2), view="rank")
    for step, (x,) in enumerate(loader):
        losses = {
            "another parameter": lambda: other.sum(),
            "a parameter of the model": lambda: model.weight.sum(),
            "an output that is let go": lambda x=x: model(x).mean().detach() + other.sum(),
        }
        mw.backward(losses[kind]() if step == number and mw.rank() == 1 else model(x).mean())


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        (
            "another parameter",
            1,
            "rank 1 calls mw.backward for a loss without a forward of the model, and rank 0 has gone",
        ),
        pytest.param("another parameter", 0, "rank 1 calls mw.backward for a loss", marks=pytest.mark.slow),
        pytest.param("a parameter of the model", 1, "rank 1 calls mw.backward for a loss", marks=pytest.mark.slow),
        (
            "an output that is let go",
            1,
            "this rank ends its backward after 0 blocks, and other",
        ),
    ],
)
def test_a_loss_of_something_else_on_one_rank_ends_soon(kind: str, number: int, said: str, pool: Any) -> None:
    """Not after the minute that a rank with a new order waits for the others, or, in the first step, half an hour."""
    with pytest.raises(CaseFailed, match=said):
        pool(2).run(of_something_else, kind, number)


def of_parameters_alone() -> float:
    model = nn.Linear(4, 1)
    model, loader = mw.distribute(
        model, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4), plan=Plan(shard=2), view="rank"
    )
    value = 0.0
    for (x,) in loader:
        mw.backward(model(x).mean())
        value = float(mw.backward(model.weight.pow(2).sum() * 0 + 3))
    return value


def test_a_loss_of_parameters_alone_on_every_rank_is_right(pool: Any) -> None:
    assert pool(2).run(of_parameters_alone) == [3.0, 3.0]
