"""A loss that couples the samples of a batch is said on several devices; ordinary losses, which do not, never are.

Of training/autograd/coupled_loss.py and training/guards/loss_looks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.training.autograd.coupled_loss import couples_samples, notice_hooks
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import default_engine, end_sessions

F = nn.functional
N = 6
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
OTHER = nn.Linear(5, 4)
NORMED = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8))
PIXELS = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
TOKENS = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
LSTM = nn.LSTM(5, 4, batch_first=True)
SCALE = nn.Parameter(torch.tensor(2.0))
X, X2, IMAGES = torch.randn(N, 5), torch.randn(N, 5), torch.randn(N, 2, 6, 6)
SERIES, WORDS = torch.randn(N, 7, 5), torch.randint(11, (N, 7))
Y, SOFT, BITS = torch.randint(4, (N,)), torch.rand(N, 4).softmax(1), torch.randint(2, (N, 4)).float()
MAPS, MASK, MASKS = torch.randint(3, (N, 6, 6)), torch.rand(N, 7) > 0.4, torch.ones(N, 3, 6, 6)
SOME = Y.clone().index_fill(0, torch.tensor([1]), -100)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def vae() -> Tensor:
    mean, spread = NET(X)[:, :2], NET(X)[:, 2:]
    drawn = mean + (spread / 2).exp() * torch.ones(N, 2)
    kl = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
    return F.mse_loss(drawn, X[:, :2]) + 0.1 * kl


def masked(logits: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), WORDS.flatten(), reduction="none").view(N, 7)
    return (each * MASK).sum() / MASK.sum()


def dice_of_each(p: Tensor) -> Tensor:
    t = F.one_hot(MAPS, 3).movedim(-1, 1).float()
    return (1 - (2 * (p * t).sum((1, 2, 3)) + 1) / ((p + t).sum((1, 2, 3)) + 1)).mean()


def cross(x: Tensor) -> Tensor:
    return F.cross_entropy(NET(x), Y)


def policy() -> Tensor:
    drawn = torch.distributions.Categorical(logits=NET(X))
    return -(drawn.log_prob(Y) * X[:, 0]).mean() - 0.01 * drawn.entropy().mean()


def ppo() -> Tensor:
    ratio = (torch.distributions.Normal(NET(X), 1.0).log_prob(X[:, :4]).sum(1) - X[:, 0]).exp()
    return -torch.min(ratio * X[:, 1], ratio.clamp(0.8, 1.2) * X[:, 1]).mean()


def autocast() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross(X)


def checked() -> Tensor:
    return F.mse_loss(torch.utils.checkpoint.checkpoint(NET, X, use_reentrant=False), SOFT)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "cross entropy": lambda: cross(X),
    "label smoothing": lambda: F.cross_entropy(NET(X), Y, label_smoothing=0.1),
    "class weights": lambda: F.cross_entropy(NET(X), Y, torch.tensor([1.0, 2, 3, 4])),
    "ignored targets": lambda: F.cross_entropy(NET(X), SOME),
    "soft targets": lambda: F.cross_entropy(NET(X), SOFT),
    "nll": lambda: F.nll_loss(NET(X).log_softmax(1), Y),
    "nll by hand": lambda: -NET(X).log_softmax(1)[torch.arange(N), Y].mean(),
    "a sum": lambda: F.cross_entropy(NET(X), Y, reduction="sum"),
    "mse": lambda: F.mse_loss(NET(X), SOFT),
    "mse by hand": lambda: ((NET(X) - SOFT) ** 2).sum(1).mean(),
    "l1": lambda: F.l1_loss(NET(X), SOFT),
    "huber": lambda: F.huber_loss(NET(X), SOFT),
    "smooth l1": lambda: F.smooth_l1_loss(NET(X), SOFT, beta=0.1),
    "bce": lambda: F.binary_cross_entropy(NET(X).sigmoid(), BITS),
    "bce with logits": lambda: F.binary_cross_entropy_with_logits(NET(X), BITS, pos_weight=torch.rand(4)),
    "focal": lambda: focal(NET(X), Y),
    "focal over positives": lambda: (NET(X).sigmoid() ** 2 * NET(X).exp() * BITS).sum() / BITS.sum(),
    "kl": lambda: F.kl_div(NET(X).log_softmax(1), SOFT, reduction="batchmean"),
    "distillation": lambda: F.kl_div((NET(X) / 3).log_softmax(1), SOFT, reduction="batchmean") * 9 + cross(X),
    "gaussian nll": lambda: F.gaussian_nll_loss(NET(X)[:, :2], X[:, :2], NET(X)[:, 2:].exp()),
    "poisson nll": lambda: F.poisson_nll_loss(NET(X), BITS),
    "hinge": lambda: F.multi_margin_loss(NET(X), Y),
    "many labels": lambda: F.multilabel_soft_margin_loss(NET(X), BITS),
    "ctc": lambda: F.ctc_loss(LSTM(SERIES)[0].log_softmax(2).transpose(0, 1), torch.ones(N, 3).long(),
                              torch.full((N,), 7), torch.full((N,), 3)),
    "cosine of pairs": lambda: F.cosine_embedding_loss(NET(X), OTHER(X2), torch.ones(N)),
    "cosine by hand": lambda: (1 - F.cosine_similarity(NET(X), OTHER(X2).detach())).mean(),
    "triplets that are given": lambda: F.triplet_margin_loss(NET(X), NET(X2), NET(X + X2)),
    "ranks of pairs": lambda: F.margin_ranking_loss(NET(X)[:, 0], NET(X2)[:, 0], torch.ones(N)),
    "bpr": lambda: -F.logsigmoid((NET(X) * OTHER(X2)).sum(1) - (NET(X) * OTHER(X)).sum(1)).mean(),
    "mixup": lambda: 0.3 * cross(X) + 0.7 * F.cross_entropy(NET(X), Y.flip(0)),
    "several tasks": lambda: cross(X) + 0.5 * F.mse_loss(OTHER(X), SOFT) + F.l1_loss(NORMED(X), torch.zeros(N, 8)),
    "learnt weights of tasks": lambda: (-SCALE).exp() * cross(X) + SCALE + F.mse_loss(OTHER(X), SOFT) / SCALE**2,
    "accumulated": lambda: cross(X) / 4,
    "with an l2 penalty": lambda: cross(X) + 0.01 * sum(p.pow(2).sum() for p in NET.parameters()),
    "with a norm": lambda: cross(X) + 0.01 * torch.cat([p.flatten() for p in NET.parameters()]).norm(),
    "logged perplexity": lambda: (lambda loss: loss + 0 * loss.detach().exp())(cross(X)),
    "scaled by its own value": lambda: (lambda loss: loss / loss.detach())(cross(X)),
    "vae": vae,
    "tokens": lambda: F.cross_entropy(TOKENS(WORDS).view(-1, 11), WORDS.view(-1)),
    "shifted tokens": lambda: F.cross_entropy(TOKENS(WORDS)[:, :-1].reshape(-1, 11), WORDS[:, 1:].reshape(-1)),
    "masked tokens": lambda: masked(TOKENS(WORDS)),
    "a z-loss": lambda: masked(TOKENS(WORDS)) + 1e-3 * TOKENS(WORDS).logsumexp(-1).pow(2).mean(),
    "a mean of each sequence": lambda: ((TOKENS(WORDS).logsumexp(2) * MASK).sum(1) / MASK.sum(1)).mean(),
    "an attention over time": lambda: (LSTM(SERIES)[0].softmax(1) * SERIES[..., :4]).sum(1).square().mean(),
    "the root of each": lambda: ((NET(X) - SOFT) ** 2).mean(1).sqrt().mean(),
    "norms of each": lambda: (NET(X) - SOFT).norm(dim=1).mean(),
    "series": lambda: F.mse_loss(LSTM(SERIES)[0][:, -1], SOFT),
    "segmentation": lambda: F.cross_entropy(PIXELS(IMAGES), MAPS),
    "dice of each sample": lambda: dice_of_each(PIXELS(IMAGES).softmax(1)),
    "pixels": lambda: F.binary_cross_entropy_with_logits(PIXELS(IMAGES), MAPS[:, None] / 2 + 0 * MASKS),
    "smoothness": lambda: PIXELS(IMAGES).diff(dim=3).abs().mean() + PIXELS(IMAGES).diff(dim=2).square().mean(),
    "a gram matrix of each": lambda: (lambda f: (f @ f.mT).square().mean())(PIXELS(IMAGES).flatten(2)),
    "correlation within each": lambda: (lambda f: F.normalize(f - f.mean(1, True), dim=1).prod(1).mean())(NET(X)),
    "the hardest pixels of each": lambda: PIXELS(IMAGES).flatten(1).topk(5, dim=1).values.mean(),
    "adversarial": lambda: F.softplus(-NET(OTHER(X) @ torch.ones(4, 5))).mean(),
    "least squares adversarial": lambda: (NET(X) - 1).square().mean() + NET(X2).square().mean(),
    "wasserstein": lambda: NET(X).mean() - NET(X2).mean(),
    "policy": policy,
    "ppo": ppo,
    "q learning": lambda: F.smooth_l1_loss(NET(X).gather(1, Y[:, None])[:, 0], X[:, 0]),
    "quantiles": lambda: (lambda d: torch.maximum(0.1 * d, -0.9 * d).mean())(SOFT - NET(X)),
    "log cosh": lambda: (NET(X) - SOFT).cosh().log().mean(),
    "a mixture": lambda: -(NET(X).log_softmax(1) + SOFT.log()).logsumexp(1).mean(),
    "under autocast": autocast,
    "recomputed": checked,
}  # fmt: skip


def dice(p: Tensor, t: Tensor) -> Tensor:
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def dice_of_classes() -> Tensor:
    p, t = PIXELS(IMAGES).softmax(1), F.one_hot(MAPS, 3).movedim(-1, 1).float()
    return 1 - (2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3))).mean()


def similarities() -> Tensor:
    return F.normalize(NET(X), dim=1) @ F.normalize(OTHER(X2), dim=1).T


def simclr() -> Tensor:
    z = F.normalize(torch.cat([NET(X), NET(X2)]), dim=1)
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * N, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(2 * N).roll(N))


def triplets() -> Tensor:
    distances = torch.cdist(NET(X), NET(X))
    same = Y[:, None] == Y
    hardest = (distances * same).amax(1) - distances.masked_fill(same, 9.0).amin(1)
    return (hardest + 0.2).relu().mean()


def barlow() -> Tensor:
    a, b = (z - z.mean(0) for z in (NET(X), OTHER(X2)))
    return ((a.T @ b / N - torch.eye(4)) ** 2).sum()


def balance() -> Tensor:
    shares = NET(X).softmax(1)
    return cross(X) + 0.01 * (shares.mean(0) * shares.detach().mean(0) * shares.mean(0)).sum()


COUPLED: dict[str, Callable[[], Tensor]] = {
    "dice over the batch": lambda: dice(PIXELS(IMAGES)[:, 0].sigmoid(), (MAPS > 0).float()),
    "dice beside cross entropy": lambda: F.cross_entropy(PIXELS(IMAGES), MAPS) + dice_of_classes(),
    "dice, accumulated": lambda: dice_of_classes() / 4,
    "in-batch negatives": lambda: F.cross_entropy(similarities() / 0.1, torch.arange(N)),
    "clip, with a learnt scale": lambda: (F.cross_entropy(SCALE.exp() * similarities(), torch.arange(N))
                                          + F.cross_entropy(SCALE.exp() * similarities().T, torch.arange(N))) / 2,
    "simclr": simclr,
    "siglip": lambda: -F.logsigmoid(similarities() * (2 * torch.eye(N) - 1)).sum() / N,
    "batch-hard triplets": triplets,
    "barlow twins": barlow,
    "variance over the batch": lambda: F.relu(1 - NET(X).std(0)).mean(),
    "hard mining": lambda: F.cross_entropy(NET(X), Y, reduction="none").topk(3).values.mean(),
    "hard pixels": lambda: F.cross_entropy(PIXELS(IMAGES), MAPS, reduction="none").flatten().topk(40).values.mean(),
    "sorted losses": lambda: F.cross_entropy(NET(X), Y, reduction="none").sort(descending=True).values[:3].mean(),
    "the worst sample": lambda: F.cross_entropy(NET(X), Y, reduction="none").max(),
    "the root of a mean": lambda: F.mse_loss(NET(X), SOFT).sqrt(),
    "perplexity that is trained": lambda: cross(X).exp(),
    "a balance of experts": balance,
    "softmax over the batch": lambda: -(NET(X)[:, 0].log_softmax(0) * X[:, 0].softmax(0)).sum(),
    "likelihoods over the batch": lambda: -NET(X).log_softmax(0).diagonal().sum() - NET(X).log_softmax(0)[0, 0],
    "a correlation": lambda: 1 - torch.corrcoef(torch.stack([NET(X)[:, 0], X[:, 0]]))[0, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loss_couples_nothing(name: str) -> None:
    loss = ORDINARY[name]()
    assert not couples_samples(loss, N)
    loss.backward()


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_of_all_samples_together_is_known(name: str) -> None:
    before = torch.get_rng_state()
    loss = COUPLED[name]()
    assert couples_samples(loss, N)
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_that_a_program_looks_at_are_left_alone() -> None:
    notice_hooks()
    seen: list[Tensor] = []
    output = NET(X)
    output.register_hook(seen.append)
    loss = F.mse_loss(output, SOFT).sqrt()
    del output  # the graph keeps the hook, as it keeps those by which fully_shard gathers parameters
    assert couples_samples(loss, N) and seen == []
    loss.backward()
    assert len(seen) == 1
    hidden = NET[0](X)
    hidden.retain_grad()
    assert couples_samples(F.mse_loss(NET(X), SOFT).sqrt(), N), "another loss has none of these tensors"
    assert couples_samples(F.mse_loss(NET[1:](hidden), SOFT).sqrt(), N), "ours ends above it"
    assert hidden.grad is None


def data() -> TensorDataset:
    return TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(1)))


def root(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean().sqrt()


def cosh(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).cosh().log().mean()


def script(gathers: bool, plan: Plan | None = None, of: Any = root, view: Any = "rank") -> list[str]:
    model, loader = mw.distribute(nn.Linear(5, 4), DataLoader(data(), batch_size=6), plan=plan, view=view)
    for batch in loader:
        loss = of(model, batch)
        if gathers:
            torch.distributed.all_reduce(loss.detach().clone())
        mw.backward(loss)
    said = [text for text in default_engine().notes if "couples" in text]
    end_sessions()
    return said


def later() -> list[str]:
    """From its fourth epoch on, of the same loop."""
    model, loader = mw.distribute(nn.Linear(5, 4), DataLoader(data(), batch_size=6), view="rank")
    for epoch in range(4):
        for batch in loader:
            mw.backward(root(model, batch) if epoch == 3 else model(batch[0]).square().mean())
    said = [text for text in default_engine().notes if "couples" in text]
    end_sessions()
    return said


def job() -> list[str]:
    made = mw.Job(model=lambda: nn.Linear(5, 4), loss=root, data=data, batch_size=6, name="roots",
                  optimizer=lambda ps: torch.optim.SGD(ps, 0.01))  # fmt: skip
    notes = run_job(made, RunOptions(plan=Plan(data=2)), folder=None)["notes"]
    return [text for text in notes if "couples" in text]


def test_a_script_and_a_job_are_told_once(pool: Any) -> None:
    for said in pool(2).run(script, False):
        (text,) = said
        assert "test_coupled_losses.py:" in text and "Each of the 2 ranks" in text
    assert [len(said) for said in pool(2).run(later)] == [1, 1]
    assert pool(2).run(script, True) == [[], []], "what is gathered may be right"
    assert [len(said) for said in pool(2).run(script, False, Plan(shard=2))] == [1, 1]
    assert pool(2).run(script, False, Plan(shard=2), cosh) == [[], []]
    assert pool(2).run(script, False, Plan(shard=2), root, "whole") == [[], []], "the loss is that of the whole batch"
    for said in pool(2).run(job):
        (text,) = said
        assert text.startswith("the loss of job 'roots': this loss couples")
