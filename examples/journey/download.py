"""Station 1, download: files by URL, resumed where they broke off, used only if their SHA-256 matches.

python examples/journey/download.py [LIST]      lines of: SHA-256, URL, URLs of mirrors. The default is download.txt

The four files are MNIST, or a data set in its format. Without a network, the MNIST that meshwise ships is used.
"""

import shutil
import sys
from pathlib import Path

from fetch import download
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from station import FOLDER, report, show

from meshwise.training.jobs.mnist import MNIST, read_images

if __name__ == "__main__":
    folder = FOLDER / "download"
    folder.mkdir(parents=True, exist_ok=True)
    table = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".txt")
    complete = True
    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        for line in filter(str.strip, table.read_text().splitlines()):
            sha256, *urls = line.split()
            path = folder / Path(urls[0]).name
            complete = complete and any(download(url, sha256.lower(), path, bar) for url in urls)
    if not complete and sys.argv[1:]:
        raise SystemExit(f"Not every file of {table} could be downloaded with its SHA-256.")
    if not complete:
        shutil.copytree(MNIST, folder, dirs_exist_ok=True)

    train, test = read_images(folder, "train"), read_images(folder, "test")
    figures = {"training images": f"{len(train):,}", "test images": f"{len(test):,}"}
    fallback = "Not every file could be downloaded: the MNIST that meshwise ships is used, handwritten digits."
    done = "Handwritten digits, downloaded; every SHA-256 matches." if complete else fallback
    report("download", done, figures, show(train.pixels, train.labels[:20].tolist(), columns=10))
