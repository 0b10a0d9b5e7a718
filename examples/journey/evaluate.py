"""Station 7, evaluate: each image once, on all devices; what is taken for what, the worst, how sure one may be.

meshwise run --devices 2xcpu examples/journey/evaluate.py
"""

import json

import matplotlib.pyplot as plt
import numpy as np
import torch
from implement import dataset, network, predict
from station import needs, show, tell

import meshwise as mw


def calibration(probabilities, labels, bins=10):
    """Mean confidence, accuracy and share of the images of each bin of confidence."""
    sure, guess = probabilities.max(1)
    number = (sure * bins).long().clamp(max=bins - 1)
    count = torch.bincount(number, minlength=bins).clamp(min=1)
    columns = sure, (guess == labels).float(), torch.ones(len(sure))
    confidence, accuracy, share = (torch.bincount(number, column, minlength=bins) for column in columns)
    return confidence / count, accuracy / count, share / len(sure)


if __name__ == "__main__":
    images, labels = torch.load(needs("clean/test.pt", "clean"))
    model = network(json.loads(needs("design.json", "design").read_text())["width"])
    model.load_state_dict(torch.load(needs("model.pt", "train")))
    model = mw.distribute(model)
    probabilities, labels = predict(model, dataset(images, labels))

    guess = probabilities.argmax(1)
    confusion = torch.bincount(labels * 10 + guess, minlength=100).reshape(10, 10)
    confidence, accuracy, share = calibration(probabilities, labels)
    worst = probabilities.gather(1, labels[:, None]).squeeze(1).argsort()[:12].tolist()

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
    left.imshow(confusion.float().log1p(), cmap="Blues")
    for (row, column), count in np.ndenumerate(confusion.numpy()):
        left.text(column, row, count or "", ha="center", va="center", fontsize=6, color="w" if row == column else "k")
    left.set(xlabel="taken for", ylabel="is", xticks=range(10), yticks=range(10))
    right.plot([0, 1], [0, 1], color="0.7")
    right.plot(confidence[share > 0], accuracy[share > 0], "o-")
    right.set(xlabel="confidence", ylabel="accuracy")
    titles = [f"{labels[i]} as {guess[i]}" for i in worst]
    figures = {
        "accuracy": f"{confusion.trace() / confusion.sum():.2%} of {confusion.sum():,}",
        "expected calibration error": f"{((confidence - accuracy).abs() * share).sum():.2%}",
    }
    done = "Each image counted once, whatever the number of devices."
    tell("evaluate", done, figures, figure, show(images[worst], titles, 6))
