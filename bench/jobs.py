"""What the built-in jobs reach, on one to four CPU workers.

    python bench/jobs.py

Claims: mnist-mlp 96 %, final accuracies within 0.3 points of each other; mnist-cnn 98.5 % in at most 3 epochs; mlp's
loss falls and its accuracy is far above chance; gpt (tiny, two minutes) is at least 0.3 nat a byte below the bigram
entropy of the held-out files.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from entropy import bigram_entropy
from keep import keep
from rich.console import Console

from meshwise.api.run import start_job
from meshwise.job.options import RunOptions
from meshwise.jobs.text import read_files


def run(job: str, devices: str) -> dict[str, Any]:
    """Run a job as the command line does; its final metrics and its seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        summary, code = start_job(RunOptions(job, devices=devices, out=out), Console(quiet=True))
    assert code == 0
    seconds = time.perf_counter() - start
    print(f"{job:10} {devices}  {dict(summary.metrics)}  {seconds:.0f} s", flush=True)
    return {"metrics": dict(summary.metrics), "seconds": seconds, "samples_per_second": summary.samples_per_second}


def main() -> None:
    """Run all, print, keep."""
    result: dict[str, Any] = {"claims": __doc__.split("Claims: ")[1].replace("\n", " ").strip()}
    for job, devices in (
        *(("mnist-mlp", f"{n}xcpu") for n in (1, 2, 3, 4)),
        ("mnist-cnn", "1xcpu"),
        ("mnist-cnn", "2xcpu"),
        ("mlp", "1xcpu"),
        ("mlp", "2xcpu"),
        ("gpt", "1xcpu"),
        ("gpt", "2xcpu"),
    ):
        result[f"{job} {devices}"] = run(job, devices)
    result["bigram entropy, nats a byte"] = bigram_entropy(*read_files())
    print(f"bigram entropy {result['bigram entropy, nats a byte']:.3f} nats a byte")
    keep("jobs", result)


if __name__ == "__main__":
    main()
