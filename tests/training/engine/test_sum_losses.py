"""A loss that is a sum over samples, on any number of devices, in scripts and jobs; and one that is taken for a mean.

Of training/autograd/loss_graph.py and spec/reductions.py too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.autograd.loss_graph import summed_loss, uneven_mean
from meshwise.training.engine.weighing import check_reduction
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import default_engine, end_sessions

F = nn.functional
ROW = torch.arange(4)
W, B = torch.randn(3, 3, requires_grad=True), torch.randn(3, requires_grad=True)
TARGETS, CLASSES = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
ROWS = F.linear(TARGETS, W, B)
CONVOLVED = F.conv2d(torch.rand(2, 3, 4, 4), torch.randn(3, 3, 1, 1, requires_grad=True))
LSTM = torch.nn.LSTM(3, 3)(TARGETS[:, None])[0] @ W
EACH = F.cross_entropy(ROWS, CLASSES, reduction="none")
SUMS = {
    "cross entropy": F.cross_entropy(ROWS, CLASSES, reduction="sum"),
    "of pixels": F.cross_entropy(CONVOLVED, torch.zeros(2, 4, 4).long(), reduction="sum"),
    "squares": F.mse_loss(ROWS, TARGETS, reduction="sum"),
    "absolute": F.l1_loss(ROWS, TARGETS, reduction="sum"),
    "binary": F.binary_cross_entropy_with_logits(ROWS, TARGETS, reduction="sum"),
    "an autoencoder's": F.binary_cross_entropy(ROWS.sigmoid(), TARGETS, reduction="sum")
    - 0.5 * (1 + ROWS - ROWS.exp()).sum(),
    "each, then summed": EACH.sum(),
    "tokens, then summed": EACH.view(2, 2).sum(),
    "pixels, then summed twice": F.mse_loss(CONVOLVED, torch.rand(2, 3, 4, 4), reduction="none").sum((1, 2, 3)).sum(),
    "squares by hand": ((ROWS - TARGETS) ** 2).sum(),
    "absolute by hand": (TARGETS - ROWS.relu()).abs().sum(),
    "likelihood by hand": -F.log_softmax(ROWS, 1)[torch.arange(4), CLASSES].sum(),
    "gathered likelihood": -F.log_softmax(ROWS, 1).gather(1, CLASSES[:, None]).sum(),
    "of a recurrent net": ((LSTM - TARGETS[:, None]) ** 2).sum(),
    "masked": (EACH * (CLASSES > 0)).sum(),
    "with rewards of one": -(F.log_softmax(ROWS, 1)[ROW, CLASSES] * torch.tensor([1.0, -1, 0, 1])).sum(),
    "chosen rows": EACH[CLASSES > 0].sum(),
    "beside a mean": F.cross_entropy(ROWS, CLASSES) + (ROWS - TARGETS).pow(2).sum(),
}  # fmt: skip
NO_SUMS = {
    "a softmax over samples": (ROWS - ROWS.logsumexp(0)).sum(),
    "a mean": F.cross_entropy(ROWS, CLASSES),
    "a sum that is divided": F.cross_entropy(ROWS, CLASSES, reduction="sum") / 4,
    "a mean of sums": F.mse_loss(ROWS, TARGETS, reduction="none").sum(1).mean(),
    "two means": F.cross_entropy(ROWS, CLASSES) + 0.1 * F.mse_loss(ROWS, TARGETS),
    "a sum of means": torch.stack([F.cross_entropy(ROWS, CLASSES), ROWS.mean()]).sum(),
    "a leaf": W,
    "each, summed and divided": EACH.sum() / len(EACH),
    "each divided, then summed": (EACH / 4).sum(),
    "summed over classes, then a mean": ((ROWS - TARGETS) ** 2).sum(dim=1).mean(),
    "a mean of samples, then summed": ((ROWS - TARGETS) ** 2).mean(0).sum(),
    "masked, divided by a count": (EACH * (CLASSES > 0)).sum() / (CLASSES > 0).sum(),
    "weights that add up to one": (EACH * torch.full((4,), 0.25)).sum(),
    "attention": (ROWS.softmax(0) * ROWS).sum(),
    "means of devices": F.cross_entropy(ROWS, CLASSES).unsqueeze(0).sum(),
    "correlations": (ROWS.T @ ROWS - torch.eye(3)).pow(2).sum(),
    "a penalty": F.cross_entropy(ROWS, CLASSES) + W.pow(2).sum(),
    "a penalty of a distance": F.cross_entropy(ROWS, CLASSES) + F.mse_loss(W, torch.zeros(3, 3), reduction="sum"),
    "a penalty of absolutes": F.cross_entropy(ROWS, CLASSES) + (W - torch.eye(3)).abs().sum(),
    "an orthogonality penalty": F.cross_entropy(ROWS, CLASSES) + (W @ W.T - torch.eye(3)).pow(2).sum(),
}


def test_the_graph_tells_a_sum_from_a_mean() -> None:
    assert [name for name, loss in SUMS.items() if not summed_loss(loss)] == []
    assert [name for name, loss in NO_SUMS.items() if summed_loss(loss)] == []


HALF = torch.tensor([0, 1, -100, -100])
MASK = torch.tensor([1.0, 0, 1, 1])
UNEVEN = {
    "class_weights[y].sum()": F.cross_entropy(ROWS, CLASSES, torch.tensor([1.0, 2, 3]), label_smoothing=0.1),
    "(y != -100).sum()": F.cross_entropy(ROWS, HALF) / 2,
    "…": (F.cross_entropy(ROWS, CLASSES, reduction="none") * MASK).sum() / MASK.sum(),
}
PICKED = (
    (ROWS.square().sum(1) * 2)[MASK.bool()].mean(),
    F.mse_loss(ROWS[MASK.bool()], TARGETS[MASK.bool()]),
    ROWS.masked_select(torch.arange(12).view(4, 3) < 7).abs().mean() / 2,
)
EVEN = {
    "the label of each": -F.log_softmax(ROWS, 1)[torch.arange(4), CLASSES].mean(),
    "some parameters": W.view(-1)[[0, 1, 2]].mean(),
    "a mean": F.cross_entropy(ROWS, CLASSES),
    "equal weights": F.cross_entropy(ROWS, CLASSES, torch.ones(3)),
    "of two targets a sample": F.cross_entropy(ROWS.repeat(2, 1), CLASSES.repeat(2)) + ROWS.square().mean(),
    "a sum over the samples": F.cross_entropy(ROWS, CLASSES, reduction="none").sum() / 4,
    "a root": ROWS.square().sum() / ROWS.norm(),
}


def test_the_graph_tells_a_mean_over_something_else_than_samples() -> None:
    assert {weight: uneven_mean(loss, 4) for weight, loss in UNEVEN.items()} == {weight: weight for weight in UNEVEN}
    assert [uneven_mean(loss, 4) for loss in PICKED] == ["…"] * 3, "of samples that are picked by their numbers"
    assert [name for name, loss in EVEN.items() if uneven_mean(loss, 4)] == []
    said = check_reduction(UNEVEN["…"], None, 2, "train.py:3", "mw.backward(loss, ", 4)
    assert said.startswith("train.py:3: this loss is not a mean over samples") and "mw.backward(loss, weight=…)" in said
    assert check_reduction(EVEN["a mean"], None, 2, "", "", 4) == ""


def test_a_weight_counts_the_targets() -> None:
    rows, words = torch.randn(11, 3, requires_grad=True), torch.arange(11) % 3
    assert uneven_mean(F.cross_entropy(rows, words), 4) == "y.numel()"
    words = torch.where(words == 1, -100, words)
    assert uneven_mean(F.cross_entropy(rows, words), 4) == "(y != -100).sum()"


def test_a_job_is_told_what_to_return_beside_its_loss() -> None:
    loss = UNEVEN["(y != -100).sum()"]
    said = check_reduction(loss, None, 2, "the loss of job 'x'", "Job(…, ", 4)
    assert said.startswith("the loss of job 'x': this loss") and "return loss, (y != -100).sum()" in said
    assert check_reduction((loss, 3), None, 2, "", "", 4) == "", "it has a weight"


def samples(count: int = 11) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def trained(batch_size: int, form: str, plan: mw.Plan | None = None) -> Any:
    torch.manual_seed(0)
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled="scaled" in form)
    model, optimizer, loader = mw.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        DataLoader(samples(), batch_size=batch_size),
        plan=plan,
        view="rank",
    )
    losses = []
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        kept = "accumulated" in form and number % 2 == 0
        with mw.accumulate() if kept else torch.enable_grad():
            losses.append(float(mw.backward(scaler.scale(loss), reduction="sum")))
        if not kept:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses, [mw.sum(p.detach()) if plan is None else p.detach() for p in model.parameters()]


def alone(batch_size: int, form: str) -> Any:
    """The same loop in plain torch."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for number, (x, y) in enumerate(DataLoader(samples(), batch_size=batch_size)):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        losses.append(loss.item())
        if not ("accumulated" in form and number % 2 == 0):
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_and_loss_of_a_sum_are_those_of_plain_torch(ranks: int, pool: Any) -> None:
    for size, form in ((5, ""), (4, "scaled"), (4, "accumulated"), (10, "")):  # the last leaves 1 sample for all
        want = alone(size, form)
        end_sessions()
        results = [trained(size, form)] if ranks == 1 else pool(ranks).run(trained, size, form, mw.Plan(data=ranks))
        for got in results:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_sum_under_shard(pool: Any) -> None:
    def case() -> Any:
        return trained(5, "", mw.Plan(shard=2))[0]

    for got in pool(2).run(case):
        assert got == pytest.approx(alone(5, "")[0], rel=1e-10)


