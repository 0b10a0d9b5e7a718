"""Station 1, download: files by URL, resumed where they broke off; without a network, the MNIST that meshwise ships.

python examples/journey/download.py [LIST]      its lines: SHA-256, URL, URLs of mirrors; default: download.txt
"""

import hashlib
import shutil
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from station import FOLDER, show, tell

from meshwise.jobs.mnist import MNIST, read_digits


def right(path, sha256):
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def fetch(url, sha256, part, bar):
    """Add to a part of a file what it lacks. What is complete and not right is thrown away."""
    have = part.stat().st_size
    with urlopen(Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=10) as answer:
        have = have if answer.status == 206 else 0  # 200: this server sends all of it
        more = int(answer.headers["Content-Length"])
        with part.open("ab" if have else "wb") as file:
            shutil.copyfileobj(bar.wrap_file(answer, more, description=part.stem), file)
    if part.stat().st_size == have + more and not right(part, sha256):
        part.write_bytes(b"")
        raise OSError("another SHA-256, not used")


def download(url, sha256, path, bar):
    """Ask again as long as more of the file comes. Return whether it is right."""
    part, before = path.with_suffix(".part"), None
    part.touch()
    while not right(path, sha256) and part.stat().st_size != before:
        before = part.stat().st_size
        try:
            fetch(url, sha256, part, bar)
        except (OSError, HTTPException) as error:
            bar.print(f"{url}: {error}")
        if right(part, sha256):
            part.rename(path)
    return right(path, sha256)


if __name__ == "__main__":
    (folder := FOLDER / "download").mkdir(parents=True, exist_ok=True)
    table = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".txt")
    files = [(sha256, urls, folder / Path(urls[0]).name) for sha256, *urls in map(str.split, table.open())]
    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        if not (here := all(any(download(url, sha256, to, bar) for url in urls) for sha256, urls, to in files)):
            shutil.copytree(MNIST, folder, dirs_exist_ok=True)
    train, test = read_digits(folder, "train"), read_digits(folder, "test")
    figures = {"images": f"{len(train):,}, and {len(test):,} to test", "from": "URLs" if here else "the package"}
    tell("download", "Files by URL and SHA-256.", figures, show(train.pixels, train.labels[:20].tolist(), 10))
