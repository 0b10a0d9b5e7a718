"""A rehearsal knows the small values that a program looks at, and forgets those that it cannot follow."""

import pytest
import torch

from meshwise.torch_compat.fake import NEEDS_VALUES, FakeTensors
from meshwise.torch_compat.fake_device import fake_device
from meshwise.torch_compat.fake_values import give_value, value_of


@pytest.fixture
def rehearsed():
    with FakeTensors(lambda func, args, kwargs, run: run(), stands_for_real=True):
        yield


def test_numbers_that_a_constructor_makes_are_known(rehearsed):
    rates = [rate.item() for rate in torch.linspace(0, 1, 5)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert torch.arange(6).view(2, 3)[1].tolist() == [3, 4, 5]
    assert int(torch.tensor([4, 2]).sum()) == 6


BATCH = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_integers_of_a_batch_are_known_and_what_is_computed_of_them(rehearsed):
    mask = torch.empty(2, 3, dtype=torch.int64)
    give_value(mask, BATCH)
    assert not bool((mask == 1).all())
    assert mask.nonzero().shape == (5, 2)
    assert int(mask.sum(-1).max()) == 3


def test_an_index_by_a_known_mask_has_as_many_rows_as_the_mask_has_true_values(rehearsed):
    labels, logits = torch.empty(2, 3, dtype=torch.int64), torch.randn(2, 3, 7, requires_grad=True)
    give_value(labels, BATCH)
    assert logits[labels == 1].shape == (5, 7) and logits.argmax(-1)[labels == 0].shape == (1,)
    assert logits[:, labels[0] == 1, :2].shape == (2, 2, 2)
    assert labels[labels != 0].tolist() == [1] * 5
    torch.nn.functional.cross_entropy(logits[labels == 1], labels[labels == 1]).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape
    with pytest.raises(NEEDS_VALUES):
        logits[logits > 0]


def test_a_write_is_seen_through_views_and_one_that_is_not_known_is_forgotten(rehearsed):
    whole = torch.zeros(4)
    part = whole[1:3]
    part.fill_(2)
    assert float(whole.sum()) == 4
    part.copy_(torch.randn(2))
    assert value_of(whole) is None
    with pytest.raises(NEEDS_VALUES):
        float(whole.sum())


def test_a_value_that_is_forgotten_takes_no_other_with_it(rehearsed):
    """Memory is used again: a new value often lies where a forgotten one did."""
    for _ in range(50):
        unknown = torch.zeros(4)
        unknown.copy_(torch.randn(4))
        assert value_of(unknown) is None
        del unknown
        assert float(torch.ones(4).sum()) == 4


def test_what_was_not_written_has_no_value(rehearsed):
    unwritten = torch.empty(4)
    assert value_of(unwritten) is None and value_of(unwritten + 1) is None
    unwritten[0] = 1
    assert value_of(unwritten) is None
    unwritten.fill_(2)
    assert float(unwritten.sum()) == 8
    unwritten[:] = torch.arange(4)
    assert unwritten.tolist() == [0, 1, 2, 3]
    unwritten.copy_(torch.randn(4))
    assert value_of(unwritten) is None


def test_random_and_large_tensors_have_no_value(rehearsed):
    with pytest.raises(NEEDS_VALUES):
        torch.rand(3).max().item()
    assert value_of(torch.zeros(1 << 20)) is None


def statistics(device, weight):
    """Of what dtype norms of bfloat16 keep their means, by whatever device computes them."""
    x, w = torch.ones(2, 4, 8, dtype=torch.bfloat16, device=device), torch.ones(4, dtype=weight, device=device)
    layer = torch.native_layer_norm(x, [8], *(torch.ones(8, dtype=weight, device=device) for _ in range(2)), 1e-5)
    group = torch.native_group_norm(x, w, w, 2, 4, 8, 2, 1e-5)
    return [each.dtype for each in (*layer, *group, *torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5))]


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_the_statistics_of_narrow_norms_are_as_wide_as_the_kernels_keep_them(weight):
    """A CPU keeps them as narrow as narrow weights are, a GPU always in 32 bits."""
    of_cpu, rehearsing = (
        statistics("cpu", weight),
        FakeTensors(lambda _, args, kwargs, run: run(), stands_for_real=True),
    )
    with rehearsing:
        assert statistics("cpu", weight) == of_cpu
    with fake_device("main") as gpu, rehearsing:
        assert statistics(gpu, weight) == [torch.bfloat16, torch.float32, torch.float32] * 3
