"""What a program reads of parameters and gradients is that of the whole, under any plan; read by one rank alone it is
refused. Of transfer/reading.py and torch_compat/whole_values.py too."""

from __future__ import annotations

import io
import json
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.torch_compat.reducer import default_store
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.transfer import collectives
from meshwise.transfer.reading import KEY, look_out
from tests.pool import CaseFailed

PLANS = {"shard": Plan(shard=2), "both": Plan(data=2, shard=2), "zero1": Plan(data=2, zero1=True)}


def printed(*values: object) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        print(*values)
    return text.getvalue()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file)
    return type(loaded).__name__, loaded.tolist()


READS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda p, m: [p.norm().item(), p.mean().item(), p.std().item(), p.max().item(), p[4, 0].item()],
    "item of a gradient": lambda p, m: [p.grad.norm().item(), p.grad.abs().max().item(), p.grad.data.sum().item()],
    "float": lambda p, m: [float(p.sum()), float(p.data.abs().mean())],
    "bool": lambda p, m: [bool(p.sum() > 0), bool(p.abs().sum() > 3), 1 if p.norm() > 1 else 0],
    "int": lambda p, m: [int(p.abs().sum() * 100), int((p > 0).sum()), int(p.argmax()), int(torch.count_nonzero(p))],
    "format": lambda p, m: [f"{p.norm():.2f}", format(p.mean(), "8.4f"), f"{p.norm() > 0}"],
    "print": lambda p, m: [printed(p), printed("norm", p.norm()), repr(p.data), str(p.grad)],
    "tolist": lambda p, m: [p.tolist(), p.norm().tolist(), p.grad[1].tolist()],
    "numpy": lambda p, m: [p.detach().numpy().tolist(), p.detach().cpu().numpy().sum()],
    "cpu": lambda p, m: [p.cpu().sum().item(), type(p.detach().cpu()).__name__, p.grad.cpu().tolist()],
    "a comparison": lambda p, m: [
        bool((p > 0.39).any()),
        bool((p.grad != p.grad).any()),
        bool(torch.isfinite(p).all()),
    ],
    "equal": lambda p, m: [torch.equal(p, p), torch.equal(p, p + 1), torch.allclose(p, p * (1 + 1e-9))],
    "torch.save": lambda p, m: [saved(p), saved(p.data), saved(p.grad)],
    "sums of norms": lambda p, m: [
        sum(q.norm() for q in m.parameters()).item(),
        torch.stack([q.grad.norm() for q in m.parameters()]).norm().item(),
        max(float(q.abs().max()) for q in m.parameters()),
        [round(float(q.grad.norm()), 9) for q in m.parameters()],
    ],
    "clipping": lambda p, m: [
        type(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9)).__name__,
        f"{torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9):.9f}",
        torch.nn.utils.get_total_norm([q.grad for q in m.parameters()]).item(),
    ],
}


