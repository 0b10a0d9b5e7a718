"""The small built-in jobs are the tutorials' programs: their layers, settings and data, and they learn."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from meshwise.spec.errors import DataError
from meshwise.training.job.job import Job
from meshwise.training.jobs.mnist import ConvNet, mnist_cnn, mnist_mlp
from meshwise.training.jobs.registry import draw_samples, mlp


def linear_sizes(model: nn.Module) -> list[tuple[int, int]]:
    return [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]


def take(data: Any, indices: Tensor) -> Any:
    return data.batch(indices) if hasattr(data, "batch") else tuple(values[indices] for values in data)


def train_plainly(job: Job, steps: int) -> tuple[nn.Module, list[float]]:
    """Some steps of a job, by torch alone, in order of the data."""
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data()
    optimizer = job.optimizer(model.parameters())
    losses = []
    for indices in torch.arange(steps * job.batch_size).split(job.batch_size):
        loss = job.loss(model, take(data, indices))
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def accuracy_of(job: Job, model: nn.Module, count: int) -> float:
    assert job.test is not None and job.metrics is not None
    value = job.metrics(model, take(job.test(), torch.arange(count)))["accuracy"]
    return float(value)  # type: ignore[arg-type]


def write_images(folder: Path, start: str, pixels: Tensor, labels: Tensor) -> None:
    for kind, values in (("images", pixels), ("labels", labels)):
        header = bytes((0, 0, 8, values.dim())) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        content = header + values.to(torch.uint8).numpy().tobytes()
        (folder / f"{start}-{kind}-idx{values.dim()}-ubyte.gz").write_bytes(gzip.compress(content))


def test_mnist_mlp_is_tutorial_1() -> None:
    job = mnist_mlp(seed=3)
    optimizer = job.optimizer(job.model().parameters())
    assert linear_sizes(job.model()) == [(784, 128), (128, 10)]
    assert isinstance(optimizer, optim.Adam) and optimizer.defaults["lr"] == 1e-3
    assert (job.name, job.batch_size, job.epochs, job.seed) == ("mnist-mlp", 64, 5, 3)
    assert len(job.data()) == 60_000
    assert job.test is not None and len(job.test()) == 10_000


def test_mnist_cnn_is_tutorial_3_with_its_pooling() -> None:
    job = mnist_cnn()
    model = job.model()
    assert isinstance(model, ConvNet)
    assert [tuple(conv.weight.shape) for conv in (model.conv1, model.conv2)] == [(20, 1, 5, 5), (20, 20, 5, 5)]
    assert linear_sizes(model) == [(320, 50), (50, 10)]
    optimizer = job.optimizer(model.parameters())
    assert isinstance(optimizer, optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.05, 0.9)
    assert (job.name, job.batch_size, job.epochs) == ("mnist-cnn", 256, 3)


def test_mlp_is_tutorial_2() -> None:
    job = mlp()
    optimizer = job.optimizer(job.model().parameters())
    assert linear_sizes(job.model()) == [(1000, 1000), (1000, 1000), (1000, 10)]
    assert isinstance(optimizer, optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (1e-3, 0)
    assert (job.name, job.epochs) == ("mlp", 10)


@pytest.mark.usefixtures("takes_seconds")
@pytest.mark.parametrize(("make", "steps", "least"), [(mnist_mlp, 100, 0.75), (mnist_cnn, 60, 0.8)])
def test_a_few_steps_on_mnist_already_tell_digits_apart(make: Any, steps: int, least: float) -> None:
    job = make()
    model, losses = train_plainly(job, steps)
    assert losses[-1] < 0.5 * losses[0]
    assert accuracy_of(job, model, 2000) > least


@pytest.mark.usefixtures("takes_seconds")
def test_mlp_learns_within_its_first_epoch() -> None:
    job = mlp()
    model, losses = train_plainly(job, 300)
    assert sum(losses[-20:]) < sum(losses[:20])
    assert accuracy_of(job, model, 2000) > 0.14  # 0.10 by chance; ten epochs give 0.97


def test_mlp_draws_its_data_from_the_seed_alone() -> None:
    first, again, other = draw_samples(5), draw_samples(5), draw_samples(6)
    (features, labels), (test_features, _) = first
    assert torch.equal(features, again[0][0]) and torch.equal(labels, again[0][1])
    assert not torch.equal(features, other[0][0])
    assert features.shape == (10_000, 1000) and test_features.shape == (2_000, 1000)
    assert not torch.equal(features[:2_000], test_features)
    assert labels.bincount(minlength=10).min() > 900


@pytest.mark.parametrize("make", [mnist_mlp, mnist_cnn])
def test_another_set_brings_its_own_number_of_classes(tmp_path: Path, make: Any) -> None:
    pixels = torch.zeros(26, 28, 28)
    for start in ("emnist-letters-train", "emnist-letters-test"):
        write_images(tmp_path, start, pixels, torch.arange(1, 27))
    job = make(data=tmp_path)
    assert job.model()(job.data().batch(torch.arange(26))[0]).shape == (26, 27)
    assert torch.isfinite(job.loss(job.model(), job.data().batch(torch.arange(26))))


def test_a_missing_data_folder_is_refused_when_the_job_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere must have one file"):
        mnist_cnn(data=tmp_path / "nowhere")
