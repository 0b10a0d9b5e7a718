"""An own loop under every plan: the contract of the two lines, sentence by sentence."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.launcher.script import _script_in_worker
from meshwise.spec.plan_file import plan_to_toml
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.transfer.sharded import full_tensor
from meshwise.workers.environment import PLAN_FILE

PLANS = {
    "shard": mw.Plan(shard=2),
    "zero1": mw.Plan(data=2, zero1=True),
    "recompute": mw.Plan(data=2, recompute="full"),
    "shard and recompute": mw.Plan(shard=2, recompute="selective"),
    "offload": mw.Plan(data=2, offload=("activations",)),
    "offload and shard": mw.Plan(shard=2, offload=("activations",)),
    "kept gathered": mw.Plan(shard=2, reshard=False),
}


class Block(nn.Module):
    """A layer with dropout that keeps all, so that there is a draw and no difference."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def data(samples: int = 21, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x.sum(1) > 0).long())


def wholes(named: Any) -> dict[str, Any]:
    return {name: full_tensor(t.detach()).clone() for name, t in named}


def state_of(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """The tensors of the optimizer's state that this rank holds, whole, by parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{names[id(p)]} {k}": full_tensor(v) for p in held for k, v in optimizer.state.get(p, {}).items()}


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def both(case: Any, pool: Any, plan: mw.Plan, *arguments: Any) -> tuple[Any, list[Any]]:
    """What `case(plan)` gives on one device, here, without a plan, and on the ranks of `plan`."""
    end_sessions()
    one = case(None, *arguments)
    end_sessions()
    return one, pool(plan.devices).run(case, plan, *arguments)


def refused(pool: Any, case: Any, *arguments: Any) -> str:
    """The error that every rank meets in `case`, as `kind: text`."""

    def caught(*given: Any) -> str:
        try:
            case(*given)
        except mw.MeshwiseError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    first, second = pool(2).run(caught, *arguments)
    assert first == second
    return str(first)


def train(plan: mw.Plan | None, batch_size: int = 5) -> Any:
    """Two epochs of AdamW with a ragged last batch, clipping and a scheduler, everything made before `distribute`."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    model, optimizer, scheduler, loader = mw.distribute(model, optimizer, scheduler, loader, plan=plan, view="rank")
    losses, norms = [], []
    for _ in range(2):
        for x, y in loader:
            losses.append(float(mw.backward(nn.functional.cross_entropy(model(x), y))))
            norms.append(float(full_tensor(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return (losses, norms, wholes(model.named_parameters()), scheduler.get_last_lr()), state_of(optimizer, model)


ALONE = ("recompute", "offload", "kept gathered")  # `make test` runs them with others, in the other plans


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALONE)) for n in PLANS])
def test_losses_norms_weights_and_the_optimizers_state_are_those_of_one_device(name: str, pool: Any) -> None:
    (want, state), results = both(train, pool, PLANS[name])
    held = set()
    for got, part in results:
        same(got, want)
        same(part, {key: state[key] for key in part})
        held |= part.keys()
    assert held == state.keys()


@pytest.mark.slow
def test_replicas_of_shards_with_shares_of_nothing_are_one_device(pool: Any) -> None:
    (want, _), results = both(train, pool, mw.Plan(data=2, shard=2), 3)
    for got, _ in results:
        same(got, want)


@pytest.mark.parametrize("plan", [mw.Plan(shard=2), mw.Plan(data=2, zero1=True)], ids=str)
def test_what_a_plan_divides_is_divided(plan: mw.Plan, pool: Any) -> None:
    def case(plan: mw.Plan) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = mw.distribute(
            model, optimizer, DataLoader(data(), batch_size=7), plan=plan, view="rank"
        )
        for x, y in loader:
            mw.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

        def local(t: Any) -> int:
            return t.to_local().numel() if hasattr(t, "to_local") else t.numel()

        return sum(map(local, model.parameters())), sum(
            local(v) for state in optimizer.state.values() for v in state.values()
        )

    total = sum(p.numel() for p in net().parameters())
    for parameters, state in pool(2).run(case, plan):
        assert parameters <= (0.55 if plan.shard > 1 else 1.0) * total
        assert state <= 1.3 * total  # of two moments


