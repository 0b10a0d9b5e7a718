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
    """Milliseconds of a step, MiB of a device, and seconds of the whole training at the slow end of its interval."""
    plans = mw.plan(job(width), machine=machine, fits=mw.Plan(data=len(machine.devices)))
    best = plans.best
    return best.seconds.value * 1e3, best.memory.total.value / 2**20, best.seconds.high * plans.steps


if __name__ == "__main__":
    needs("clean/train.pt", "clean")
    machines = {"here": mw.bench(DEVICES, seconds=8).machine, "8xH100": mw.find_machine("8xH100")}
    found = {name: [planned(width, machine) for width in WIDTHS] for name, machine in machines.items()}
    width = max(w for w, (*_, seconds) in zip(WIDTHS, found["here"]) if seconds < PATIENCE or w == WIDTHS[0])
    step = dict(zip(WIDTHS, found["here"]))[width][0]
    (FOLDER / "design.json").write_text(json.dumps({"width": width, "epochs": EPOCHS, "milliseconds": step}))

    figure, axes = plt.subplots(1, 2, figsize=(7, 2.2), layout="constrained")
    for name, rows in found.items():
        for axis, values, unit in zip(axes, zip(*rows), ("ms a step", "MiB a device")):
            axis.plot(WIDTHS, values, "o-", label=name)
            axis.set(xlabel="width", ylabel=unit, yscale="log", xticks=WIDTHS, xticklabels=WIDTHS)
    axes[0].legend()
    figures = {
        f"{name}, width {w}": f"{ms:.3g} ms a step, {mib:,.0f} MiB, {seconds:.2g} s at most"
        for name, rows in found.items()
        for w, (ms, mib, seconds) in zip(WIDTHS, rows)
    }
    tell("design", f"Width {width}: the widest whose {EPOCHS} epochs take under {PATIENCE} s here.", figures, figure)
