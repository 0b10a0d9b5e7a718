"""The pieces of a check, each alone: casts to float64, keyed draws, sketches, what is compared and what is left out.

Of checker/upcast.py and checker/noise.py too.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.checker.causes import CauseKind
from meshwise.checker.compare import compare
from meshwise.checker.difference import LIMIT
from meshwise.checker.noise import noise_of
from meshwise.checker.one_device import one_device
from meshwise.checker.proof import prove
from meshwise.checker.sketches import sketches
from meshwise.checker.trace import Batches, CheckSpec, microbatches
from meshwise.checker.upcast import called_in_float64, upcast
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.data.keyed import KeyedDraws, Rows, by_reference, keyed_normal, keyed_uniform, on_one_device
from meshwise.training.data.order import epoch_order
from tests.checker.jobs_to_check import job_of, layers, plain


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.zeros(3, dtype=torch.float32),
        lambda x: torch.ones(3),
        lambda x: torch.arange(3, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type_as(torch.empty(1, dtype=torch.float32)),
        lambda x: torch.tensor([0.5, 0.25], dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x.bfloat16(), -1),
    ],
)
def test_casts_give_float64(cast: Any) -> None:
    x = torch.rand(3, dtype=torch.float64)
    assert cast(x).dtype in (torch.float32, torch.float16, torch.bfloat16), "this is a cast"
    with upcast():
        assert cast(x).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.complex64),
        lambda x: x.cfloat(),
        lambda x: torch.zeros(3, dtype=torch.complex64),
        lambda x: torch.tensor([1j, 0.5], dtype=torch.complex64),
        lambda x: torch.complex(x.float(), x.float()),
        lambda x: torch.polar(torch.ones(3), torch.ones(3)),
        lambda x: torch.fft.fft(x.float()),
    ],
)
def test_complex_casts_give_complex128(cast: Any) -> None:
    x = torch.rand(3, dtype=torch.float64)
    assert cast(x).dtype == torch.complex64, "this is a cast"
    with upcast():
        assert cast(x).dtype == torch.complex128


def test_a_file_of_float32_is_loaded_as_it_is_and_read_as_float64(tmp_path: Path) -> None:
    held = {"weight": torch.rand(3), "half": torch.rand(2).half()}
    torch.save(held, tmp_path / "state.pt")
    with upcast():
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert (loaded["weight"] * 1).dtype == torch.float64
    assert all(torch.equal(loaded[name], tensor) for name, tensor in held.items())


def test_complex_random_numbers_are_those_of_complex64() -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(3)
        one = torch.randn(5, dtype=torch.complex64)
        return [one, torch.randn_like(one), torch.empty(5, dtype=torch.complex64).normal_()]

    with torch.random.fork_rng():
        wanted = drawn()
        with upcast():
            got = drawn()
    for one, other in zip(wanted, got, strict=True):
        assert other.dtype == torch.complex128 and torch.equal(one.to(torch.complex128), other)


def test_random_numbers_are_those_of_float32() -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(3)
        filled = [torch.empty(50).uniform_(-1, 2), torch.empty(50).normal_(1, 2)]
        return [*filled, torch.rand(50), torch.randn(5, 10), torch.rand_like(filled[0]), nn.Linear(7, 5).weight]

    with torch.random.fork_rng():
        wanted = drawn()
        with upcast():
            got = drawn()
    for one, other in zip(wanted, got, strict=True):
        assert other.dtype == torch.float64 and torch.equal(one.double(), other)


def test_what_is_not_a_cast_stays() -> None:
    with upcast():
        assert torch.zeros(3, dtype=torch.int64).dtype == torch.int64
        assert torch.rand(4, dtype=torch.float64).view(torch.int64).dtype == torch.int64
        assert torch.zeros(2).bool().dtype == torch.bool


def test_casts_in_a_backward_give_float64_too() -> None:
    """What is recomputed casts again, in the backward."""
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def cube(x: Tensor) -> Tensor:
        return (x.float() ** 3).sum() + torch.zeros(2, dtype=torch.float32).sum()

    with upcast():
        y = checkpoint(cube, x, use_reentrant=False)
    with upcast():
        y.backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2, rtol=1e-15, atol=0)


def test_what_was_made_before_in_float32_is_read_in_float64() -> None:
    """From a file, or an array of numpy."""
    table, seen, array = torch.rand(5, 2), torch.zeros(3, 2), torch.rand(6, 4)
    x = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    with upcast():
        given = F.embedding(torch.tensor([4, 1, 0]), table).sin()
        seen[torch.tensor([0, 2])] = given[:2].detach()
        (x @ array.T + given.sum()).sum().backward()
    torch.testing.assert_close(given, table.double()[[4, 1, 0]].sin(), rtol=1e-15, atol=0)
    assert given.dtype == torch.float64 and seen.dtype == torch.float32
    assert torch.equal(seen[2], given[1].detach().float())
    torch.testing.assert_close(x.grad, array.double().sum(0).expand(6, 4), rtol=1e-15, atol=0)


def test_a_job_may_have_a_teacher_that_was_made_at_import() -> None:
    layers = [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3)]
    teacher, offset = nn.Sequential(*layers, nn.Unflatten(1, (3, 1)), nn.LSTM(1, 1)), np.float32([0.1, 0.2, 0.3])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        taught, _ = teacher(batch[0])
        return F.mse_loss(model(batch[0]), taught.squeeze(2) + torch.from_numpy(offset))

    found = one_device(replace(plain(), loss=loss, test=None), CheckSpec(Plan(data=2), 1))
    with called_in_float64(), upcast():
        batch = plain().data()[0][: plain().batch_size]
        assert teacher(batch.double())[0].dtype == torch.float64
    assert found.steps[0].loss > 0
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}, "the teacher is as it was"


@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [((8, 16), (3, 16, 4), 8), ((4, 16), (16, 8), 16), ((3, 8, 16), (16, 8), 8), ((3, 8, 16), (3, 16, 4), 0)],
)
def test_a_grouped_product_has_a_float64_path(left: Any, right: Any, ends: int) -> None:
    """Mixtures of experts in transformers multiply so, and torch has it in float32 and below alone."""
    offs = torch.tensor([ends // 4, ends // 4, ends], dtype=torch.int32) if ends else None

    def product(dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        a, b = (torch.rand(size, generator=generator).to(dtype).requires_grad_() for size in (left, right))
        made = F.grouped_mm(a, b, offs=offs)
        (made * made).sum().backward()
        return [made, *(t.grad for t in (a, b) if t.grad is not None)]

    wanted = product(torch.float32)
    with pytest.raises(RuntimeError, match="Double"):
        product(torch.float64)
    with upcast():
        got = product(torch.float64)
    assert len(got) == 3 and all(t.dtype == torch.float64 for t in got)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_loss_scaler_works_in_float64() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.5)
    with upcast():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((p * p).sum() / 3).backward()
        scaler.unscale_(optimizer)
        assert torch.equal(torch.stack([p.grad]), torch.full((1, 3), 2 / 3, dtype=torch.float64))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale((p * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(p.detach(), torch.full((3,), 1 - 0.5 * 2 / 3, dtype=torch.float64))
    assert scaler.get_scale() == 4.0, "a step that overflows is left out, and the scale halved"


def test_keyed_numbers_are_uniform_and_normal() -> None:
    cpu = torch.device("cpu")
    u, n = keyed_uniform(5, (100_000,), cpu), keyed_normal(6, (100_000,), cpu)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert torch.histc(u, 20, 0, 1).sub(5000).abs().max() < 400
    assert abs(float(n.mean())) < 0.02 and abs(float(n.std()) - 1) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.02
    assert not torch.equal(u, keyed_uniform(6, (100_000,), cpu))
    assert torch.equal(u[:10], keyed_uniform(5, (10,), cpu))  # of the index alone


class Draws(nn.Module):
    """Every kind of draw; (batch, 5, 8) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(F.dropout(x, 0.3))[0]  # inside the LSTM the batch is the second dim
        x = F.alpha_dropout(x, 0.2, True) + F.dropout1d(x, 0.3)
        x = x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)
        x = x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.rand_like(x) + torch.randn_like(x)
        x = x + torch.randn(len(x), 1, 1, dtype=x.dtype) + torch.rand(5, 8, dtype=x.dtype)
        x = x + torch.empty_like(x).uniform_(-1, 2) + torch.empty_like(x).normal_(1, 2)
        x = x + torch.randint(3, 90, (len(x), 1, 1)) + torch.randint_like(x, 7) + torch.empty_like(x).random_(2, 5)
        x = x + torch.normal(0.0, 1.0, (len(x), 5, 1)) + torch.normal(x, 0.1) + torch.empty_like(x).exponential_()
        x = x + torch.multinomial(torch.ones(9), len(x), replacement=True).view(-1, 1, 1)
        x = x + torch.multinomial(torch.rand(len(x), 8), 3).sum(1).view(-1, 1, 1)
        x = x if torch.rand([], dtype=x.dtype) < 2 else 0 * x  # one number, as layerdrop draws it
        return x[:, torch.randperm(5)] * torch.distributions.Beta(2.0, 3.0).sample()


