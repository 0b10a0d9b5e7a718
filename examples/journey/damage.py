"""Before station 2: a copy of the digits, a file each, with known faults in it. After it: how many of them were found.

python examples/journey/damage.py [IMAGES]    writes journey/copy, and journey/planted.csv, which clean.py never reads
python examples/journey/damage.py score       compares what clean.py found with what was planted
"""

import csv
import shutil
import sys

import numpy as np
from PIL import Image
from station import FOLDER, needs, tell

from meshwise.jobs.mnist import read_digits


def again(image, rng):
    """The same digit scanned again: darker, moved by up to a pixel, with noise."""
    image = np.roll(image, rng.integers(-1, 2, 2), (0, 1)) * rng.uniform(0.7, 1.0)
    return np.clip(image + rng.normal(0, 10, image.shape), 0, 255).astype(np.uint8)


def plant(images, rng):
    """Write all files. Yield (file, its fault, the file that it is a copy of) of each fault."""
    whole, names = [], iter(rng.permutation(2 * images))  # a file's name says nothing of what was done to it

    def write(part, image, label):
        path = FOLDER / "copy" / part / str(label) / f"{next(names):05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        return path

    for part, count in ("test", images // 2), ("train", images):
        digits = read_digits(needs("download", "download"), part)
        for image, label in zip(digits.pixels[:count].numpy(), digits.labels[:count].tolist(), strict=True):
            fault = rng.choice(["wrong label", "broken", ""], p=[0.05, 0.01, 0.94]) if part == "train" else ""
            path = write(part, image, (label + rng.integers(1, 10)) % 10 if fault == "wrong label" else label)
            if fault == "broken":
                path.write_bytes(path.read_bytes()[: rng.integers(path.stat().st_size)])
            if fault:
                yield path, fault, ""
            else:
                whole.append((path, image, label))
    for number in rng.permutation(len(whole))[: images // 25]:  # also images to test, among those to train
        source, image, label = whole[number]
        if rng.random() < 0.5:
            yield write("train", image, label), "exact duplicate", source
        else:
            yield write("train", again(image, rng), label), "near duplicate", source


def score(planted, removed):
    """(fault, planted, found, wrongly removed) of each fault. Of two files that are alike either may go."""
    gone, rows = {row["file"]: row["fault"] for row in removed}, []
    for fault in sorted(set(gone.values())):
        files = [(row["file"], row["copy of"]) for row in planted if row["fault"] == fault]
        found = {next((file for file in pair if gone.get(file) == fault), "") for pair in files} - {""}
        rows.append((fault, len(files), len(found), list(gone.values()).count(fault) - len(found)))
    return rows


if __name__ == "__main__":
    if "score" in sys.argv:
        planted, removed = needs("planted.csv", "damage").read_text(), needs("removed.csv", "clean").read_text()
        rows = score(list(csv.DictReader(planted.splitlines())), csv.DictReader(removed.splitlines()))
        tell(
            "clean", figures={f"{fault}": f"{found} of {of} found, {wrong} others" for fault, of, found, wrong in rows}
        )
    else:
        shutil.rmtree(FOLDER / "copy", ignore_errors=True)
        images = int(sys.argv[1]) if sys.argv[1:] else 10_000
        rows = list(plant(images, np.random.default_rng(0)))
        with (FOLDER / "planted.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "fault", "copy of"), *rows])
        print(f"{images} images to train, {len(rows)} faults: journey/copy")
