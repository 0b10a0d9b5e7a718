"""The reducer of a rehearsal has DDP's buckets: the same sizes, in the same order."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwise.torch_compat import reducer


@pytest.fixture
def group_of_one():
    if dist.is_initialized():
        pytest.skip("this process has a group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SIZES = [(7,), (400, 400), (300, 300), (1000, 700), (3,), (512, 512), (2000, 1500), (5, 5), (400, 300), (400, 500)]


def buckets_of(make):
    """Elements of each bucket, in the order in which they are reduced, in the third backward."""
    seen = []

    def hook(bucket):
        seen.append([tuple(p.shape) for p in bucket.parameters()])
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    made = make(parameters, hook)
    for _ in range(3):
        seen.clear()
        reducer.arm(made)
        torch.stack([p.sum() for p in parameters]).sum().backward()
        for p in parameters:
            p.grad = None
    return seen


def test_buckets_are_those_of_ddp(group_of_one):
    theirs = buckets_of(lambda parameters, hook: reducer.make_reducer(parameters, 4, hook))
    ours = buckets_of(lambda parameters, hook: reducer.PlainReducer(parameters[::-1], 4, hook))
    assert ours == theirs
    assert len(ours) > 2