@pytest.mark.parametrize("cut", [(0, 2, 6), (0, 1, 5, 6), (0, 3, 6)])
def test_ranks_draw_the_rows_of_one_device(cut: tuple[int, ...]) -> None:
    model, x = Draws().double(), torch.randn(6, 5, 8, dtype=torch.float64)
    one = KeyedDraws((0, 1, 2), Rows(0, 6, 6, 6), on_one_device)
    with one.forward():
        wanted = model(x)
    for first, stop in pairwise(cut):
        rows = Rows(first, stop - first, 6, stop - first)
        own = KeyedDraws((0, 1, 2), rows, by_reference(one.log, rows))
        with own.forward():
            torch.testing.assert_close(model(x[first:stop]), wanted[first:stop], rtol=1e-12, atol=1e-12)
        assert not own.unkeyed


def test_other_keys_draw_other_numbers() -> None:
    def draw(*key: int) -> Tensor:
        with KeyedDraws(key, Rows(0, 4, 4, 4), on_one_device).forward():  # type: ignore[arg-type]
            return torch.stack([torch.rand(4), torch.rand(4)])

    first = draw(0, 0, 0)
    assert torch.equal(first, draw(0, 0, 0)) and not torch.equal(first[0], first[1])
    assert all(not torch.equal(first, draw(*key)) for key in [(1, 0, 0), (0, 1, 0), (0, 0, 1)])


