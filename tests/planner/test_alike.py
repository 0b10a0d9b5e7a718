"""Calls that are alike are worked out once: a trace is the same event for event, and what differs is worked out anew.

Of torch_compat/fake_alike.py.
"""

from dataclasses import replace

import pytest
import torch

from meshwise.planner.trace import trace
from meshwise.spec.plan import Plan
from meshwise.torch_compat import fake_alike
from meshwise.torch_compat.fake import FakeTensors
from meshwise.torch_compat.fake_values import value_of
from meshwise.training.jobs.registry import find_job

PLANS = {
    "gpu": (
        Plan(precision="bf16", shard=2, recompute="full"),
        Plan(data=2, accumulate=2),
        Plan(tensor=2),
        Plan(context=2),
        Plan(pipeline=2, accumulate=2),
    ),
    "cpu": (Plan(), Plan(shard=2)),
}


@pytest.mark.parametrize(("kind", "plan"), [(kind, plan) for kind, plans in PLANS.items() for plan in plans], ids=str)
def test_a_trace_is_the_same_with_and_without(kind, plan, monkeypatch):
    job = replace(find_job("gpt"), batch_size=8)
    quick = trace(job, plan, kind)
    monkeypatch.setattr(fake_alike, "key_of", lambda *call: None)
    whole = trace(job, plan, kind)
    assert [without_names(each) for each in quick] == [without_names(each) for each in whole]


def without_names(traced):
    """Streams and storages are numbered by the process: by their first use here."""
    names = {}

    def plain(event):
        own = {field: getattr(event, field) for field in ("stream", "storage") if hasattr(event, field)}
        return replace(event, **{field: names.setdefault((field, name), len(names)) for field, name in own.items()})

    return [[*map(plain, work.held), *map(plain, work.events)] for work in (traced.first, traced.step)]


class Heard:
    """Notes whether calls were known already."""

    def __init__(self):
        self.known = []

    def __call__(self, func, args, kwargs, run):
        out = run()
        self.known.append((func._schema.name, run.alike))
        return out

    def twice(self, call):
        """Whether a second call like the first is taken from it."""
        call()
        before = len(self.known)
        call()
        return {name: alike is not None for name, alike in self.known[before:]}


@pytest.fixture
def heard():
    found = Heard()
    with FakeTensors(found, stands_for_real=True):
        yield found


def test_what_is_alike_is_taken_from_the_first(heard):
    big = torch.randn(300, 300)
    assert heard.twice(lambda: big @ big) == {"aten::mm": True}
    assert heard.twice(lambda: big.mul_(2)) == {"aten::mul_": True}
    part = big[10:20]
    assert part.untyped_storage()._cdata == big.untyped_storage()._cdata and part.storage_offset() == 3000
    again = big[10:20]
    assert (again.shape, again.stride(), again.storage_offset()) == ((10, 300), (300, 1), 3000)
    assert again.untyped_storage()._cdata == big.untyped_storage()._cdata
    assert [each.shape for each in big.split(200)] == [(200, 300), (100, 300)]


@pytest.mark.parametrize(
    "change", [lambda t: t.double(), lambda t: t[:299], lambda t: t.t(), lambda t: t.expand(300, 300)]
)
def test_other_sizes_dtypes_and_strides_are_other_calls(heard, change):
    plain = torch.randn(300, 300)
    plain.exp()
    other = change(
        plain if change(plain).shape[0] != 300 or change(plain).dtype != plain.dtype else torch.randn(1, 300)
    )
    out = other.exp()
    assert (out.shape, out.dtype) == (other.shape, other.dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_is_taken_from_another_can_be_copied(heard):
    """A module that copies another one, such as nn.TransformerEncoder, asks for the address of its parameters."""
    for _ in range(2):
        assert (
            len(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 300, batch_first=True), 2).layers)
            == 2
        )


def test_one_and_one_point_nought_are_other_calls(heard):
    whole = torch.randint(0, 5, (300, 300))
    assert (whole + 1).dtype == torch.int64
    assert (whole + 1.0).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole + 1.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_result_that_depends_on_values_is_worked_out_each_time(heard):
    values = torch.arange(6)
    assert [int(values[:n].sum()) for n in (2, 3, 4)] == [1, 3, 6]
    assert values[values > 3].tolist() == [4, 5]
    with pytest.raises(Exception, match="nonzero"):
        torch.randn(300, 300).nonzero()


def test_a_write_that_is_taken_from_another_forgets_values_too(heard):
    big, small = torch.randn(300, 300), (torch.zeros(300), torch.zeros(300))
    for one in small:
        assert value_of(one) is not None
        one.copy_(big[0])
        assert value_of(one) is None


def test_values_in_lists_are_forgotten_too(heard):
    """They were kept where another tensor of the list was not known."""
    for _ in range(2):
        small = torch.zeros(4)
        torch._foreach_add_([small, torch.randn(300, 300)], 1)
        assert value_of(small) is None


def test_a_mask_of_positions_is_not_computed(heard):
    """16 million booleans, several times in a step: most of the time of the trace of a Llama of two layers."""
    positions = torch.arange(4096)
    assert value_of(positions) is not None
    assert value_of(positions[:, None] >= positions[None]) is None
