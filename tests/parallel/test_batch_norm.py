"""Batch norm over all ranks: outputs, gradients and running statistics are those of the whole microbatch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwise.parallel.apply import apply
from meshwise.parallel.batch_norm import join_batch_norms
from meshwise.reports.recorder import current
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import ConvNet

SPLITS = {2: [5, 3], 4: [3, 2, 1, 2]}


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def make(momentum: float | None, affine: bool) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    for block in model.blocks:
        block[1] = nn.BatchNorm1d(3, momentum=momentum, affine=affine)
    return model.double()


def run(model: nn.Module, backward: Any, x: Tensor, scale: float) -> dict[str, Tensor]:
    for _ in range(2):
        backward(model(x * 3 + 100).square().mean() * scale)
    facts = dict(model.state_dict())
    facts |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    facts["evaluated"] = model.eval()(torch.ones(2, 3, 6).double())
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in facts.items()}


def apart(plan: Plan, momentum: float | None, affine: bool, absent: bool) -> float:
    """The largest difference from one device; with `absent`, the last rank runs a sample that does not count."""
    world = here()
    torch.manual_seed(1)
    whole = torch.randn(8, 3, 6).double()
    sizes = SPLITS[world.size]
    mine = whole.split(sizes)[world.rank]
    if absent:
        whole = whole[: 8 - sizes[-1]]
    samples = 0 if absent and world.rank == world.size - 1 else len(mine)
    model = make(momentum, affine)
    applied = apply(model, plan, world, samples=lambda: samples)
    assert not any("batch norm" in note for note in applied.notes)
    got = run(model, functools.partial(backward, applied), mine, samples * world.size / len(whole))
    want = run(make(momentum, affine), Tensor.backward, whole, 1.0)
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize(
    ("plan", "momentum", "affine", "absent"),
    [
        (Plan(data=2), 0.1, True, False),
        (Plan(data=2), None, False, False),
        (Plan(data=4), 0.1, True, True),
        (Plan(data=2, recompute="full"), 0.1, True, False),
        (Plan(data=2, shard=2, recompute="full"), 0.1, True, True),
    ],
)
def test_it_is_that_of_one_device(plan: Plan, momentum: Any, affine: bool, absent: bool, pool: Any) -> None:
    assert max(pool(plan.devices).run(apart, plan, momentum, affine, absent)) < 1e-9


def by_itself() -> float:
    """Without the joining, the same comparison must fail."""
    world = here()
    torch.manual_seed(1)
    whole = torch.randn(8, 3, 6).double()
    model = make(0.1, True)
    applied = apply(model, Plan(data=2), world)
    assert any(note.startswith("batch norm: each rank") for note in applied.notes)
    got = run(model, functools.partial(backward, applied), whole.chunk(2)[world.rank], 1.0)
    want = run(make(0.1, True), Tensor.backward, whole, 1.0)
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def test_statistics_of_a_share_alone_are_others(pool: Any) -> None:
    assert min(pool(2).run(by_itself)) > 1e-3


class WithActivation(nn.BatchNorm1d):
    """A norm and an activation in one, which calls the function itself, as timm's BatchNormAct2d does."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        stats = self.running_mean, self.running_var
        return torch.relu(
            F.batch_norm(x, *stats, self.weight, self.bias, self.training, self.momentum or 0.1, self.eps)
        )


class Scaled(nn.BatchNorm1d):
    """What the class adds lies around the forward that it inherits."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=None)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(x * scale) * scale + x


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, training=True)


class ByHand(nn.Module):
    """Batch norm as a function, called by a function beside the class, by a method, and under another name."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(channels)), torch.batch_norm
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(normalised(x, self.weight), self.weight, None, None, None, True, 0.1, 1e-3, False).tanh()
        return F.batch_norm(x.exp(), self.mean, self.variance, training=self.training, momentum=0.3)


