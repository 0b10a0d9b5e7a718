"""Station 8, optimise: a search, one trial per device at a time; a student of the best model; the student in 8 bits.

python examples/journey/optimise.py [TRIALS]      after Ctrl-C, the same command resumes
"""

import sys

import matplotlib.pyplot as plt
import optuna
import torch
from implement import dataset, fit, network, predict
from search import search
from smaller import compared, in_8_bits, trained
from station import DEVICES, FOLDER, accuracy, fingerprint, load, needs, report
from train import Shifted

import meshwise as mw


def objective(trial):
    torch.manual_seed(0)
    images, labels = torch.load(needs("clean/train.pt", "clean"))
    count = len(labels) // 6
    train, held_out = dataset(images[count:], labels[count:]), dataset(images[:count], labels[:count])
    data = Shifted(*train.tensors, by=trial.suggest_int("shift", 0, 3))
    model = network(trial.suggest_categorical("width", [8, 12, 16]))

    def after_epoch(epoch):
        trial.report(accuracy(*predict(model, held_out)), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    fit(model, data, 10, trial.suggest_float("rate", 1e-3, 2e-2, log=True), after_epoch)
    return accuracy(*predict(model, held_out))


if __name__ == "__main__":
    train, test = (dataset(*torch.load(needs(f"clean/{part}.pt", "clean"))) for part in ("train", "test"))
    study = search(objective, int(sys.argv[1]) if sys.argv[1:] else 12, FOLDER / f"search-{fingerprint(train)}.journal")
    best = study.best_trial.params
    torch.manual_seed(0)
    width, settings = best["width"], (best["rate"], best["shift"])
    searched, student = network(width), network(max(8, width * 3 // 4))
    searched.load_state_dict(mw.launch(trained, searched, train, 12, *settings, devices=DEVICES)[0])  # 12 epochs
    student.load_state_dict(mw.launch(trained, student, train, 18, *settings, searched, devices=DEVICES)[0])  # distil
    models = {"trained": load(network, needs("model.pt", "train")), "searched": searched, "student": student}
    models["8 bits"] = in_8_bits(student, train.tensors[0][:500])
    rows = list(compared(models, test))
    figure, axes = plt.subplots(1, 4, figsize=(7, 1.7), layout="constrained")
    for trial in study.trials:
        axes[0].plot(list(trial.intermediate_values.values()), color="C0" if trial.params == best else "0.8")
    for axis, column, title in zip(axes[1:], (1, 2, 3), ("test accuracy", "KiB", "ms per 100 images")):
        axis.barh(list(models), [row[column] for row in rows], color=["0.6", "C0", "C2", "C3"])
        axis.set(title=title, yticks=range(4 if axis is axes[1] else 0))
    axes[0].set(title="validation accuracy", xlabel="epoch")
    axes[1].set_xlim(min(row[1] for row in rows) - 0.02, 1)
    figures = {name: f"{share:.2%}, {kib:.0f} KiB, {ms:.2f} ms per 100 images" for name, share, kib, ms in rows}
    figures["best trial"] = ", ".join(f"{name} {value:.3g}" for name, value in best.items())
    before, *_, after = (f"{share:.2%} of the test digits in {kib:.0f} KiB" for _, share, kib, _ in rows)
    report("optimise", f"{after}. Station 5's network: {before}. {len(study.trials)} trials.", figures, figure)
