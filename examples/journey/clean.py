"""Station 2, clean: broken files, duplicates and wrong labels go, each with its reason, kept aside and never deleted.

python examples/journey/clean.py      reads journey/copy; writes journey/removed.csv, journey/aside and journey/clean
"""

import csv
import shutil

import torch
from find import likely_labels, most_alike, out_of_fold, read
from implement import accuracy, dataset, fit, network, predict
from station import DEVICES, FOLDER, needs, show, tell

import meshwise as mw


def score(images, labels, test, test_labels):
    """Accuracy of a model trained on these images."""
    torch.manual_seed(0)
    fit(model := network(width=16), dataset(images, labels), epochs=4)
    return accuracy(*predict(model, dataset(test, test_labels)))


if __name__ == "__main__":
    test, test_labels, test_files, _ = read(needs("copy/test", "damage"))
    images, labels, files, removed = read(needs("copy/train", "damage"))

    pixels, names = torch.cat([test, images]), [*test_files, *files]
    for number, (cosine, twin) in enumerate(zip(*most_alike(pixels))):
        if cosine > 0.985 and number >= len(test):  # an image to train, like one to test or like one before it
            kind = "exact" if torch.equal(pixels[number], pixels[twin]) else "near"
            removed[names[number]] = (f"{kind} duplicate", f"of {names[twin]}")

    rest = torch.tensor([number for number, file in enumerate(files) if file not in removed])
    probabilities = mw.launch(out_of_fold, images[rest], labels[rest], devices=DEVICES)[0]
    likely = likely_labels(probabilities, labels[rest])
    wrong, rest = rest[likely >= 0], rest[likely < 0]
    for number, label in zip(wrong.tolist(), likely[likely >= 0].tolist()):
        removed[files[number]] = ("wrong label", f"more likely {label}")

    with (FOLDER / "removed.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("file", "fault", "why"), *((file, *why) for file, why in removed.items())])
    shutil.rmtree(FOLDER / "aside", ignore_errors=True)
    for file, (fault, _) in removed.items():
        (FOLDER / "aside" / fault).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, FOLDER / "aside" / fault / f"{file.parent.name} {file.name}")
    (FOLDER / "clean").mkdir(exist_ok=True)
    torch.save((images[rest], labels[rest]), FOLDER / "clean" / "train.pt")
    torch.save((test, test_labels), FOLDER / "clean" / "test.pt")

    before = mw.launch(score, images, labels, test, test_labels, devices=DEVICES)[0]
    after = mw.launch(score, images[rest], labels[rest], test, test_labels, devices=DEVICES)[0]
    figures = {"accuracy": f"{before:.2%} with them, {after:.2%} without"}
    titles = [f"{files[number].parent.name}, or {removed[files[number]][1][-1]}?" for number in wrong[:20]]
    done = f"{len(removed)} files kept aside, each with its reason. Shown: labels that are likely wrong."
    tell("clean", done, figures, show(images[wrong], titles, columns=10))