def test_the_same_objects_come_back_and_keep_class_hooks_and_keys(pool: Any) -> None:
    class Kind(nn.Sequential):
        pass

    def case(plan: mw.Plan) -> Any:
        model = Kind(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 80), nn.Linear(80, 2)).double()
        model.note = "mine"
        seen = []
        model[0].register_forward_hook(lambda *_: seen.append("forward"))
        model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        keys, shapes = list(model.state_dict()), [p.shape for p in model.parameters()]
        group = optimizer.param_groups[0]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(data(), batch_size=4)
        got = mw.distribute(model, optimizer, scheduler, loader, plan=plan, view="rank")
        for x, y in got[3]:
            mw.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        return (
            got[0] is model and got[1] is optimizer and got[2] is scheduler and model.note == "mine",
            isinstance(model, Kind) and type(model).__name__ == "Kind" and type(model[0]).__name__ == "Linear",
            list(model.state_dict()) == keys and [p.shape for p in model.parameters()] == shapes,
            optimizer.param_groups[0] is group
            and all(a is b for a, b in zip(group["params"], model.parameters(), strict=True)),
            seen[:2] == ["forward", "backward"] and len(got[3]) == len(loader),
        )

    for plan in (mw.Plan(data=2), *PLANS.values()):
        assert pool(2).run(case, plan) == [(True,) * 5] * 2, plan


def test_an_optimizer_that_has_stepped_before_goes_on_with_its_state(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in DataLoader(data(), batch_size=21):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer, loader = mw.distribute(
            model, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank"
        )
        for x, y in loader:
            mw.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return wholes(model.named_parameters())

    for plan in (PLANS["shard"], PLANS["zero1"]):
        want, results = both(case, pool, plan)
        for got in results:
            same(got, want)


def made_when(plan: mw.Plan | None, when: str) -> Any:
    model, loader = net(), DataLoader(data(), batch_size=5)
    if when == "after":
        model, loader = mw.distribute(model, loader, plan=plan, view="rank")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if when == "optimizer first":
            optimizer = mw.distribute(optimizer, plan=plan, view="rank")
            model, loader = mw.distribute(model, loader, view="rank")
        else:
            model, loader = mw.distribute(model, loader, plan=plan, view="rank")
        if when == "given later":
            optimizer = mw.distribute(optimizer, view="rank")
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model.named_parameters())


ORDERS = [("shard", "after"), ("shard", "optimizer first"), ("shard", "given later"), ("zero1", "given later")]
OTHER_ORDERS = [("zero1", "after"), ("zero1", "optimizer first")]


@pytest.mark.parametrize(
    ("plan", "when"), [*ORDERS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_ORDERS)]
)
def test_an_optimizer_made_afterwards_or_given_in_a_call_of_its_own_works(plan: str, when: str, pool: Any) -> None:
    want, results = both(made_when, pool, PLANS[plan], when)
    for got in results:
        same(got, want)


def test_an_optimizer_of_parameters_that_were_replaced_is_refused(pool: Any) -> None:
    said = refused(pool, made_when, PLANS["shard"], "never given")
    assert said.startswith("UsageError: ") and "Its parameters are those from before sharding" in said


def test_parameters_of_no_distributed_model_are_refused(pool: Any) -> None:
    def case(plan: mw.Plan, alone: bool) -> Any:
        model, other = net(), nn.Linear(2, 2).double()
        held = list(other.parameters()) + ([] if alone else list(model.parameters()))
        optimizer = torch.optim.SGD(held, 0.1)
        model, optimizer, loader = mw.distribute(
            model, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank"
        )
        for x, y in loader:
            mw.backward(nn.functional.cross_entropy(other(model(x)), y))
            optimizer.step()

    for alone, words in ((False, "from one rank alone"), (True, "none of its parameters belongs to a")):
        said = refused(pool, case, mw.Plan(data=2), alone)
        assert said.startswith("UsageError: ") and words in said
    said = refused(pool, case, PLANS["shard"], False)
    assert said.startswith("PlanError: ") and "is not in the model" in said


def test_plain_backward_is_refused_under_every_plan_and_for_an_optimizer_never_given(pool: Any) -> None:
    def case(plan: mw.Plan, given: bool) -> Any:
        model, loader = mw.distribute(net(), DataLoader(data(), batch_size=5), plan=plan, view="rank")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = mw.distribute(optimizer, view="rank") if given else optimizer
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    for plan in (mw.Plan(data=2), PLANS["shard"], PLANS["zero1"]):
        for given in (True, False):
            assert "mw.backward(loss) instead of loss.backward()" in refused(pool, case, plan, given)


