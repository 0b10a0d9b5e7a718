"""Constructors that bypass torch's dispatch, and pickles of models, hold what one device has: splits/constructors.py."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.nn import functional as F

from tests.whole.running import apart, run, whole
from tests.whole.shared import Distribute, step, usual, weights


def constructors(distribute: Distribute) -> Any:
    """Copies batches, and sums over their rows, in all ways that torch's dispatch does not see."""
    model, optimizer, loader = usual(distribute)
    left = []
    for x, y in loader:
        held = torch.zeros(len(x), x.shape[1])
        held.data = x
        taken = torch.zeros(0).set_(x * 1.0)
        center = torch.nn.Parameter(torch.zeros(x.shape[1]))
        center.data = x.mean(0)
        copies = [Variable(x), torch.Tensor(x), x.new(x), torch.zeros(1).new_tensor(x), held, taken, center]
        left.append([(list(each.shape), each.sum().item()) for each in copies])
        left.append(step(F.cross_entropy(model(Variable(x)), Variable(y)), optimizer))
    return left, weights(model)


def saved_models(distribute: Distribute) -> Any:
    """Saves its model whole, and trains on with a copy beside it."""
    model, optimizer, loader = usual(distribute)
    other, left = copy.deepcopy(model), []
    for x, y in loader:
        left.append((step(F.cross_entropy(model(x), y), optimizer), other(x).sum().item()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))
    extra = sorted(set(vars(loaded[0])) - set(vars(torch.nn.Module())) - {"0", "1"})
    return left, extra, [each(torch.ones(2, x.shape[1])).sum().item() for each in (*loaded, model)]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_constructors_hold_the_whole_batch(pool: Any) -> None:
    for got in pool(2).run(whole, constructors):
        far, at = apart(got, run(constructors))
        assert far <= 1e-9, at


def test_a_model_is_saved_whole_without_what_divides_its_calls(pool: Any) -> None:
    for got in pool(2).run(whole, saved_models):
        far, at = apart(got, run(saved_models))
        assert far <= 1e-9, at
