"""Before station 2: a copy of the digits, one file per image, with known faults in it. After it: how many were found.

python examples/journey/damage.py [IMAGES]    writes journey/copy, and journey/planted.csv, which clean.py never reads
python examples/journey/damage.py score       compares what clean.py found with what was planted
"""

import csv
import shutil
import sys

import numpy as np
from PIL import Image
from station import FOLDER, needs, report

from meshwise.training.jobs.mnist import read_images


def again(image, rng):
    """The same digit scanned again: fainter, moved by up to a pixel, with noise."""
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
        digits = read_images(needs("download", "download"), part)
        for image, label in zip(digits.pixels[:count].numpy(), digits.labels[:count].tolist(), strict=True):
            fault = rng.choice(["wrong label", "broken", ""], p=[0.05, 0.01, 0.94]) if part == "train" else ""
            path = write(part, image, (label + rng.integers(1, 10)) % 10 if fault == "wrong label" else label)
            if fault == "broken":
                path.write_bytes(path.read_bytes()[: rng.integers(path.stat().st_size)])
            if fault:
                yield path, fault, ""
            else:
                whole.append((path, image, label))
    for number in rng.permutation(len(whole))[: images // 25]:  # of test images too
        source, image, label = whole[number]
        if rng.random() < 0.5:
            yield write("train", image, label), "exact duplicate", source
        else:
            yield write("train", again(image, rng), label), "near duplicate", source


def score(planted, removed):
    """Rows of (fault, planted, found, false alarms). Of two files that are alike, either may be the one removed."""
    gone, rows = {row["file"]: row["fault"] for row in removed}, []
    for fault in sorted({row["fault"] for row in planted}):
        pairs = [(row["file"], row["copy of"]) for row in planted if row["fault"] == fault]
        found = {next((file for file in pair if gone.get(file) == fault), "") for pair in pairs} - {""}
        rows.append((fault, len(pairs), len(found), list(gone.values()).count(fault) - len(found)))
    return rows


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


if __name__ == "__main__":
    if "score" in sys.argv:
        planted, removed = table(needs("planted.csv", "damage")), table(needs("removed.csv", "clean"))
        rows = score(planted, removed)
        figures = {fault: f"{found} of {count} found, {wrong} false alarms" for fault, count, found, wrong in rows}
        done = (
            f"{len(planted)} faults were planted. clean.py, which does not know them, set {len(removed)} files aside."
        )
        report("clean", done, figures)
    else:
        images = int(sys.argv[1]) if sys.argv[1:] else 10_000
        for name in ("copy", "clean", "aside"):  # of another copy
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / "planted.csv").unlink(missing_ok=True)
        (FOLDER / "removed.csv").unlink(missing_ok=True)
        rows = list(plant(images, np.random.default_rng(0)))
        with (FOLDER / "planted.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "fault", "copy of"), *rows])
        count = sum(1 for _ in (FOLDER / "copy" / "train").glob("*/*.png"))
        print(f"journey/copy: {count:,} training images with {len(rows)} faults")