def averaged(plan: mw.Plan | None, how: str) -> Any:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, average, optimizer, loader = mw.distribute(
        model, average, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank"
    )
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if how == "swa":
            average.update_parameters(model)
        for name, p in model.named_parameters():
            shadow[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    with torch.no_grad():
        outputs = [mw.sum(average(x).sum(0)) for x, _ in loader]
    return wholes(shadow.items()), wholes(average.named_parameters()), outputs


def test_averages_of_the_weights_go_on_working(pool: Any) -> None:
    for plan in (PLANS["shard"], PLANS["zero1"]):
        want, results = both(averaged, pool, plan, "swa")
        for got in results:
            same(got, want)


def scaled(plan: mw.Plan | None) -> Any:
    """In the third batch the gradient of one row of one weight overflows: sharded, it lies on one rank alone."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank")
    overflow = torch.zeros(48, dtype=torch.float64)
    model.first.register_forward_hook(lambda m, i, out: out.register_hook(lambda g: g + overflow) and None)
    for number, (x, y) in enumerate(loader):
        overflow[0] = float("inf") if number == 2 else 0.0
        mw.backward(scaler.scale(nn.functional.cross_entropy(model(x), y)))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return wholes(model.named_parameters()), scaler.get_scale()


def test_a_loss_scaler_of_the_user_works_and_all_ranks_skip_together(pool: Any) -> None:
    for plan in (mw.Plan(data=2), PLANS["shard"], PLANS["zero1"]):
        want, results = both(scaled, pool, plan)
        assert want[1] == 512.0
        for got in results:
            same(got, want)


def test_autocast_of_the_user_works(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        model = net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(data(dtype=torch.float32), batch_size=6)
        model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
                assert out.dtype == torch.bfloat16
                loss = nn.functional.cross_entropy(out, y)
            mw.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return wholes(model.named_parameters())

    want, results = both(case, pool, PLANS["shard"])
    for got in results:
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def test_the_precision_of_the_plan_needs_no_word_of_the_user(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        model = net(torch.float32)
        inside = []
        model.blocks[0].up.register_forward_hook(lambda m, i, out: inside.append(str(out.dtype)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(data(dtype=torch.float32), batch_size=6)
        model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
        for x, y in loader:
            out = model(x)
            loss = mw.backward(nn.functional.cross_entropy(out, y))
            optimizer.step()
            optimizer.zero_grad()
        return inside[0], str(out.dtype), str(next(model.parameters()).dtype), float(loss)

    words = [f"torch.{w}" for w in ("bfloat16", "float32", "float64")]
    for axes in ({}, {"data": 2}, {"shard": 2}):
        devices = max(1, *axes.values(), 1)
        for precision, want in (("bf16", [words[0], words[1], words[1]]), ("fp64", [words[2]] * 3)):
            plan = mw.Plan(**axes, precision=precision)
            end_sessions()
            results = [case(plan)] if devices == 1 else pool(devices).run(case, plan)
            for got in results:
                assert list(got[:3]) == want


def test_gradients_kept_by_accumulate_are_reduced_once(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = mw.distribute(
            model, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank"
        )
        for number, (x, y) in enumerate(loader):
            if number % 2 == 0:
                with mw.accumulate():
                    mw.backward(nn.functional.cross_entropy(model(x), y))
            else:
                mw.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()  # of the fifth batch, which was kept back
        return wholes(model.named_parameters())

    for plan in (mw.Plan(data=2), PLANS["shard"], PLANS["zero1"]):
        want, results = both(case, pool, plan)
        for got in results:
            same(got, want)


def test_evaluation_with_fewer_samples_than_ranks_ends_and_counts_each_once(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        model, loader = mw.distribute(net(), DataLoader(data(9), batch_size=4), plan=plan, view="rank")
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in loader:
                total += mw.sum(float(nn.functional.cross_entropy(model(x), y, reduction="sum")))
                count += mw.sum(len(x))
        return total / count, count

    want, results = both(case, pool, PLANS["shard"])
    assert want[1] == 9
    for got in results:
        same(got, want)


def normed(plan: mw.Plan | None, samples: int = 21) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Linear(70, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data(samples), batch_size=5)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        total = sum(mw.sum(float(model(x).sum())) for x, _ in loader)
    return wholes(model.named_parameters()), wholes(model.named_buffers()), total


def test_batch_norm_takes_the_statistics_of_the_whole_batch(pool: Any) -> None:
    for plan in (mw.Plan(data=2), PLANS["shard"], PLANS["recompute"]):
        want, results = both(normed, pool, plan, 22)
        for got in results:
            same(got, want)


@pytest.mark.slow
def test_batch_norm_leaves_stand_ins_out(pool: Any) -> None:
    want, results = both(normed, pool, mw.Plan(data=3), 22)  # the last batch has two samples
    for got in results:
        same(got, want)


def files(plan: mw.Plan | None, folder: str, begin: bool) -> Any:
    """Half of a run that saves, or the other half that loads and goes on."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=5, shuffle=True)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    path = Path(folder) / "state.pt"
    if not begin:
        saved = mw.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    mw.save(states, path if begin else Path(folder) / "end.pt")


ONE, SHARD, ZERO1, DATA = None, PLANS["shard"], PLANS["zero1"], mw.Plan(data=2)
PAIRS = [(ONE, SHARD), (SHARD, ZERO1), (ZERO1, ONE)]
MORE = [
    (SHARD, ONE),
    (ZERO1, SHARD),
    (ONE, ZERO1),
    (SHARD, SHARD),
    (ZERO1, ZERO1),
    (SHARD, DATA),
    (ZERO1, DATA),
    (ONE, DATA),
]


@pytest.mark.parametrize(
    ("first", "second"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)], ids=str
)
def test_a_state_saved_under_one_plan_goes_on_under_another(
    first: mw.Plan | None, second: mw.Plan | None, pool: Any, tmp_path: Path
) -> None:
    def run(plan: mw.Plan | None, begin: bool, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        end_sessions()
        files(plan, str(folder), begin) if plan is None else pool(2).run(files, plan, str(folder), begin)

    for begin, plan in ((True, first), (False, second)):
        run(None, begin, tmp_path / "one")
        run(plan, begin, tmp_path / "many")
    for name in ("state.pt", "end.pt"):
        want, got = (torch.load(tmp_path / where / name, weights_only=True) for where in ("one", "many"))
        assert got.keys() == want.keys() and list(got["model"]) == list(want["model"])
        assert got.pop("loader") == want.pop("loader")  # texts, which `same` does not compare
        same(got, want)


def test_a_model_itself_is_not_saved_in_parts(pool: Any, tmp_path: Path) -> None:
    def case(plan: mw.Plan, path: str) -> Any:
        mw.save(mw.distribute(net(), plan=plan, view="rank"), path)

    assert "state_dict()" in refused(pool, case, PLANS["shard"], str(tmp_path / "m.pt"))


def whole_model(path: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.register_forward_hook(logging.debug)  # the program's own stays
    model = mw.distribute(model, view="rank")
    for batch in torch.randn(2, 6, 6):
        mw.backward(model(mw.split(batch)).square().mean())
        hooks = dict(model._forward_hooks)
        mw.save(model, path)
        assert dict(model._forward_hooks) == hooks and len(hooks) > 1
        assert "forward" in vars(model[1])
    mw.barrier()
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.ReLU, logging.debug]):
        found = torch.load(path, weights_only=True)
    assert "forward" not in vars(found[1]) and list(found._forward_hooks.values()) == [logging.debug]
    return [torch.equal(a, b) for a, b in zip(found.buffers(), model.buffers(), strict=True)]


