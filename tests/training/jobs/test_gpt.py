"""The gpt job's model against naive references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwise.spec.errors import DataError, UsageError
from meshwise.training.jobs.gpt import IGNORED, SIZES, Attention, Gpt, gpt, rotary_turns, rotate, token_loss

TINY = SIZES["tiny"]


def tokens(documents: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 256, (documents, length))


@pytest.mark.parametrize(("name", "parameters"), [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496)])
def test_the_published_sizes_have_their_published_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Gpt(SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, text = Gpt(TINY), tokens()
    before = model(text)
    text[:, 6] = (text[:, 6] + 1) % 256
    after = model(text)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6], after[:, 6])


def test_padding_does_not_count() -> None:
    model, text = Gpt(TINY), tokens(1, 7)
    loss, count = token_loss(model, (text[:, :-1], text[:, 1:]))
    padded = torch.cat([text[:, :-1], torch.zeros(1, 3, dtype=torch.int64)], 1)
    targets = torch.cat([text[:, 1:], torch.full((1, 3), IGNORED)], 1)
    again, same = token_loss(model, (padded, targets))
    assert count == same == 6
    torch.testing.assert_close(loss, again)


def test_attention_is_that_of_a_loop_over_heads_and_positions() -> None:
    layer, x = Attention(TINY).double(), torch.randn(1, 5, TINY.width, dtype=torch.float64)
    width, shared = layer.head_width, TINY.heads // TINY.key_value_heads
    q, k, v = (m(x)[0].unflatten(-1, (-1, width)) for m in (layer.query, layer.key, layer.value))

    def turned(vector: Tensor, position: int) -> Tensor:
        pairs = torch.complex(vector[: width // 2], vector[width // 2 :])
        speed = TINY.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        pairs = pairs * torch.polar(torch.ones_like(speed), speed * position)
        return torch.cat([pairs.real, pairs.imag])

    rows = []
    for t in range(5):
        heads = []
        for h in range(TINY.heads):
            scores = [turned(q[t, h], t) @ turned(k[s, h // shared], s) / width**0.5 for s in range(t + 1)]
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(w * v[s, h // shared] for s, w in enumerate(weights)))
        rows.append(layer.out(torch.cat(heads)))
    got = layer(x, rotary_turns(5, width, TINY.theta, x))
    torch.testing.assert_close(got[0], torch.stack(rows))


def test_rotation_depends_on_the_distance_alone() -> None:
    x = torch.randn(8, dtype=torch.float64).expand(6, 8)
    turned = rotate(x, rotary_turns(6, 8, 100.0, x))
    torch.testing.assert_close(turned[1] @ turned[3], turned[2] @ turned[4])


def test_an_unknown_size_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'tiny'"):
        gpt("tyni")


def test_bfloat16_runs_and_float64_stays_float64() -> None:
    model, text = Gpt(TINY), tokens()
    batch = (text[:, :-1], text[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = token_loss(model, batch)
    full, _ = token_loss(model, batch)
    double, _ = token_loss(model.double(), batch)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double, full.double())
    torch.testing.assert_close(low.float(), full, rtol=0.02, atol=0)


def test_a_missing_folder_is_refused_when_the_data_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing must have at least two text files"):
        gpt(data=tmp_path / "missing").data()


@pytest.mark.usefixtures("takes_seconds")
def test_training_learns_a_text_and_batches_are_the_same_each_time(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat. " * (2 + number % 3))
    job = gpt(data=tmp_path)
    torch.manual_seed(0)
    model, data = job.model(), job.data()
    optimizer, losses = job.optimizer(model.parameters()), []
    for _ in range(12):
        loss, _weight = job.loss(model, data.batch(torch.arange(16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(map(torch.equal, data.batch(torch.arange(4)), gpt(data=tmp_path).data().batch(torch.arange(4))))