def test_a_known_sum_of_which_nothing_is_said_is_refused_with_its_line(pool: Any) -> None:
    def case(said: Any, by_hand: bool) -> Any:
        model, loader = mw.distribute(net(), DataLoader(samples(), batch_size=4), view="rank")
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="none" if by_hand else "sum")
            loss = loss.sum() if by_hand else loss
            try:
                mw.backward(loss, reduction=said)
            except UsageError as error:
                return str(error)
        return default_engine().notes

    for by_hand, what in ((False, ", reduction='sum'"), (True, " of each sample, then .sum()")):
        for text in pool(2).run(case, None, by_hand):
            assert "test_sum_losses.py:" in text and f"(cross entropy{what})" in text
            assert "divided by 2. Write mw.backward(loss, reduction='sum'), or reduction='mean'" in text
    assert pool(2).run(case, "mean", False) == pool(2).run(case, "sum", True) == [[], []]
    assert case(None, True) == [], "on one device it is what it is"


def test_a_sum_has_no_weight_and_reductions_are_two() -> None:
    with pytest.raises(UsageError, match="weight= works only for a mean, but this loss is a sum over samples"):
        mw.backward(ROWS.sum(), 3, "sum")
    with pytest.raises(UsageError, match="'total' is not known"):
        mw.backward(ROWS.sum(), reduction="total")  # type: ignore[arg-type]


