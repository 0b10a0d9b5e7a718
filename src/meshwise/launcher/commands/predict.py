"""Run a model over every sample once: `meshwise predict`.

Under any plan, the predictions are in the order of the data.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import typer
from rich.console import Console

from meshwise import launcher
from meshwise.spec.errors import UsageError
from meshwise.terminal.command_line import from_dataclass, is_script
from meshwise.training.prediction.options import PredictOptions

app = typer.Typer(add_completion=False)


@app.command()
@from_dataclass
def predict(options: PredictOptions) -> None:
    """Run a job's model over every sample once, in order, without gradients, and write a row for each sample.

    If the run was stopped, the same command continues it. Without --out, the rows go to predictions.jsonl.

    \b
    meshwise predict mnist-cnn --weights runs/20261121-140502-mnist-cnn
    meshwise predict train.py:job --weights m.safetensors --out p.safetensors
    meshwise predict train.py:job --data new.py:samples --set tensor=2
    """
    if is_script(options.job) and ":" not in options.job:
        raise UsageError(
            f"{options.job} is a script, and meshwise predict needs a job. Name a job in the script, such as "
            f"{options.job}:job, or call mw.predict in the script."
        )
    print("starting", file=sys.stderr, flush=True)
    launcher.predict.predict_with(replace(options, out=options.out or "predictions.jsonl"), Console())