def test_keyed_draws_are_of_their_distribution() -> None:
    count = 20_000
    chances = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).expand(count, 4)
    with KeyedDraws((0, 0, 0), Rows(0, count, count, count), on_one_device).forward():
        whole, waits = torch.randint(-3, 4, (count,)), torch.empty(count).exponential_(2.0)
        picked = torch.multinomial(torch.tensor([0.1, 0.0, 0.6, 0.3]), count, replacement=True)
        pairs = torch.multinomial(chances, 2)
    assert whole.dtype == torch.int64 and torch.histc(whole.float(), 7).min() > 2600
    assert abs(float(waits.mean()) - 0.5) < 0.02 and float(waits.min()) >= 0
    for drawn in (picked, pairs[:, 0]):
        torch.testing.assert_close(drawn.bincount(minlength=4) / count, chances[0], rtol=0, atol=0.02)
    assert bool((pairs[:, 0] != pairs[:, 1]).all()) and not bool((pairs == 1).any())


def test_a_draw_that_cannot_be_keyed_is_reported() -> None:
    draws = KeyedDraws((0, 0, 0), Rows(0, 4, 4, 4), on_one_device)
    with draws.forward():
        torch.rand(3, generator=torch.Generator().manual_seed(1))
        torch.randperm(4)
    assert draws.unkeyed == {"rand from a generator of the program's own"}
    half = Rows(0, 2, 4, 2)
    own = KeyedDraws((0, 0, 0), half, by_reference(draws.log, half))
    with own.forward():
        torch.randperm(2)
    assert own.unkeyed == {"randperm of shape (2,)"}
    other = KeyedDraws((0, 0, 0), half, by_reference([], half))
    with other.forward():
        torch.rand(2, 3)
    assert other.unkeyed == {"rand of shape (2, 3)"}


