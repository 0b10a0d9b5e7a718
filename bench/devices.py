"""Does `meshwise devices` answer at once, and does `meshwise bench` end within a minute?

    python bench/devices.py

Claims: `meshwise devices` takes at most 0.5 s beyond `python -c "import torch"`, in pairs of one run; `--no-torch` less
than 1 s; the default `meshwise bench` on two CPU cores less than 60 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from keep import keep

PAIRS = 11
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "devices": ["-m", "meshwise", "devices"],
    "devices --no-torch": ["-m", "meshwise", "devices", "--no-torch"],
}
BENCHES = 3


def seconds(words: list[str]) -> float:
    """Wall time of one Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, keep."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for pair in range(PAIRS + 1):
        for name, words in COMMANDS.items():
            took = seconds(words)
            if pair:  # the first round reads files from the disk
                times[name].append(took)
    beyond = [ours - theirs for ours, theirs in zip(times["devices"], times["import torch"], strict=True)]
    bench = [seconds(["-m", "meshwise", "bench"]) for _ in range(BENCHES)]
    result = {
        "median s": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "devices beyond import torch, s": {
            "median": round(statistics.median(beyond), 3),
            "largest": round(max(beyond), 3),
        },
        "devices --no-torch, largest s": round(max(times["devices --no-torch"]), 3),
        "bench, s": [round(took, 1) for took in bench],
    }
    print(result)
    keep("devices", result)


if __name__ == "__main__":
    main()
