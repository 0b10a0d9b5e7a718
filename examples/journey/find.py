"""What station 2 looks for: files that cannot be read, images that are alike, labels that are likely wrong."""

import io

import numpy as np
import torch
from implement import dataset, fit, network, predict
from PIL import Image
from torch.nn.functional import normalize


def read(folder):
    """Images (count, 28, 28), labels and files of folders named by label; and why the other files cannot be read."""
    images, files, broken = [], [], {}
    for file in sorted(folder.glob("*/*.png"), key=lambda file: file.name):
        try:
            content = file.read_bytes()
            Image.open(io.BytesIO(content)).verify()
            if not content.endswith(b"IEND\xaeB`\x82"):  # Pillow does not notice that these are missing
                raise OSError("the end of the file is missing")
            image = np.array(Image.open(io.BytesIO(content)).convert("L"))
            if image.shape != (28, 28):
                raise OSError(f"{image.shape[1]} x {image.shape[0]} pixels instead of 28 x 28")
            images.append(image)
            files.append(file)
        except (OSError, SyntaxError) as error:  # SyntaxError: Pillow's for a damaged PNG
            broken[file] = ("broken", str(error).split(" <")[0])
    return torch.from_numpy(np.stack(images)), torch.tensor([int(file.parent.name) for file in files]), files, broken


def most_alike(images):
    """Cosines and numbers: of each image, the one before it that is most alike, both moved to their centre."""
    ink = (images - 60.0).clamp(min=0)
    shift = [14 - ink.sum(dim) @ torch.arange(28.0) / ink.sum((1, 2)).clamp(min=1) for dim in (2, 1)]
    shift = torch.stack(shift, 1).round().int().tolist()
    centred = torch.stack([image.roll(by, (0, 1)) for image, by in zip(images, shift)]).flatten(1)
    vectors = normalize(centred - centred.float().mean(1, keepdim=True))
    found = []
    for start in range(0, len(vectors), 1000):
        cosines = vectors[start : start + 1000] @ vectors[: start + 1000].T
        found.append(cosines.tril(start - 1).max(1))  # only with those before it
    return torch.cat([values for values, _ in found]), torch.cat([which for _, which in found])


def out_of_fold(images, labels, folds=4, epochs=4):
    """Class probabilities of each image by a model that has not seen it. To be called on every device."""
    torch.manual_seed(0)
    fold, found = torch.randperm(len(labels)) % folds, torch.empty(len(labels), 10)
    for number in range(folds):
        held, model = fold == number, network(width=16)
        fit(model, dataset(images[~held], labels[~held]), epochs)
        found[held], _ = predict(model, dataset(images[held], labels[held]))
    return found


def likely_labels(probabilities, labels):
    """The more likely class of each image, if its probability exceeds the label's by 0.5; else -1.

    This is the margin of confident learning: Northcutt, Jiang and Chuang, 2021, https://arxiv.org/abs/1911.00068
    """
    best, likely = probabilities.max(1)
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    return torch.where(best - own > 0.5, likely, -1)
