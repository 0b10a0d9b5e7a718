"""Station 3, design: memory and time of three widths, known before they run, here and on a machine that is not here.

python examples/journey/design.py      writes journey/design.json
"""

import json

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from implement import dataset, network
from station import DEVICES, FOLDER, needs, report

import meshwise as mw

WIDTHS, EPOCHS = (8, 16, 32), 8
MOST_SECONDS = 15  # that the training may take here


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
    """Milliseconds of a step (low, likely, high), MiB per device, and seconds of the training (high)."""
    plans = mw.plan(job(width), machine=machine, fits=mw.Plan(data=len(machine.devices)))  # data parallel alone
    step, memory = plans.best.seconds, plans.best.memory.total
    return step.low * 1e3, step.value * 1e3, step.high * 1e3, memory.value / 2**20, step.high * plans.steps


if __name__ == "__main__":
    needs("clean/train.pt", "clean")
    here = mw.bench(DEVICES, what=("compute", "collectives"), sizes="64K:1M", seconds=8).machine  # gradients' sizes
    machines = {"here": here, "8xH100": mw.find_machine("8xH100")}
    found = {name: {width: planned(width, machine) for width in WIDTHS} for name, machine in machines.items()}
    quick = [width for width, (*_, seconds) in found["here"].items() if seconds < MOST_SECONDS]
    width = max(quick, default=WIDTHS[0])
    design = {"width": width, "epochs": EPOCHS, "milliseconds": found["here"][width][:3:2]}  # low, high
    (FOLDER / "design.json").write_text(json.dumps(design))

    figures, (figure, (left, right)) = {}, plt.subplots(1, 2, figsize=(6, 2), layout="constrained")
    for name, rows in found.items():
        low, likely, high, memory, _ = zip(*rows.values())
        left.plot(WIDTHS, likely, "o-", label=name)
        left.fill_between(WIDTHS, low, high, alpha=0.2)
        right.plot(WIDTHS, memory, "o-")
        for each, row in rows.items():
            figures[f"{name}, width {each}"] = "{1:.2g} ms ({0:.2g} to {2:.2g}), {3:,.0f} MiB".format(*row)
    left.set(xlabel="width", ylabel="ms per step", yscale="log", xticks=WIDTHS)
    right.set(xlabel="width", ylabel="MiB per device", yscale="log", xticks=WIDTHS)
    left.legend()
    why = f"the widest that trains {EPOCHS} epochs in {MOST_SECONDS} s here" if quick else "none is quick enough"
    report("design", f"Width {width}: {why}, as predicted before any of them has run.", figures, figure)
