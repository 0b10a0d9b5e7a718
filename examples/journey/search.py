"""A search of Optuna, one trial a device at a time, from a queue that all devices share. Used by station 8."""

from concurrent.futures import ThreadPoolExecutor

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import meshwise as mw

OVER = (TrialState.COMPLETE, TrialState.PRUNED)
TRIES = 3  # of a device that fails


def devices():
    """Each accelerator by its name, or two CPU workers."""
    kind = torch.accelerator.current_accelerator()
    return [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())] if kind else ["1xcpu"] * 2


def open_study(journal):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    return optuna.create_study(
        storage=storage, study_name="search", pruner=pruner, direction="maximize", load_if_exists=True
    )


def work(objective, trials, journal, place):
    """On one device: take trials from the queue until enough are over."""
    torch.set_num_threads(1)

    def placed(trial):
        trial.set_user_attr("place", place)
        return objective(trial)

    open_study(journal).optimize(placed, callbacks=[optuna.study.MaxTrialsCallback(trials, OVER)])


def give_back(study, places):
    """Put trials that began at places where nobody works any more into the queue again."""
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if trial.user_attrs.get("place") in places:
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)


def search(objective, trials, journal):
    """The study, when so many trials are over. What a device was at when it failed is tried again, so is what a search
    was at that was stopped."""
    study, places = open_study(journal), devices()
    give_back(study, [None, *range(len(places))])

    def at(place):
        for _ in range(TRIES):
            if len(study.get_trials(states=OVER)) < trials:
                try:
                    mw.launch(work, objective, trials, journal, place, devices=places[place])
                except mw.WorkerFailed as error:
                    print(f"{places[place]}: {error}", flush=True)
                    give_back(study, [place])

    with ThreadPoolExecutor() as pool:
        list(pool.map(at, range(len(places))))
    return study
