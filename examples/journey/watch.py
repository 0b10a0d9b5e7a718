"""Station 6, watch: a training of which one rank is late: live in the terminal, in a tracker, on the report's page.

python examples/journey/watch.py      trains implement.py; the last rank sleeps 20 ms before each step
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from station import DEVICES, FOLDER, tell

import meshwise as mw

COLORS = {"data": "#e69f00", "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73"}
COLORS |= {"communication": "#d55e00", "waiting": "#a7a7a7"}

if __name__ == "__main__":
    count = torch.accelerator.device_count()
    devices, late = (DEVICES, count - 1) if count > 1 else ("2xcpu", 1)
    tracker = next((name for name in ("wandb", "mlflow", "tensorboard") if find_spec(name)), None)
    meshwise = [sys.executable, "-m", "meshwise"]
    options = ["--devices", devices, "--out", FOLDER / "watched", "--fault", f"slow 20ms:rank={late},step=1"]
    tracked = ["--log", tracker] if tracker else []
    subprocess.run([*meshwise, "run", *options, *tracked, Path(__file__).with_name("implement.py")], check=True)
    run = max((FOLDER / "watched").iterdir())
    subprocess.run([*meshwise, "report", run, "--html"], check=True)

    report = mw.report(run)
    window = report.views[0]
    figure, axis = plt.subplots(figsize=(7, 1.6))
    for kind, color in COLORS.items():
        for rank in range(len(report.ranks)):
            bars = [
                (bar.start * 1e3, bar.seconds * 1e3)
                for bar in window.attributed
                if (bar.kind, bar.rank) == (kind, rank)
            ]
            axis.broken_barh(bars, (rank - 0.4, 0.8), color=color, label=kind if not rank else "")
    axis.set(xlabel="ms", yticks=range(len(report.ranks)), yticklabels=[f"rank {r}" for r in range(len(report.ranks))])
    axis.invert_yaxis()
    figure.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.1), frameon=False)
    finding = next((each for each in report.findings if each.kind in ("straggler", "late")), report.findings[0])
    tell(
        "watch",
        report.headline,
        {"verdict": finding.sentence, "kind": finding.kind, "tracker": tracker or "metrics.jsonl"},
        figure,
    )
