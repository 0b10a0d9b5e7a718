"""Station 7, evaluate: each image once, on all devices: confusion matrix, worst errors, calibration.

meshwise run --devices 2xcpu examples/journey/evaluate.py
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from implement import dataset, network, predict
from station import load, needs, report, show

import meshwise as mw


def calibration(probabilities, labels, bins=10):
    """Mean confidence, accuracy and share of the images, by bins of confidence."""
    confidence, guess = probabilities.max(1)
    number = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(number, minlength=bins)
    mean = torch.bincount(number, confidence, minlength=bins) / count.clamp(min=1)
    right = torch.bincount(number, (guess == labels).float(), minlength=bins) / count.clamp(min=1)
    return mean, right, count / len(labels)


if __name__ == "__main__":
    images, labels = torch.load(needs("clean/test.pt", "clean"))
    model = mw.distribute(load(network, needs("model.pt", "train")))
    probabilities, labels = predict(model, dataset(images, labels))

    guess, count = probabilities.argmax(1), len(labels)
    confusion = torch.bincount(labels * 10 + guess, minlength=100).reshape(10, 10)
    right = confusion.trace().item() / count
    mean, share_right, share = calibration(probabilities, labels)
    worst = probabilities.gather(1, labels[:, None]).squeeze(1).argsort()[:12].tolist()

    figure, (left, middle) = plt.subplots(1, 2, figsize=(6, 2.8), layout="constrained")
    left.imshow(confusion.float().log1p(), cmap="Blues")
    for (row, column), number in np.ndenumerate(confusion.numpy()):
        left.text(column, row, number or "", ha="center", va="center", fontsize=6, color="w" if row == column else "k")
    left.set(xlabel="read as", ylabel="is", xticks=range(10), yticks=range(10))
    middle.plot([0, 1], [0, 1], color="0.7")
    middle.scatter(mean[share > 0], share_right[share > 0], s=10 + 200 * share[share > 0])
    middle.set(xlabel="confidence", ylabel="share right; area: share of the images")
    figures = {
        "test accuracy": f"{right:.2%} ± {(right * (1 - right) / count) ** 0.5:.2%} of {count:,} images",
        "confidence off by": f"{((mean - share_right).abs() * share).sum():.2%} on average",
    }
    titles = [f"{labels[number]} as {guess[number]}" for number in worst]
    done = (
        f"{count - confusion.trace()} of {count:,} test images are misread. Each counts once, on any number of devices."
    )
    report("evaluate", done, figures, figure, show(images[worst], titles, columns=6))