def test_a_saved_whole_model_is_the_programs_own(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(whole_model, str(tmp_path / "model.pt")) == [[True] * 3] * 2


def gan(plan: mw.Plan | None, calls: int) -> Any:
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(3, 90), nn.Linear(90, 6)).double(), net()
    opt_m, opt_j = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)
    loader = DataLoader(data(12), batch_size=5)
    if calls == 1:
        maker, judge, opt_m, opt_j, loader = mw.distribute(maker, judge, opt_m, opt_j, loader, plan=plan, view="rank")
    else:
        maker, opt_m, loader = mw.distribute(maker, opt_m, loader, plan=plan, view="rank")
        judge, opt_j = mw.distribute(judge, opt_j, view="rank")
    for x, y in loader:
        fake = maker(x[:, :3])
        mw.backward(nn.functional.cross_entropy(judge(x), y) + judge(fake.detach()).pow(2).mean())
        opt_j.step()
        opt_j.zero_grad()
        mw.backward(judge(fake).mean())
        opt_m.step()
        opt_m.zero_grad()
        opt_j.zero_grad()
    return wholes([*maker.named_parameters(), *judge.named_parameters()])


IN_TURNS = [(PLANS["shard"], 1), (PLANS["zero1"], 1), (mw.Plan(data=2), 1)]
MORE_IN_TURNS = [(mw.Plan(data=2), 2), (PLANS["offload"], 1), (PLANS["zero1"], 2), (PLANS["offload"], 2)]


