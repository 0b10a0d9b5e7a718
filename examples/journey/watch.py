"""Station 6, watch: a training in which one rank is late, live in the terminal, in a tracker, on the report's page.

python examples/journey/watch.py      trains implement.py; the last rank sleeps 20 ms before each step
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from station import DEVICES, FOLDER, needs, report

import meshwise as mw

COLORS = {"data": "#e69f00", "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73"}
COLORS |= {"communication": "#d55e00", "waiting": "#a7a7a7"}

if __name__ == "__main__":
    count = torch.accelerator.device_count()
    devices, late = (DEVICES, count - 1) if count > 1 else ("2xcpu", 1)
    slow = f"slow 20ms:rank={late},step=1"  # from step 1 on
    tracker = next((name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name)), None)
    options = ["--devices", devices, "--out", FOLDER / "watched", "--fault", slow]
    options += ["--log", tracker] if tracker else []
    meshwise = [sys.executable, "-m", "meshwise"]
    subprocess.run([*meshwise, "run", *options, Path(__file__).with_name("implement.py")], check=True)
    run = max((FOLDER / "watched").iterdir())
    subprocess.run([*meshwise, "report", run, "--html"], check=True)

    watched = mw.report(run)
    window = watched.views[0]  # a few typical steps, bar by bar
    ranks = range(len(watched.ranks))
    figure, axis = plt.subplots(figsize=(6, 1.6), layout="constrained")
    for kind, color in COLORS.items():
        for rank in ranks:
            bars = [bar for bar in window.attributed if (bar.kind, bar.rank) == (kind, rank)]
            spans = [(bar.start * 1e3, bar.seconds * 1e3) for bar in bars]
            axis.broken_barh(spans, (rank - 0.4, 0.8), color=color, label="" if rank else kind)
    axis.set(xlabel="ms", ylabel="rank", yticks=ranks, ylim=(len(ranks) - 0.5, -0.5))
    figure.legend(ncols=6, loc="outside upper center", frameon=False, fontsize=7)
    figures = {"what the report says": watched.verdict, "tracked by": tracker or "metrics.jsonl"}
    link = f'<a href="{run.relative_to(FOLDER)}/report.html">the report of this run</a>'
    named = any(finding.rank == late and finding.kind == "straggler" for finding in watched.findings)
    done = f"Rank {late} was slowed on purpose, by 20 ms a step; the report {'names' if named else 'does not name'} it."
    report("watch", done, figures, figure, link)

    trained = sorted((FOLDER / "runs").glob("*-train"))  # station 5's runs: its step, predicted and measured
    if trained and (seen := mw.report(trained[-1])).steps:
        low, high = json.loads(needs("design.json", "design").read_text())["milliseconds"]
        step, loader = seen.step_seconds * 1e3, seen.kinds["data"] / seen.steps * 1e3
        measured = f"{step:.1f} ms measured, of which {loader:.1f} ms for reading images, which is not predicted"
        report("train", figures={"a step": f"{low:.1f} to {high:.1f} ms predicted; {measured}"})
