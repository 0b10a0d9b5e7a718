"""Station 3, design: memory and time of three widths, known before they run, here and on a machine that is not here.

python examples/journey/design.py      writes journey/design.json
"""

import json

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from implement import dataset, network
from station import DEVICES, FOLDER, needs, tell

import meshwise as mw

WIDTHS, EPOCHS, PATIENCE = (8, 16, 32), 8, 15  # seconds that a training may take here


def job(width):
    return mw.Job(
        model=lambda: network(width),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=lambda: dataset(*torch.load(needs("clean/train.pt", "clean"))),
        optimizer=torch.optim.AdamW,
        batch_size=128,
        epochs=EPOCHS,
    )


def planned(width, machine):
    """Seconds of a step on all devices of a machine, MiB of a device, seconds of the training where all is slow."""
    plans = mw.plan(job(width), machine=machine, fits=mw.Plan(data=len(machine.devices)))
    return plans.best.seconds, plans.best.memory.total.value / 2**20, plans.best.seconds.high * plans.steps


if __name__ == "__main__":
    needs("clean/train.pt", "clean")
    machines = {"here": mw.bench(DEVICES, seconds=8).machine, "8xH100": mw.find_machine("8xH100")}
    found = {name: {width: planned(width, machine) for width in WIDTHS} for name, machine in machines.items()}
    width = max([w for w, (*_, seconds) in found["here"].items() if seconds < PATIENCE], default=WIDTHS[0])
    step, *_ = found["here"][width]
    design = {"width": width, "epochs": EPOCHS, "seconds": [step.low, step.high]}
    (FOLDER / "design.json").write_text(json.dumps(design))

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.2), layout="constrained")
    figures = {}
    for name, rows in found.items():
        steps, mebibytes, _ = zip(*rows.values())
        left.plot(WIDTHS, [step.value * 1e3 for step in steps], "o-", label=name)
        left.fill_between(WIDTHS, [step.low * 1e3 for step in steps], [step.high * 1e3 for step in steps], alpha=0.2)
        right.plot(WIDTHS, mebibytes, "o-")
        for w, (step, mib, _) in rows.items():
            times = f"{step.value * 1e3:.2g} ms ({step.low * 1e3:.2g} to {step.high * 1e3:.2g})"
            figures[f"{name}, width {w}"] = f"{times}, {mib:,.0f} MiB"
    left.set(xlabel="width", ylabel="ms a step", yscale="log", xticks=WIDTHS)
    right.set(xlabel="width", ylabel="MiB a device", yscale="log", xticks=WIDTHS)
    left.legend()
    tell("design", f"Width {width}: the widest whose {EPOCHS} epochs take under {PATIENCE} s here.", figures, figure)
