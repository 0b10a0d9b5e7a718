"""Tutorial 3's convolutional network, with the pooling that it needs, as a job with a scheduler and clipping.

meshwise run examples/03_convolutions.py:job --devices 2xcpu
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwise as mw
from meshwise.training.jobs.mnist import MNIST, read_images


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # without the pooling, 320 features are not what comes out
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


job = mw.Job(
    name="convolutions",
    model=Net,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=235, gamma=0.5),
    data=lambda: read_images(MNIST, "train"),
    test=lambda: read_images(MNIST, "test"),
    metrics=accuracy,
    batch_size=256,
    epochs=3,
    clip_norm=5.0,
)
