"""What every test shares: one thread, fixed random numbers, and no GPU test without a GPU."""

import os
import random
from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
import pytest
import torch

from tests.pool import Pool

# Two cores run several workers at once in many tests: threads that wait for each other would cost more than they bring.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Deadlines measure the machine, not the code. In CI a failure must come back in the next run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(3)`: three CPU workers in one process group, started at the first call and kept for all tests."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size)
        return pools[size]

    yield of
    for made in pools.values():
        made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch sees none here"))
