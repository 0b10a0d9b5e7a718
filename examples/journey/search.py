"""An Optuna search with one trial per device at a time, from a queue that all devices share. Used by station 8."""

from concurrent.futures import ThreadPoolExecutor

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import meshwise as mw

OVER = (TrialState.COMPLETE, TrialState.PRUNED)
STARTS = 3  # at most, of a device that fails


def devices():
    """Each accelerator by its name, or two CPU workers."""
    kind = torch.accelerator.current_accelerator()
    return [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())] if kind else ["1xcpu"] * 2


def open_study(journal, seed=None):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(journal))),
        sampler=optuna.samplers.TPESampler(n_startup_trials=6, seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=4),
        study_name="search",
        direction="maximize",
        load_if_exists=True,
    )


def is_over(study, trials):
    return study.user_attrs["stopped"] or len(study.get_trials(states=OVER)) >= trials


def work(objective, trials, journal, place, seed):
    """On one device: take trials from the queue until enough are over, or the search is to stop."""
    torch.set_num_threads(1)

    def placed(trial):
        trial.set_user_attr("place", place)
        return objective(trial)

    def stop(study, trial):
        if is_over(study, trials):
            study.stop()

    open_study(journal, seed).optimize(placed, callbacks=[stop])


def give_back(study, place=None):
    """Put interrupted trials, of one place or of all, into the queue again."""
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if place in (None, trial.user_attrs.get("place")):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)


def search(objective, trials, journal):
    """Run trials until so many are over. A search that was stopped resumes; a device that fails loses only its trial.

    Returns the study. Raises RuntimeError if no device is left before enough trials are over.
    """
    study, places = open_study(journal), devices()
    study.set_user_attr("stopped", False)
    give_back(study)
    before = len(study.trials)

    def at(place):
        for start in range(STARTS):
            if is_over(study, trials):
                break
            seed = (before + start) * len(places) + place  # a worker that starts again draws other parameters
            try:
                mw.launch(work, objective, trials, journal, place, seed, devices=places[place])
            except mw.WorkerFailed as error:
                print(f"{places[place]}: {error}", flush=True)
                give_back(study, place)

    with ThreadPoolExecutor() as pool:
        try:
            list(pool.map(at, range(len(places))))
        except KeyboardInterrupt:
            study.set_user_attr("stopped", True)
            print("Stopped: the trials that run end first. The same command resumes the search.", flush=True)
            raise
    if not is_over(study, trials):
        raise RuntimeError(f"Each device failed {STARTS} times before {trials} trials were over.")
    return study
