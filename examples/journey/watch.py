"""Station 6, watch: a training of which one rank is late: live in the terminal, in a tracker, on the report's page.

python examples/journey/watch.py      trains implement.py; the last rank sleeps 20 ms before each step
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from station import DEVICES, FOLDER, needs, tell

import meshwise as mw

COLORS = {"data": "#e69f00", "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73"}
COLORS |= {"communication": "#d55e00", "waiting": "#a7a7a7"}

if __name__ == "__main__":
    count = torch.accelerator.device_count()
    devices, late = (DEVICES, count - 1) if count > 1 else ("2xcpu", 1)
    options = ["--devices", devices, "--out", FOLDER / "watched", "--fault", f"slow 20ms:rank={late},step=1"]
    tracker = next((name for name in ("wandb", "mlflow", "tensorboard") if find_spec(name)), None)
    tracked = ["--log", tracker] if tracker else []
    meshwise = [sys.executable, "-m", "meshwise"]
    subprocess.run([*meshwise, "run", *options, *tracked, Path(__file__).with_name("implement.py")], check=True)
    run = max((FOLDER / "watched").iterdir())
    subprocess.run([*meshwise, "report", run, "--html"], check=True)

    report = mw.report(run)
    figure, axis = plt.subplots(figsize=(7, 1.6), layout="constrained")
    for kind, color in COLORS.items():
        for rank in range(len(report.ranks)):
            bars = [bar for bar in report.views[0].attributed if (bar.kind, bar.rank) == (kind, rank)]
            spans = [(bar.start * 1e3, bar.seconds * 1e3) for bar in bars]
            axis.broken_barh(spans, (rank - 0.4, 0.8), color=color, label="" if rank else kind)
    axis.set(xlabel="ms", yticks=range(len(report.ranks)), ylabel="rank", ylim=(len(report.ranks) - 0.5, -0.5))
    figure.legend(ncols=6, loc="outside upper center", frameon=False)
    figures = {"found": report.verdict, "tracked by": tracker or "metrics.jsonl of the run"}
    if trained := sorted((FOLDER / "runs").glob("*-train")):
        low, high = json.loads(needs("design.json", "design").read_text())["seconds"]
        measured = mw.report(trained[-1]).step_seconds * 1e3
        figures["a step of station 5"] = f"{low * 1e3:.1f} to {high * 1e3:.1f} ms predicted, {measured:.1f} ms measured"
    link = f'<a href="{run.relative_to(FOLDER)}/report.html">the report of this run</a>'
    tell("watch", report.headline, figures, figure, link)
