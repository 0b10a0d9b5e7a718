"""Tutorial 3's convolutional network, with the pooling that it needs, as a job with metrics, a scheduler and clipping.

`job` is a function with a parameter `data`, so that --data DIR can name another set of MNIST's format.

meshwise run examples/03_convolutions.py:job --devices 2xcpu
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwise as mw
from meshwise.jobs.mnist import MNIST, read_digits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # 28 -> 24 -> 12 pixels
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # 12 -> 8 -> 4, and 20 * 4 * 4 are the 320 of fc1
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (model(images).argmax(dim=1) == labels).float().mean()}


def job(data: Path = MNIST) -> mw.Job:
    return mw.Job(
        name="convolutions",
        model=Net,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=235, gamma=0.5),  # an epoch
        data=lambda: read_digits(data, "train"),
        test=lambda: read_digits(data, "test"),
        metrics=accuracy,
        batch_size=256,
        epochs=3,
        clip_norm=5.0,
    )