class Standardised(nn.Conv1d):
    """Weight standardisation: the batch norm of a parameter, as timm's ScaledStdConv2d has it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv1d(x, weight.reshape_as(self.weight), self.bias)


def of(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    for block in model.blocks:
        block[1] = kind(3)
    return model.double()


def apart_with(kind: Any, plan: Plan) -> float:
    """The largest difference from one device, with this module after each convolution."""
    world = here()
    torch.manual_seed(1)
    whole = torch.randn(8, 3, 6).double()
    mine = whole.split(SPLITS[2])[world.rank]
    model = of(kind)
    applied = apply(model, plan, world, samples=lambda: len(mine))
    assert applied.coupled_gradients
    got = run(model, functools.partial(backward, applied), mine, len(mine) * world.size / len(whole))
    want = run(of(nn.BatchNorm1d if kind is nn.SyncBatchNorm else kind), Tensor.backward, whole, 1.0)
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=2, recompute="full")])
@pytest.mark.parametrize("kind", [WithActivation, Scaled, nn.SyncBatchNorm, ByHand])
def test_subclasses_and_functions_called_by_hand_are_those_of_one_device(kind: Any, plan: Plan, pool: Any) -> None:
    assert max(pool(2).run(apart_with, kind, plan)) < 1e-9


def test_a_parameter_that_is_normalised_costs_no_collective(pool: Any) -> None:
    def case() -> int:
        model = nn.Sequential(Standardised(3, 3, 1))
        apply(model, Plan(data=2), here(), samples=lambda: 5)
        before = current().arrive()
        model(torch.randn(5, 3, 6))
        return current().arrive() - before - 1

    assert pool(2).run(case) == [0, 0]


class OwnStatistics(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        mean = x.transpose(0, 1).reshape(x.shape[1], -1).mean(1)
        self.running_mean.lerp_(mean.detach(), 0.1)
        return x - mean[None, :, None]


def test_statistics_that_a_subclass_computes_itself_are_refused_by_name(pool: Any) -> None:
    def case() -> str:
        model = of(OwnStatistics)
        apply(model, Plan(data=2), here(), samples=lambda: 4)
        with pytest.raises(PlanError) as refused:
            model(torch.randn(4, 3, 6).double())
        return str(refused.value)

    for text in pool(2).run(case):
        assert text.startswith("batch norm blocks.0.1 is a OwnStatistics. This class computes its statistics itself")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_batch_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(3)))
    with pytest.raises(PlanError, match="batch norm 1 is TorchScript"):
        join_batch_norms(model)


def sampled_from_noise() -> float:
    """A training in which a generator samples, now and then, from noise that is the same on all ranks."""
    world = here()
    torch.manual_seed(1)
    noise, whole = torch.randn(6, 3, 6).double(), torch.randn(8, 3, 6).double()
    sides = []
    for several in (True, False):
        model = make(0.1, True)
        mine = whole.split(SPLITS[2])[world.rank] if several else whole
        if several:
            apply(model, Plan(data=2), world, samples=lambda mine=mine: len(mine))
        for x in (mine, noise, mine, noise.clone()):
            model(x)
        sides.append(dict(model.named_buffers()))
    return max(float((sides[0][name] - sides[1][name]).abs().max()) for name in sides[1])


def test_noise_that_all_ranks_share_counts_once(pool: Any) -> None:
    assert max(pool(2).run(sampled_from_noise)) < 1e-9


def test_equal_slices_are_slices(pool: Any) -> None:
    def case() -> float:
        model, alone, x = (
            make(0.1, True),
            make(0.1, True),
            torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1)),
        )
        apply(model, Plan(data=2), here(), samples=lambda: 4)
        model(x.double())
        alone(torch.cat([x, x]).double())
        found = dict(model.named_buffers())
        return max(float((found[name] - value).abs().max()) for name, value in alone.named_buffers())

    assert max(pool(2).run(case)) < 1e-9


def of_one_value(samples: tuple[int, int], shared: bool) -> str:
    """A row on each rank, of which those with a sample count; with `shared` the same row, which no loop gave."""
    torch.manual_seed(0 if shared else collectives.get_rank())
    model = nn.BatchNorm1d(3)
    join_batch_norms(model, lambda: None if shared else samples[collectives.get_rank()])
    try:
        model(torch.randn(1, 3))
    except ValueError as error:
        return str(error)
    return "right" if bool(model.running_var.isfinite().all()) else "not a number"


def test_one_value_over_all_ranks_is_refused_as_on_one_device(pool: Any) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got input size") as one:
        nn.BatchNorm1d(3)(torch.randn(1, 3))
    assert pool(2).run(of_one_value, (1, 0), False) == [str(one.value)] * 2
    assert pool(2).run(of_one_value, (1, 1), True) == [str(one.value)] * 2
    assert pool(2).run(of_one_value, (1, 1), False) == ["right"] * 2
