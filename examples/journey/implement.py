"""Station 4, implement: a model and its loop for one device. `# many` marks lines for many; after it, the line for one.

python examples/journey/implement.py                             one device
meshwise run --devices 2xcpu examples/journey/implement.py       two: the same numbers
meshwise check examples/journey/implement.py                     the proof
"""

import torch
from station import accuracy, lines_for_many, needs, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


def dataset(images, labels):
    return TensorDataset(images[:, None] / 255, labels)


def network(width):
    first = nn.Conv2d(1, width, 5), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(width, 2 * width, 5), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * width, 128), nn.ReLU(), nn.Linear(128, 10))


def fit(model, data, epochs, rate=4e-3, after_epoch=lambda epoch: None):
    loader = DataLoader(data, batch_size=128, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)  # many
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            mw.log(loss=loss)  # many
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        after_epoch(epoch)


def predict(model, data):
    loader = mw.distribute(DataLoader(data, batch_size=1000))  # many: loader = DataLoader(data, batch_size=1000)
    model.eval()
    with torch.no_grad():
        batches = [(model(images).softmax(1), labels) for images, labels in loader]
    probabilities, labels = (torch.cat(rows) for rows in zip(*batches))
    return probabilities.cpu(), labels.cpu()


if __name__ == "__main__":
    torch.manual_seed(0)
    train, test = (dataset(*torch.load(needs(f"clean/{part}.pt", "clean"))) for part in ("train", "test"))
    model = network(width=8)
    fit(model, train, epochs=1)
    figures = {"test accuracy, width 8, one epoch": f"{accuracy(*predict(model, test)):.2%}"}
    report("implement", "The loop: red for one device, green for many.", figures, lines_for_many(__file__))
