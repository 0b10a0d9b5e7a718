"""Put a sample of MNIST into the wheel: a checkout has all of it, and its tests and documented accuracies need it."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = "meshwise/training/jobs/data/mnist"
EVERY = {"train": 6, "t10k": 5}
"""Every sixth training image and every fifth test image: 10,000 and 2,000."""

NOTE = """\
This installation carries a sample of MNIST: 10,000 of its 60,000 training images and 2,000 of its 10,000 test images.
For the accuracies in the documentation, pass all of it: `--data FOLDER`, with its IDX files (torchvision.datasets.MNIST
downloads them to MNIST/raw), or run from a checkout of meshwise, which has them.
"""


class SampleOfMnist(BuildHookInterface):
    """Replaces the files of MNIST in a wheel by a sample of each, always the same bytes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the sample to a temporary folder, from which hatchling takes it. An editable install keeps all."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        made = Path(self.folder.name)
        for file in sorted((Path(self.root) / "src" / DATA).glob("*.gz")):
            whole = gzip.decompress(file.read_bytes())
            (made / file.name).write_bytes(gzip.compress(sample(whole, EVERY[file.name.split("-")[0]]), mtime=0))
        (made / "SAMPLE.txt").write_text(NOTE, encoding="utf-8")
        build_data["force_include"] |= {str(file): f"{DATA}/{file.name}" for file in made.iterdir()}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if version != "editable":
            self.folder.cleanup()


def sample(idx: bytes, every: int) -> bytes:
    """An IDX file with the first of each `every` values along its first dimension."""
    header = 4 + 4 * idx[3]
    count = int.from_bytes(idx[4:8], "big")
    size = (len(idx) - header) // count
    kept = [idx[header + n * size : header + (n + 1) * size] for n in range(0, count, every)]
    return idx[:4] + len(kept).to_bytes(4, "big") + idx[8:header] + b"".join(kept)
