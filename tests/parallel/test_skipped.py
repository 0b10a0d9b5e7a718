"""Modules that a rank may skip, under shard: found in the source (parallel/skipped.py), and right; what is not found is
refused before a rank waits (parallel/shard_refusals.py)."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwise as mw
from meshwise.parallel import shard_refusals
from meshwise.parallel.skipped import may_be_skipped
from meshwise.spec.plan import Plan
from meshwise.training.process.session import default_engine, end_sessions
from tests.pool import CaseFailed

WIDTH, COUNT = 64, 4  # experts are large enough to be gathered by themselves


class Layers(nn.Module):
    """A list of layers, and what a forward may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        self.saves, self.rate, self.taken = False, 0.5, [1]


class LenOfRows(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, out = x[:, 0].long(), torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            rows = (first == i).nonzero().flatten()
            if len(rows):
                out[rows] = part(x[rows])
        return out


class AnyOfMask(Layers):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(COUNT):
            mask = x[:, 0].long() == i
            if not mask.any():
                continue
            out[mask] = self.parts[i](x[mask])
        return out


class OfThoseThere(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, out = x[:, 0].long(), torch.zeros_like(x)
        for i in first.unique().tolist():
            out[first == i] = self.parts[i](x[first == i])
        return out


class InAMethod(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x, x[:, 0].long())

    def routed(self, x: Tensor, first: Tensor) -> Tensor:
        outs = [part(x[first == i]) for i, part in enumerate(self.parts) if (first == i).any()]
        return torch.cat(outs)


class LeftOut(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if self.training and random.random() < self.rate:
                continue
            x = x + part(x)
        return x


class EndsEarly(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            if x.norm() < 1:
                break
        return x


class OfATask(Layers):
    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        found: Tensor = self.parts[int(task[0])](x)
        return found


class Plain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.parts[-1](x) + self.parts[len(self.parts) // 2](x)


class Flags(Layers):
    def forward(self, x: Tensor, depth: int | None = None, hidden: bool = False) -> Any:
        states, count = [], len(self.parts)
        for i in range(count):
            part = self.parts[i]
            x = checkpoint(part, x, use_reentrant=False) if self.saves and self.training else part(x)
            if i in self.taken:
                states.append(x)
            if isinstance(part, nn.Linear) and hasattr(part, "bias") and torch.is_grad_enabled():
                x = part(x)
            if depth is not None and i >= depth:
                break
        for one, other in zip(self.parts, reversed(self.parts), strict=True):
            if self.saves:  # noqa: SIM108
                x = checkpoint(one, x)
            else:
                x = one(x) + other(x)
        return (x, states) if hidden else x


class Dense(Layers):
    def forward(self, x: Tensor) -> Tensor:
        weights = x[:, :COUNT].softmax(-1)
        return (torch.stack([part(x) for part in self.parts], -1) * weights.unsqueeze(1)).sum(-1)


class Branch(nn.Module):
    """A whole branch that may be skipped, with layers in it that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.plain = Plain(), Plain()

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = self.branch(x)
        return self.plain(x)


@pytest.mark.parametrize("kind", [LenOfRows, AnyOfMask, OfThoseThere, InAMethod, LeftOut, EndsEarly, OfATask])
def test_a_layer_that_data_or_chance_may_skip_is_found_with_its_line(kind: type[nn.Module]) -> None:
    assert (may_be_skipped(kind(), "parts.1") or "").rpartition(":")[0] == __file__


@pytest.mark.parametrize("kind", [Plain, Flags, Dense])
def test_a_layer_that_settings_and_counters_alone_may_skip_is_always_called(kind: type[nn.Module]) -> None:
    assert may_be_skipped(kind(), "parts.1") == ""
    assert may_be_skipped(nn.Sequential(kind(), nn.Sequential(kind())), "1.0.parts.1") == ""


def test_what_calls_a_layer_counts_too_and_so_does_the_name_of_experts() -> None:
    assert may_be_skipped(Branch(), "branch.parts.0") and may_be_skipped(Branch(), "plain.parts.0") == ""
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert may_be_skipped(model, "experts.0") == "they are experts"
    model.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert may_be_skipped(model, "others.0") is None


# --- exact


class Mixture(nn.Module):
    """A shared layer, and experts for the rows whose first number is theirs: as they are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.ffns = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = self.shared(x)
        for i, ffn in enumerate(self.ffns):
            rows = (expert == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(ffn(x[rows])))
        return out


class Twice(nn.Module):
    """Mixtures one after the other, at the top and `inside` of repeated layers; and one sweep for each choice."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.experts = Mixture(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        self.layers = nn.ModuleList(Mixture() for _ in range(2 if inside else 0))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        x = self.first(x, expert)
        for layer in self.layers:
            x = torch.tanh(layer(x, expert))
        for choice in (expert, (expert + 3) % (COUNT + 1)):
            for i in reversed(range(COUNT)):
                mask = choice == i
                if mask.any():
                    x = x.index_add(0, mask.nonzero().flatten(), self.experts[i](x[mask]) * 0.1)
        return x


class Chance(nn.Module):
    """Layers of which each rank leaves out others, in the forwards that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            kept = (expert != i).to(x.dtype)[:, None]
            if kept.any():
                x = x + kept * torch.tanh(layer(x))
        return x


def trained(plan: Plan | None, kind: Any, accumulate: int = 1) -> Any:
    """Losses, one of an evaluation, and the weights. Batches of 6 whose rows have one expert, or none, in turns."""
    end_sessions()
    torch.manual_seed(0)
    model: Any = kind().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    numbers = torch.tensor([0, 0, 1, 1, 2, 2, 4, 4, 4, 3, 3, 3, 4, 4, 4, 4, 4, 4, 1, 2, 3, 4, 0, 0])
    x = torch.randn(24, WIDTH, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x.sin(), numbers)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=6)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    losses = []
    for _ in range(2):
        for number, (given, target, expert) in enumerate(loader):
            loss = nn.functional.mse_loss(model(given, expert), target)
            if (number + 1) % accumulate:
                with mw.accumulate():
                    losses.append(float(mw.backward(loss)))
            else:
                losses.append(float(mw.backward(loss)))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for given, target, expert in loader:
                error = (model(given, expert) - target).square().sum()
                losses.append(float(mw.sum(error)))
        model.train()
    weights = {name: torch.tensor(p.tolist(), dtype=torch.float64) for name, p in model.state_dict().items()}
    notes = default_engine().notes
    end_sessions()
    return losses, weights, notes


def assert_equal(found: Any, want: Any) -> None:
    assert found[0] == pytest.approx(want[0], rel=1e-9)
    for name, value in want[1].items():
        assert torch.allclose(found[1][name], value, rtol=0, atol=1e-10), name


def flat() -> nn.Module:
    return Twice(inside=False)


def nested() -> nn.Module:
    return Twice(inside=True)


PLANS = [Plan(shard=2), Plan(shard=3), Plan(shard=2, recompute="full"), Plan(data=2), Plan(data=3)]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("kind", [flat, nested, Chance])
def test_what_each_rank_skips_for_itself_trains_as_on_one_device(plan: Plan, kind: Any, pool: Any) -> None:
    want = trained(None, kind)
    for found in pool(plan.devices).run(trained, plan, kind):
        assert_equal(found, want)


def test_replicas_do_so_with_accumulation(pool: Any) -> None:
    want = trained(None, flat, 2)
    for plan in (Plan(data=2), Plan(data=2, zero1=True)):
        for found in pool(2).run(trained, plan, flat, 2):
            assert_equal(found, want)


def test_it_does_so_with_accumulation_and_the_run_says_what_is_gathered_together(pool: Any) -> None:
    want = trained(None, flat, 2)
    for found in pool(2).run(trained, Plan(shard=2), flat, 2):
        assert_equal(found, want)
        assert any(
            "a rank may skip first.ffns.0" in note and "all ranks gather this together with Twice" in note
            for note in found[2]
        )


# --- what is not found


class Hidden(Chance):
    """Its layers cannot be seen in the source."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.later, self.calls = later, 0

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        self.calls += 1
        for i, layer in enumerate(getattr(self, "layers")):  # noqa: B009
            if (expert == i).any() or (self.later and self.calls < 4):
                x = x + torch.tanh(layer(x))
        return x


def test_a_skipped_layer_that_nobody_could_see_is_refused_at_once(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"calls block layers\.[01] after 0 blocks, but the forward of another"):
        pool(2).run(trained, Plan(shard=2), lambda: Hidden(False), timeout=30)


def test_one_that_is_skipped_later_is_refused_by_a_rank_that_skips_it(pool: Any) -> None:
    def case() -> None:
        with patch.object(shard_refusals, "GRACE", 1.0):
            trained(Plan(shard=2), lambda: Hidden(True))

    with pytest.raises(CaseFailed, match=r"\d blocks, but the forwards of other ranks do not.*list named experts"):
        pool(2).run(case, timeout=60)