def sum_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def job() -> mw.Job:
    data = samples().tensors
    return mw.Job(
        model=net, loss=sum_loss, optimizer=lambda ps: torch.optim.SGD(ps, 0.01), data=lambda: data,
        test=lambda: data, batch_size=4, reduction="sum", name="sums",
    )  # fmt: skip


def ran(devices: int, accumulate: int) -> Any:
    plan = mw.Plan(data=devices, accumulate=accumulate, precision="fp64")
    found = run_job(job(), RunOptions(plan=plan), folder=None)
    return found["losses"], found["metrics"]["loss"]


def test_a_job_whose_loss_is_a_sum(pool: Any) -> None:
    losses, test_loss = ran(1, 1)
    assert losses[0] > 1.5, "of 4 samples"
    for devices, accumulate in ((1, 2), (2, 1), (2, 2)):
        results = [ran(1, accumulate)] if devices == 1 else pool(devices).run(ran, devices, accumulate)
        for got in results:
            assert got[0] == pytest.approx(losses, rel=1e-10) and got[1] == pytest.approx(test_loss, rel=1e-10)


def test_a_job_whose_sum_is_not_said_is_refused(pool: Any) -> None:
    def case(reduction: Any) -> str:
        unsaid = mw.Job(**{**vars(job()), "reduction": reduction})
        try:
            run_job(unsaid, RunOptions(plan=mw.Plan(data=2)), folder=None)
        except UsageError as error:
            return str(error)
        return ""

    for text in pool(2).run(case, None):
        assert (
            "the loss of job 'sums': this loss is a sum over samples" in text
            and "Write Job(…, reduction='sum')" in text
        )
    assert pool(2).run(case, "mean") == ["", ""]


def test_a_jobs_reduction_is_one_of_two() -> None:
    with pytest.raises(UsageError, match="reduction='total' is not known"):
        mw.Job(**{**vars(job()), "reduction": "total"})


def test_a_graph_that_branches_at_every_step_is_walked_once() -> None:
    """Thirty steps of x + x² have 2³⁰ paths."""
    weight = torch.ones(4, requires_grad=True)
    x = weight * 0.1
    for _ in range(30):
        x = x + x.pow(2)
    assert summed_loss(x.sum()) == "" and uneven_mean(x.sum(), 4) == ""