@pytest.mark.parametrize(
    ("plan", "calls"), [*IN_TURNS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_IN_TURNS)], ids=str
)
def test_two_models_that_train_in_turns_are_those_of_one_device(plan: mw.Plan, calls: int, pool: Any) -> None:
    want, results = both(gan, pool, plan, calls)
    for got in results:
        same(got, want)


def test_a_second_model_under_shard_belongs_into_the_first_call(pool: Any) -> None:
    assert "Pass all models in one call" in refused(pool, gan, PLANS["shard"], 2)


def test_one_optimizer_of_two_models_is_bound_to_both(pool: Any) -> None:
    def case(plan: mw.Plan | None) -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 80).double(), nn.Linear(80, 2).double()
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 0.01)
        first, second, optimizer, loader = mw.distribute(
            first, second, optimizer, DataLoader(data(), batch_size=5), plan=plan, view="rank"
        )
        for x, y in loader:
            mw.backward(nn.functional.cross_entropy(second(torch.tanh(first(x))), y))
            optimizer.step()
            optimizer.zero_grad()
        return wholes([*first.named_parameters(), *second.named_parameters()])

    for plan in (PLANS["shard"], PLANS["zero1"]):
        want, results = both(case, pool, plan)
        for got in results:
            same(got, want)


def test_a_copy_of_a_laid_model_is_a_model_of_its_own(pool: Any) -> None:
    def case(plan: mw.Plan) -> Any:
        model = mw.distribute(net(torch.float32), plan=plan, view="rank")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
            x = torch.ones(2, 6)
            return float(twin(x).abs().sum()), float(model(x).abs().sum()) > 0

    assert pool(2).run(case, mw.Plan(data=2, precision="bf16", recompute="full")) == [(0.0, True)] * 2


def test_a_plan_comes_from_a_file_or_from_the_environment(pool: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(mw.Plan(shard=2)))

    def case(given: Any, named: str | None) -> Any:
        import os

        if named is not None:
            os.environ[PLAN_FILE] = named
        try:
            model = mw.distribute(net(), plan=given, view="rank")
        finally:
            os.environ.pop(PLAN_FILE, None)
        return type(next(model.parameters())).__name__, str(default_engine().program.plan)

    want = [("DTensor", "Plan(shard=2)")] * 2
    assert pool(2).run(case, str(file), None) == want
    assert pool(2).run(case, None, str(file)) == want
    assert pool(2).run(case, mw.Plan(shard=2), str(file)) == want
    assert pool(2).run(case, None, None) == [("Parameter", "Plan(data=2)")] * 2
    for given, named, words in (
        (mw.Plan(data=2), str(file), "Remove plan= from the script"),
        ("none.toml", None, "no plan can be read"),
        (mw.Plan(shard=4), None, "needs 4 devices, but this run has 2"),
        (mw.Plan(data=2, accumulate=2), None, "with mw.accumulate()"),
        (mw.Plan(data=2, precision="fp16"), None, "torch.amp.GradScaler"),
    ):
        assert words in refused(pool, case, given, named)


def test_a_script_has_one_plan(pool: Any) -> None:
    def case() -> Any:
        first = mw.distribute(nn.Linear(2, 2), plan=mw.Plan(data=2), view="rank")
        mw.distribute(nn.Linear(2, 2), plan=mw.Plan(shard=2), view="rank")
        return first

    assert "A script has one plan" in refused(pool, case)


def step_under(plan: mw.Plan, width: int = 2) -> str:
    """Train a new model under `plan`; gives the class of its parameters' gradients."""
    torch.manual_seed(0)
    model = nn.Linear(6, width).double()
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = mw.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, plan=plan, view="rank"
    )
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        kind = type(next(model.parameters()).grad).__name__
        optimizer.step()
        optimizer.zero_grad()
    return kind


def test_a_plan_ends_with_the_models_that_it_was_applied_to(pool: Any) -> None:
    def case() -> list[str]:
        return [step_under(mw.Plan(data=2)), step_under(mw.Plan(shard=2)), step_under(mw.Plan(data=2, zero1=True))]

    assert pool(2).run(case) == [["Tensor", "DTensor", "Tensor"]] * 2


