"""A deferred model gets, part by part, bitwise the values of a plain construction, and is never held whole."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.apply import apply
from meshwise.parallel.deferred import constructed, deferred, materialise
from meshwise.parallel.op_replay import ReplayMismatch
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.dispatch import is_fake
from meshwise.transfer import collectives
from tests.parallel.applied import apply_with, backward
from tests.parallel.constructors import CONSTRUCTORS, MAKERS, OF_TRANSFORMERS, tensors_of
from tests.parallel.zoo import ZOO, batches
from tests.pool import CaseFailed


def plainly(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return make(), torch.get_rng_state()


def differences(got: nn.Module, want: nn.Module) -> list[str]:
    """Names of what is not bitwise the same, of another kind, stride or gradient, or tied otherwise."""
    a, b = tensors_of(got), tensors_of(want)
    bad = list(a.keys() ^ b.keys())
    for name in sorted(a.keys() & b.keys()):  # in one order on all ranks
        x, y = a[name], b[name]
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        same = whole.shape == y.shape and whole.dtype == y.dtype and torch.equal(whole, y)
        if not same or isinstance(x, nn.Parameter) != isinstance(y, nn.Parameter) or x.requires_grad != y.requires_grad:
            bad.append(name)
        elif {n for n in a if a[n] is x} != {n for n in b if b[n] is y}:
            bad.append(f"{name} tied")
    return bad


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_values_and_random_numbers_after_are_those_of_a_plain_construction(name: str) -> None:
    want, after = plainly(CONSTRUCTORS[name])
    torch.manual_seed(0)
    with deferred():
        model = CONSTRUCTORS[name]()
    assert any(is_fake(p) for p in model.parameters())
    materialise(model)
    assert not any(is_fake(t) for t in tensors_of(model).values())
    assert differences(model, want) == []
    assert torch.equal(torch.get_rng_state(), after)


def laid(name: str, plan: Plan) -> tuple[list[str], bool, int, int]:
    """What differs from a plain construction, and the bytes of this rank's parts. Only rank 0 has the right seed."""
    rank = collectives.get_rank()
    torch.manual_seed(0 if rank == 0 or name == "looking" else 100 + rank)
    with deferred():
        model = MAKERS[name]()
    applied = apply(model, plan, World(rank=rank, size=collectives.world_size()))
    after = torch.get_rng_state()
    want, expected = plainly(MAKERS[name])
    held = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in applied.model.parameters())
    return differences(model, want), torch.equal(after, expected), held, sum(p.nbytes for p in want.parameters())


def all_laid(plan: Plan, names: list[str]) -> dict[str, tuple[list[str], bool, int, int]]:
    return {name: laid(name, plan) for name in names}


PLANS = [Plan(shard=2), Plan(shard=3), Plan(data=2), Plan(data=2, shard=2)]
OURS = [
    pytest.param(plan, list(CONSTRUCTORS), id=repr(plan), marks=[pytest.mark.slow] * (plan == Plan(shard=2)))
    for plan in PLANS
]
THEIRS = [
    pytest.param(plan, list(OF_TRANSFORMERS), id=f"transformers-{plan}", marks=pytest.mark.slow) for plan in PLANS[:2]
]


@pytest.mark.parametrize(("plan", "names"), OURS + THEIRS)
def test_each_rank_has_its_part_of_rank_0s_values(plan: Plan, names: list[str], pool: Any) -> None:
    ranks = pool(plan.devices).run(all_laid, plan, names)
    for found in ranks:
        for name, (bad, same_after, held, whole) in found.items():
            assert bad == [] and same_after, name
            assert held == whole if plan.shard == 1 else held < whole, name
    if plan.shard > 1:
        for name, (_, _, _, whole) in ranks[0].items():
            assert sum(found[name][2] for found in ranks) == plan.data * whole