def test_sketches_differ_as_much_as_their_rows() -> None:
    x = torch.randn(4, 7000, dtype=torch.float64)
    y = x.clone()
    y[2] += 1e-6 * torch.randn(7000, dtype=torch.float64)
    apart = (sketches(x, 4)["0"] - sketches(y, 4)["0"]).norm(dim=1)
    assert apart[[0, 1, 3]].max() == 0
    assert 0.5 < float(apart[2] / (x - y)[2].norm()) < 2


def test_the_last_step_is_ragged_and_of_another_epoch() -> None:
    def batches(samples: int, spec: CheckSpec) -> list[tuple[int, list[int]]]:
        return [(epoch, batch.tolist()) for epoch, batch in Batches(5, samples, 16, spec).of(spec.steps)]

    order, another = (epoch_order(5, epoch, 100).tolist() for epoch in (0, 1))
    assert batches(100, CheckSpec(Plan(data=3))) == [(0, order[:16]), (0, order[16:32]), (1, another[:7])]
    first, second, third = (epoch_order(5, epoch, 20).tolist() for epoch in (0, 1, 2))
    assert batches(20, CheckSpec(Plan(data=2), steps=4)) == [
        (0, first[:16]),
        (0, first[16:]),
        (1, second[:16]),
        (2, third[:5]),
    ]
    shares = microbatches(torch.arange(7), 2)
    assert [(share.indices.tolist(), share.total) for share in shares] == [([0, 1, 2, 3], 7), ([4, 5, 6], 7)]
    assert len(microbatches(torch.arange(2), 3)) == 2


def test_one_device_is_a_plain_loop() -> None:
    """The reference against a loop written here, and the caller's random numbers stay as they were."""
    before = torch.get_rng_state()
    side = one_device(plain(), CheckSpec(Plan(), steps=2))
    assert torch.equal(torch.get_rng_state(), before)
    job = plain()
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = job.model().double()
    optimizer = job.optimizer(model.parameters())
    inputs, labels = job.data()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:8]
    loss = F.cross_entropy(model(inputs[order].double()), labels[order])
    loss.backward()
    assert abs(loss.item() - side.steps[0].loss) < 1e-15
    for name, p in model.named_parameters():
        torch.testing.assert_close(side.steps[0].gradients[name], p.grad, rtol=1e-13, atol=1e-16)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(side.steps[0].parameters[name], p.detach(), rtol=1e-12, atol=1e-15)
    assert side.steps[0].ready_order[0].startswith("4.") and side.steps[0].ready_order[-1].startswith("0.")


def test_the_smallest_fault_is_seen_and_rounding_is_not() -> None:
    job = job_of(layers)
    one, other = one_device(job, CheckSpec(Plan(), steps=1)), one_device(job, CheckSpec(Plan(), steps=1))
    assert compare(one, other).equal
    gradient = other.steps[0].gradients["2.weight"]
    gradient[0, 0] += 0.5 * LIMIT * gradient.abs().max()
    assert compare(one, other).equal
    gradient[0, 0] += 1.5 * LIMIT * gradient.abs().max()
    first = compare(one, other).first
    assert first is not None and (first.kind, first.name) == ("gradients", "2.weight")
    assert 1e-9 < first.relative < 3e-9