def test_a_session_ends_its_plan_though_its_model_is_kept(pool: Any) -> None:
    def case() -> Any:
        with mw.session():
            first = mw.distribute(nn.Linear(2, 2), plan=mw.Plan(data=2), view="rank")
        with mw.session():
            second = mw.distribute(nn.Linear(2, 2), plan=mw.Plan(shard=2), view="rank")
        return [type(next(model.parameters())).__name__ for model in (first, second)]

    assert pool(2).run(case) == [["Parameter", "DTensor"]] * 2


def test_a_backward_of_a_model_that_was_not_distributed_is_refused(pool: Any) -> None:
    def never_given() -> None:
        model, loader = nn.Linear(6, 2).double(), mw.distribute(DataLoader(data(), batch_size=4), view="rank")
        for x, y in loader:
            mw.backward(nn.functional.cross_entropy(model(x), y))

    assert "the model was never distributed" in refused(pool, never_given)


IN_A_ROW = [(mw.Plan(data=2), 20), (mw.Plan(data=2, zero1=True), 20), (mw.Plan(shard=2), 20)]


@pytest.mark.parametrize(
    ("plan", "models"),
    [(mw.Plan(shard=2), 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in IN_A_ROW)],
    ids=str,
)
def test_models_one_after_the_other_take_the_memory_of_one(plan: mw.Plan, models: int, pool: Any) -> None:
    """Counted as tensors that are alive, whatever the allocator keeps."""

    def case() -> tuple[int, int]:
        alive = []
        for _ in range(models):
            step_under(plan, width=1000)
            gc.collect()  # what is garbage is not held, whenever the collector comes
            alive.append(sum(t.nbytes for t in gc.get_objects() if isinstance(t, Tensor)))
        return alive[0], alive[-1]

    for first, last in pool(2).run(case):
        assert last <= 1.1 * first


def test_one_device_alone_runs_a_plan_of_several_without_its_axes(capsys: pytest.CaptureFixture[str]) -> None:
    model = mw.distribute(net(torch.float32), plan=mw.Plan(shard=4, precision="fp64", recompute="full"), view="rank")
    assert str(default_engine().program.plan) == "Plan(data=1, precision='fp64', recompute='full')"
    assert next(model.parameters()).dtype == torch.float64
    assert "and techniques that need several devices, are ignored" in capsys.readouterr().err


def test_a_script_that_distributes_no_model_is_told_that_its_plan_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, plan = tmp_path / "plain.py", tmp_path / "plan.toml"
    script.write_text("print('hello')\n")
    plan.write_text("shard = 2\n")
    monkeypatch.setenv(PLAN_FILE, "")  # what a worker writes there ends with the test
    for name, value in (("argv", []), ("path", [*sys.path])):
        monkeypatch.setattr(sys, name, value)
    _script_in_worker(script, [], mw.RunOptions(plan=plan), tmp_path)
    assert "plain.py never passed a model to mw.distribute, so the plan changed nothing" in capsys.readouterr().err


def test_an_optimizer_of_a_deferred_model_trains_it_on_one_device_too() -> None:
    with mw.deferred():
        model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    foreign = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mw.distribute(model, optimizer, view="rank")
    before = wholes(model.named_parameters())
    mw.backward(model(torch.ones(2, 6, dtype=torch.float64)).sum())
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if name != "first.weight")
    with pytest.raises(mw.UsageError, match=r"made before mw\.distribute and not passed to it"):
        foreign.step()


def frozen_in_turns(plan: mw.Plan | None) -> Any:
    """The judge is frozen while the maker trains: reducers are made anew while the maker's graph waits."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(3, 90), nn.Tanh(), nn.Linear(90, 6)).double(), net()
    opt_m, opt_j = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)
    loader = DataLoader(data(12), batch_size=5)
    maker, judge, opt_m, opt_j, loader = mw.distribute(maker, judge, opt_m, opt_j, loader, plan=plan, view="rank")
    for x, y in loader:
        fake = maker(x[:, :3])
        opt_j.zero_grad()
        mw.backward(nn.functional.cross_entropy(judge(x), y) + judge(fake.detach()).pow(2).mean())
        opt_j.step()
        opt_m.zero_grad()
        judge.requires_grad_(False)
        mw.backward(judge(fake).mean())
        judge.requires_grad_(True)
        opt_m.step()
    return wholes([*maker.named_parameters(), *judge.named_parameters()])


def test_a_model_that_is_frozen_in_turns_is_that_of_one_device(pool: Any) -> None:
    for plan in (mw.Plan(data=2), PLANS["zero1"]):
        want, results = both(frozen_in_turns, pool, plan)
        for got in results:
            same(got, want)