def trained(name: str, plan: Plan) -> list[float]:
    """Losses of three steps of a deferred model; its optimizer was made before the plan was applied."""
    torch.manual_seed(0)
    with deferred():
        model = ZOO[name].make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = World(rank=collectives.get_rank(), size=collectives.world_size())
    applied = apply_with(model, plan, world, optimizer)
    losses = []
    for batch, target in batches(name, 3):
        part = slice(world.rank, None, world.size)
        loss = ZOO[name].score(model(batch[part]), target[part])
        mean = backward(applied, loss, value=loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean))
    return losses


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2)], ids=repr)
def test_a_deferred_model_trains_as_on_one_device(plan: Plan, pool: Any) -> None:
    want = trained("transformer", Plan())
    assert want[-1] < want[0]
    for got in pool(2).run(trained, "transformer", plan):
        assert got == pytest.approx(want, abs=1e-9)


# --- what is done after the constructor


def test_what_is_done_to_a_deferred_model_later_counts_too() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        return model

    def later(model: Any) -> None:
        nn.init.normal_(model[0].weight)
        model.double()
        model[1].requires_grad_(False)
        model[0].weight.kept = "yes"

    torch.manual_seed(0)
    want = build()
    later(want)
    torch.manual_seed(0)
    with deferred():
        model: Any = build()
    later(model)
    materialise(model)
    assert differences(model, want) == [] and model[0].weight.kept == "yes"


# --- memory


def live_peak(call: Callable[[], Any]) -> int:
    """Most bytes of torch's allocator that `call` had beside what was there before."""
    gc.collect()  # garbage of an earlier test that is freed meanwhile would count as less than nothing
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in moves:
        now += size
        most = max(most, now)
    return most


class Deep(nn.Module):
    """Sixteen layers of 1 MB, each drawn twice: by itself, then by the model, as transformers do it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(16))
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)


def filled(plan: Plan) -> tuple[int, int, int]:
    with deferred():
        model = Deep()
    largest = max(p.nbytes for p in model.parameters())
    whole = sum(p.nbytes for p in model.parameters())
    world = World(rank=collectives.get_rank(), size=collectives.world_size())
    return live_peak(lambda: apply(model, plan, world)), largest, whole


def test_a_rank_never_holds_more_than_its_part_and_about_one_parameter(pool: Any) -> None:
    for peak, largest, whole in pool(4).run(filled, Plan(shard=4)):
        assert whole / 4 < peak < whole / 4 + 2 * largest


# --- what cannot be


class Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(torch.randn(4).numpy() * 2))


def test_a_constructor_that_leaves_torch_is_built_plainly_with_a_note() -> None:
    with pytest.raises(UsageError, match=r"mw\.deferred runs a constructor without values.*numpy"), deferred():
        Numpy()
    want, after = plainly(Numpy)
    torch.manual_seed(0)
    model, note = constructed(Numpy)
    assert differences(model, want) == [] and torch.equal(torch.get_rng_state(), after)
    assert "every rank built the whole model" in note and "numpy" in note
    assert constructed(lambda: nn.Linear(2, 2))[1] == ""


def test_weights_read_from_a_file_inside_are_never_lost(tmp_path: Any) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")
    want = nn.Linear(3, 3)
    want.load_state_dict(torch.load(tmp_path / "weights.pt"))

    for assign in (False, True):

        def make(assign: bool = assign) -> nn.Module:
            model = nn.Linear(3, 3)
            model.load_state_dict(torch.load(tmp_path / "weights.pt"), assign=assign)
            return model

        model, note = constructed(make)
        assert differences(model, want) == [] and "read from a file" in note
        with pytest.raises((UsageError, ReplayMismatch), match="read from a file"):
            with deferred():
                model = make()
            materialise(model)


def test_an_error_of_the_constructor_is_its_own() -> None:
    with pytest.raises(ValueError, match="mine"), deferred():
        raise ValueError("mine")


def other_on_each_rank() -> None:
    with deferred():
        model = nn.Linear(4, 4 + random.Random(collectives.get_rank()).randrange(100))
    apply(model, Plan(shard=2), World(rank=collectives.get_rank(), size=2))


def test_constructors_that_part_are_refused(pool: Any) -> None:
    with pytest.raises(CaseFailed) as failed:
        pool(2).run(other_on_each_rank)
    assert failed.value.kind == "PlanError" and "did not run the same operators on all ranks" in failed.value.text
