"""A model with fewer of its blocks: which ones are alike, and what a shorter job builds."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwise.planner.shorter import shortened, stretch_of
from meshwise.planner.trace import trace
from meshwise.planner.work import Operation
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job


class Block(nn.Module):
    def __init__(self, number, window=0, width=8):
        super().__init__()
        self.layer_idx, self.window = number, window
        self.linear = nn.Linear(8, width)

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self, make, count):
        super().__init__()
        self.blocks = nn.ModuleList(make(number) for number in range(count))

    def forward(self, x):
        for number in range(len(self.blocks)):  # by index, as some models do
            x = self.blocks[number](x)
        return x


def job(make=Block, count=8):
    return Job(
        name="blocks",
        model=functools.partial(Model, make, count),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.zeros(8, 8),),
        batch_size=4,
    )


def found(make, count=8):
    stretch = stretch_of(Model(make, count))
    return None if stretch is None else (stretch.start, stretch.group, stretch.count)


def test_blocks_that_differ_in_their_number_alone_are_alike():
    assert found(Block) == (0, 1, 8)


def test_groups_of_blocks_are_alike():
    assert found(lambda number: Block(number, window=number % 4 and 128)) == (0, 4, 2)


def test_a_block_that_differs_ends_the_stretch():
    assert found(lambda number: Block(number, window=number == 0)) == (1, 1, 7)
    assert found(lambda number: Block(number, window=number)) is None


def test_a_parameter_of_two_blocks_makes_them_unlike():
    shared = nn.Linear(8, 8)

    def make(number):
        block = Block(number)
        block.linear = shared
        return block

    assert found(make) is None


def test_hooks_buffers_and_trained_parameters_make_a_block_unlike():
    def with_hook(number):
        block = Block(number)
        if number == 3:
            block.linear.register_forward_hook(lambda *_: None)
        return block

    def frozen(number):
        block = Block(number)
        block.linear.weight.requires_grad_(number != 3)
        return block

    for make in (with_hook, frozen):
        assert found(make) == (4, 1, 4)


def test_a_shorter_job_builds_no_more_than_its_blocks():
    made = []

    def make(number):
        block = Block(number)
        made.extend([number] * isinstance(block, Block))
        return block

    whole = job(make)
    short = shortened(whole, stretch_of(whole.model()), 3)
    made.clear()
    model = short.model()
    assert made == [0, 1, 2]
    assert sum(p.numel() for p in model.parameters()) == 3 * 72
    assert model.blocks[7].window == 0  # settings that a model may look at
    x = torch.randn(4, 8)
    kept = list(model.blocks)[:3]
    assert torch.equal(model(x), functools.reduce(lambda y, block: block(y), kept, x))
    assert isinstance(whole.model().blocks[5], Block)


@pytest.mark.parametrize("plan", [Plan(), Plan(shard=2)], ids=str)
def test_a_shorter_job_does_what_a_shorter_model_does(plan):
    whole, short = job(), job(count=3)
    stretch = stretch_of(whole.model())
    operators = [
        [
            (one.what.name, one.what.shapes)
            for one in trace(each, plan)[0].step.launches
            if isinstance(one.what, Operation)
        ]
        for each in (shortened(whole, stretch, 3), short)
    ]
    assert operators[0] == operators[1]


class Pair(Block):
    def forward(self, x):
        return super().forward(x), None


def test_a_block_that_gives_more_than_a_tensor_gives_it_all():
    class Both(Model):
        def forward(self, x):
            for block in self.blocks:
                x, nothing = block(x)
                assert nothing is None
            return x

    whole = replace(job(), model=functools.partial(Both, Pair, 8))
    assert trace(shortened(whole, stretch_of(whole.model()), 3), Plan())


def test_a_block_that_changes_its_input_s_size_is_refused():
    class Wider(Block):
        def forward(self, x):
            return torch.cat([x, self.linear(x[:, :8])], -1)

    whole = job(Wider)
    short = shortened(whole, stretch_of(whole.model()), 3)
    with pytest.raises(UsageError, match="another shape or dtype than its input"):
        trace(short, Plan())


@pytest.mark.parametrize("order", ["reversed", "copies"])
def test_blocks_that_are_built_otherwise_are_left_out_afterwards(order):
    def model():
        whole = Model(Block, 0)
        first = Block(0)
        whole.blocks.extend(
            reversed([Block(number) for number in range(8)])
            if order == "reversed"
            else [first, *(copy.deepcopy(first) for _ in range(7))]
        )
        return whole

    short = shortened(replace(job(), model=model), stretch_of(model()), 3).model()
    assert [isinstance(block, Block) for block in short.blocks] == [True] * 3 + [False] * 5


def test_blocks_of_the_built_in_gpt_are_alike():
    stretch = stretch_of(find_job("gpt").model())
    assert stretch is not None and stretch.is_whole and stretch.group == 1