def prepared(plan: Plan) -> Any:
    """A parameter with its gradient of a model under the plan, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loader = DataLoader(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4), batch_size=8)
    model, loader = mw.distribute(model, loader, plan=plan, view="rank")
    for x in loader:
        mw.backward(model(x).square().mean())
    return model[0].weight, model


def read_all(plan: Plan) -> dict[str, Any]:
    given = prepared(plan)
    with torch.no_grad():
        return {name: read(*given) for name, read in READS.items()}


@pytest.fixture(scope="module")
def found(pool: Any) -> Callable[[str], list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in cases:
            plan = PLANS[name] if name else Plan()
            cases[name] = [read_all(plan)] if plan.devices == 1 else pool(plan.devices).run(read_all, plan)
        return cases[name]

    return of


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("plan", PLANS)
def test_what_every_rank_reads_is_that_of_one_device(plan: str, name: str, found: Any) -> None:
    for rank in found(plan):
        same(rank[name], found("")[0][name])


def same(got: Any, want: Any) -> None:
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
    elif isinstance(want, float):
        assert got == pytest.approx(want, abs=1e-9)
    else:
        assert got == want


def read_alone(name: str) -> str:
    """Rank 0 reads, and the other rank goes on, until rank 0 comes after it."""
    (p, model), text = prepared(Plan(shard=2)), ""
    if mw.rank() == 0:
        try:
            with torch.no_grad():
                READS[name](p, model)
        except UsageError as error:
            text = str(error)
    mw.sum(1.0)
    assert p.sum().item() == p.detach().cpu().sum().item()  # the ranks are together again
    return text


ALONE = ["item", "sums of norms"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ALONE else [pytest.mark.slow]) for n in READS])
def test_what_one_rank_reads_alone_is_refused_with_its_line(name: str, pool: Any) -> None:
    texts = pool(2).run(read_alone, name, timeout=20)
    assert "test_read_values.py:" in texts[0] and "rank 0 reads a sharded tensor, and rank 1 has gone on to" in texts[0]


def test_ranks_that_read_in_different_lines_are_told_both(pool: Any) -> None:
    def case() -> str:
        p, _ = prepared(Plan(shard=2))
        with pytest.raises(UsageError) as refused:
            if mw.rank() == 0:
                p.norm().item()
            else:
                p.norm().tolist()
        return str(refused.value)

    first, second = pool(2).run(case)
    assert "and rank 1 is at" in first and "and rank 0 is at" in second


def test_what_a_rank_holds_while_it_is_idle_is_let_go_with_its_function(pool: Any) -> None:
    """Where a rank is idle is told to the others; the function that it is in is not kept for it."""

    def case() -> bool:
        look_out()
        mw.sum(1.0)

        def idle() -> Any:
            model, at = nn.Linear(1, 1), f"{KEY}/at/{mw.rank()}"
            store = default_store()
            while not (store.check([at]) and json.loads(store.get(at))[1] == collectives.entered):
                time.sleep(0.05)
            return weakref.ref(model)

        return idle()() is None

    assert pool(2).run(case) == [True, True]


def penalty(model: nn.Module) -> Any:
    norms = sum(p.norm() for p in model.parameters())
    return 0.1 * norms + 0.01 * sum(p.abs().sum() for p in model.parameters())


class Net(nn.Module):
    """With a parameter that only the penalty reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(2)])
        self.aside = nn.Parameter(torch.full((5,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def regularised(plan: Plan, weighed: bool) -> Any:
    """A loop with a penalty, whose last batch has five samples, accumulated over two batches."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.randn(29, 6, generator=torch.Generator().manual_seed(1)).double(), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    losses = []
    for number, x in enumerate(loader):
        each = model(x).square().mean(1)
        counts = (x[:, 0] > 0).double() if weighed else torch.ones(len(x)).double()
        loss = (each * counts).sum() / counts.sum().clamp(min=1)
        if number % 2:
            loss += penalty(model)
        else:
            loss = loss + penalty(model)
        if number % 2 == 0:
            with mw.accumulate():
                losses.append(float(mw.backward(loss, counts.sum()) if weighed else mw.backward(loss)))
            continue
        losses.append(float(mw.backward(loss, counts.sum()) if weighed else mw.backward(loss)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("plan", "weighed"),
    [
        *(("shard", True), ("zero1", False)),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("shard", False), ("zero1", True))),
        *(pytest.param("both", weighed, marks=pytest.mark.slow) for weighed in (False, True)),
    ],
)
def test_a_penalty_of_parameters_trains_as_on_one_device(plan: str, weighed: bool, pool: Any) -> None:
    want = regularised(Plan(), weighed)
    for got in pool(PLANS[plan].devices).run(regularised, PLANS[plan], weighed):
        same(got, want)


class Narrow(nn.Module):
    """Its last layer has one output, of which the second rank has no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def multiplied(plan: Plan, second: bool = False) -> Any:
    """Losses of a script and a job whose loss is multiplied by norms of parameters, or holds a gradient penalty."""

    def loss(model: Any, x: Tensor) -> Tensor:
        if second:
            x = x.clone().requires_grad_()
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            return (slope.norm(dim=1) - 1).square().mean()
        squares = sum(p.square().sum() for p in model.parameters())
        return model(x).square().mean() * model.last.weight.norm() * squares

    x = torch.randn(29, 6, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(0)
    model = Narrow().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(x, batch_size=8), plan=plan, view="rank")
    losses = []
    for batch in loader:
        losses.append(float(mw.backward(loss(model, batch))))
        optimizer.step()
        optimizer.zero_grad()
    job = mw.Job("net", Narrow, loss, lambda params: torch.optim.SGD(params, 0.1), lambda: x, batch_size=8)
    options = RunOptions(plan=Plan(**{**vars(plan), "precision": "fp64"}), log_every=1)
    return losses, run_job(job, options, None)["losses"]


def test_a_loss_times_norms_of_parameters_is_that_of_one_device(pool: Any) -> None:
    want = multiplied(Plan())
    for got in pool(2).run(multiplied, PLANS["shard"]):
        same(got, want)


def test_a_gradient_penalty_is_right_or_refused(pool: Any) -> None:
    want = multiplied(Plan(), True)
    for got in pool(2).run(multiplied, Plan(data=2), True):
        same(got, want)
    said = r"shard: .* a gradient penalty, cannot be differentiated\. Use shard=1"
    with pytest.raises(CaseFailed, match=said) as failed:
        pool(2).run(multiplied, PLANS["shard"], True)
    assert failed.value.kind == "PlanError"


def job_with_penalty(accumulate: int, plan: Plan) -> Any:
    x = torch.randn(43, 6, generator=torch.Generator().manual_seed(1))

    def loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        counts = batch[0][:, 0] > 0
        each = model(batch[0]).square().mean(1)
        return (each * counts).sum() / counts.sum().clamp(min=1) + penalty(model), counts.sum()

    job = mw.Job(
        name="net",
        model=Net,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=lambda: (x, x),
        batch_size=12,
        epochs=1,
        clip_norm=1.0,
    )
    options = RunOptions(plan=Plan(**{**vars(plan), "precision": "fp64", "accumulate": accumulate}), log_every=1)
    return run_job(job, options, None)["losses"]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_jobs_penalty_is_that_of_one_device(accumulate: int, pool: Any) -> None:
    want = job_with_penalty(accumulate, Plan())
    for got in pool(2).run(job_with_penalty, accumulate, PLANS["shard"]):
        same(got, want)