def test_what_is_not_a_number_is_a_fault() -> None:
    job = job_of(layers)
    one, other = one_device(job, CheckSpec(Plan(), steps=1)), one_device(job, CheckSpec(Plan(), steps=1))
    other.steps[0].parameters["2.bias"][1] = float("nan")
    first = compare(one, other).first
    assert first is not None and (first.kind, first.name) == ("parameters", "2.bias")


def test_what_is_not_finite_on_both_sides_is_equal_and_hides_nothing() -> None:
    job = job_of(layers)
    one, other = one_device(job, CheckSpec(Plan(), steps=1)), one_device(job, CheckSpec(Plan(), steps=1))
    for side in (one, other):
        step = side.steps[0]
        step.loss = step.learning_rates["group 0"] = math.nan
        step.gradients["2.bias"][1] = step.parameters["2.bias"][1] = math.nan
        step.buffers["seen.min_val"] = torch.tensor([math.inf, 1.0], dtype=torch.float64)
        step.buffers["seen.max_val"] = torch.tensor(-math.inf, dtype=torch.float64)
        rows = next(output for output in step.outputs if output.module == "2").sketches
        rows["0"][1], rows["whole"][0, 0] = math.nan, math.inf
        rows["0"][2] *= 1 + (side is other) * 1e-14
    assert compare(one, other).equal
    for change in ("gradients", "parameters"):
        value = getattr(other.steps[0], change)["2.bias"]
        value[0] *= 1 + 1e-6
        first = compare(one, other).first
        assert first is not None and first.name == "2.bias" and first.relative < 1e-5
        value[0] /= 1 + 1e-6
    other.steps[0].buffers["seen.min_val"][1] += 1e-6
    first = compare(one, other).first
    assert first is not None and first.name == "seen.min_val" and 0.9e-6 < first.relative < 1.1e-6
    other.steps[0].buffers["seen.min_val"][0] = -math.inf
    first = compare(one, other).first
    assert first is not None and math.isinf(first.relative)


def test_every_cause_says_what_it_means() -> None:
    assert all(text and not text.endswith(".") for text in (kind.meaning for kind in CauseKind))


def test_a_model_that_memory_does_not_hold_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.checker.one_device.free_bytes", lambda device: 45_000)
    with pytest.raises(
        UsageError, match=r"about 58.1 KiB for this model of 1.2 KiB, but only 43.9 KiB are free. Use --steps 2"
    ):
        one_device(plain(), CheckSpec(Plan(), 3))
    one_device(plain(), CheckSpec(Plan(), 2))


def test_a_module_that_was_made_before_can_be_copied_under_upcast() -> None:
    # as an average of weights is made: timm's ModelEmaV3
    norm = nn.BatchNorm1d(3)
    with upcast():
        copied = copy.deepcopy(norm)
    torch.testing.assert_close(copied.running_var, norm.running_var, check_dtype=False)


def test_what_follows_from_noise_is_compared_with_one_device_that_has_the_same_noise() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))

    job = job_of(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    spec = CheckSpec(Plan(), steps=3)
    one = one_device(job, spec)
    noise = [{name: (mask, p + 1) for name, (mask, p) in step.items()} for step in noise_of(one, one)]
    assert {name for step in noise for name in step} == {"0.bias", "1.bias"}
    other = one_device(job, replace(spec, noise=noise))  # as if rounding had moved them elsewhere
    assert not prove("", spec, "", one, other).equal
    proof = prove("", spec, "", one, other, (), lambda again: one_device(job, again))
    assert proof.equal and max(kind.largest.relative for kind in proof.comparison.kinds) < 1e-11
    other.steps[2].buffers["3.running_mean"] *= 1 + 1e-6
    first = prove("", spec, "", one, other, (), lambda again: one_device(job, again)).comparison.first
    assert first is not None and (first.kind, first.step, first.name) == ("buffers", 3, "3.running_mean")
