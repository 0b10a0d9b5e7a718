"""Define tutorial 2's network, 1000-1000-1000-10, and its seeded data.

The tutorial trains on pure noise, from which nothing can be learned. Here, each class has a center, and a sample is the
center of its class plus noise. A single feature says little about the class, all 1000 together say much.

Tested with the other built-in jobs in tests/jobs/test_registry.py and tests/job/test_equal_losses.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn, optim

from meshwise.job.job import Job
from meshwise.jobs.mnist import Batch, accuracy, cross_entropy

FEATURES, CLASSES = 1000, 10
TRAIN_SAMPLES, TEST_SAMPLES = 10_000, 2_000
CENTRE_SCALE = 0.2  # against noise of 1: with SGD at 1e-3, 10 epochs go from 10 % to about 97 % of the test set


def mlp(*, seed: int = 0) -> Job:
    """Return the job of tutorial 2: three linear layers, SGD with a learning rate of 1e-3, 10 epochs.

    The test data is drawn after the training data from the same random generator.
    """

    return Job(
        name="mlp",
        model=build_model,
        loss=cross_entropy,
        optimizer=partial(optim.SGD, lr=1e-3),
        data=lambda: draw_samples(seed)[0],
        test=lambda: draw_samples(seed)[1],
        metrics=accuracy,
        batch_size=32,
        epochs=10,
        seed=seed,
    )


def build_model() -> nn.Module:
    """Build the network 1000-1000-1000-10, with ReLU between layers."""
    return nn.Sequential(
        nn.Linear(FEATURES, 1000),
        nn.ReLU(),
        nn.Linear(1000, 1000),
        nn.ReLU(),
        nn.Linear(1000, CLASSES),
    )


def draw_samples(seed: int) -> tuple[Batch, Batch]:
    """Draw the training and the test set for a seed: float32 features (samples, 1000) and int64 labels (samples,)
    each."""
    generator = torch.Generator().manual_seed(seed)
    centres = CENTRE_SCALE * torch.randn(CLASSES, FEATURES, generator=generator)

    def draw(count: int) -> Batch:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return centres[labels] + torch.randn(count, FEATURES, generator=generator), labels

    return draw(TRAIN_SAMPLES), draw(TEST_SAMPLES)
