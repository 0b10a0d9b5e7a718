"""Station 2, clean: broken files, duplicates and wrong labels are set aside, each with its reason.

python examples/journey/clean.py      reads journey/copy; writes journey/removed.csv, journey/aside and journey/clean
"""

import csv
import shutil

import torch
from find import likely_labels, most_alike, out_of_fold, read
from implement import dataset, fit, network, predict
from station import DEVICES, FOLDER, accuracy, needs, report, show

import meshwise as mw

ALIKE = 0.985  # cosine; of pairs of different MNIST images, one in a thousand comes near it


def score(images, labels, test, test_labels):
    """Test accuracy of a model trained on these images. To be called on every device."""
    torch.manual_seed(0)
    model = network(width=16)
    fit(model, dataset(images, labels), epochs=4)
    return accuracy(*predict(model, dataset(test, test_labels)))


if __name__ == "__main__":
    test, test_labels, test_files, broken = read(needs("copy/test", "damage"))
    images, labels, files, removed = read(needs("copy/train", "damage"))
    removed |= broken

    pixels, names = torch.cat([test, images]), [*test_files, *files]
    cosines, twins = (values.tolist() for values in most_alike(pixels))
    for number in range(len(test), len(pixels)):  # training images, like a test image or an earlier training image
        if cosines[number] > ALIKE:
            kind = "exact" if torch.equal(pixels[number], pixels[twins[number]]) else "near"
            removed[names[number]] = (f"{kind} duplicate", f"of {names[twins[number]]}")

    rest = torch.tensor([number for number, file in enumerate(files) if file not in removed])
    probabilities = mw.launch(out_of_fold, images[rest], labels[rest], devices=DEVICES)[0]  # what rank 0 returns
    likely = likely_labels(probabilities, labels[rest])
    wrong, others, rest = rest[likely >= 0].tolist(), likely[likely >= 0].tolist(), rest[likely < 0]
    removed |= {files[number]: ("wrong label", f"more likely {other}") for number, other in zip(wrong, others)}

    with (FOLDER / "removed.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("file", "fault", "why"), *((file, *why) for file, why in removed.items())])
    shutil.rmtree(FOLDER / "aside", ignore_errors=True)
    for file, (fault, _) in removed.items():
        (FOLDER / "aside" / fault).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, FOLDER / "aside" / fault / f"{' '.join(file.parts[-3:])}")
    (FOLDER / "clean").mkdir(exist_ok=True)
    torch.save((images[rest], labels[rest]), FOLDER / "clean" / "train.pt")
    torch.save((test, test_labels), FOLDER / "clean" / "test.pt")

    scores = [
        mw.launch(score, images[n], labels[n], test, test_labels, devices=DEVICES)[0] for n in (slice(None), rest)
    ]
    figures = {"test accuracy": f"{scores[0]:.2%} trained on all, {scores[1]:.2%} on what is left"}
    titles = [f"{labels[number]}, or {other}?" for number, other in zip(wrong[:20], others)]
    report("clean", f"{len(removed)} files set aside, each with its reason.", figures, show(images[wrong], titles, 10))
