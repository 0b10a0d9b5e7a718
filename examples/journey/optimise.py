"""Station 8, optimise: a search, one trial a device at a time; a student of the best model; its weights in 8 bits.

python examples/journey/optimise.py [TRIALS]      goes on where it was stopped
"""

import sys

import matplotlib.pyplot as plt
import optuna
import torch
from implement import accuracy, dataset, fit, network, predict
from search import search
from smaller import compared, distil, in_8_bits
from station import DEVICES, FOLDER, needs, tell
from train import Moved

import meshwise as mw


def objective(trial):
    images, labels = torch.load(needs("clean/train.pt", "clean"))
    count = len(labels) // 6
    held, data = dataset(images[:count], labels[:count]), Moved(*dataset(images[count:], labels[count:]).tensors)
    data.by, model = trial.suggest_int("moved by", 0, 3), network(trial.suggest_categorical("width", [8, 16, 24]))

    def after_epoch(epoch):
        trial.report(accuracy(*predict(model, held)), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    torch.manual_seed(0)
    fit(model, data, 6, trial.suggest_float("rate", 1e-3, 2e-2, log=True), after_epoch)
    torch.save(model.state_dict(), FOLDER / f"trial-{trial.number}.pt")
    return accuracy(*predict(model, held))


if __name__ == "__main__":
    train, test = (dataset(*torch.load(needs(f"clean/{part}.pt", "clean"))) for part in ("train", "test"))
    study = search(objective, int(sys.argv[1]) if sys.argv[1:] else 12, FOLDER / "search.journal")
    best = study.best_trial
    searched = network(best.params["width"])
    searched.load_state_dict(torch.load(FOLDER / f"trial-{best.number}.pt"))
    student = network(best.params["width"] // 2)
    student.load_state_dict(mw.launch(distil, searched, student, train, 18, devices=DEVICES)[0])
    models = {"searched": searched, "distilled": student, "in 8 bits": in_8_bits(student, train.tensors[0][:500])}
    rows = list(compared(models, test))
    figure, axes = plt.subplots(1, 4, figsize=(8.4, 1.9), layout="constrained")
    axes[0].set(title="accuracy of trials", xlabel="epoch", ylim=(0.9, 1))
    for trial in study.trials:
        axes[0].plot(list(trial.intermediate_values.values()), color="C0" if trial == best else "0.8")
    for axis, values, title in zip(axes[1:], list(zip(*rows))[1:], ("accuracy", "KiB", "ms for 100 images")):
        axis.bar(list(models), values, color=["C0", "C2", "C3"])
        axis.set_title(title)
    axes[1].set_ylim(0.95, 1)
    figures = {name: f"{share:.2%}, {size:.0f} KiB, {ms:.2f} ms" for name, share, size, ms in rows}
    figures["best trial"] = ", ".join(f"{name} {value:.3g}" for name, value in best.params.items())
    done = (
        f"{rows[2][1]:.2%} of the digits read right in {rows[2][2]:.0f} KiB; by the best of {len(study.trials)} trials"
    )
    tell("optimise", f"{done} {rows[0][1]:.2%} in {rows[0][2]:.0f} KiB.", figures, figure)
