"""Write the weights of a run's saved state: `meshwise weights`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshwise import training
from meshwise.training.commands.checkpoints import RUN, run_folder

app = typer.Typer(add_completion=False)


@app.command()
def weights(
    run: Annotated[str | None, RUN] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="output folder; default: RUN/weights")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="checkpoint to export, such as step-00000040.1; default: newest")
    ] = None,
) -> None:
    """Write the weights of a run's newest state as safetensors, with the names of the state_dict.

    The weights are written tensor by tensor, so the model may be larger than a host's memory. The files can be read by
    `mw.load_weights`, transformers and other libraries.

    \b
    meshwise weights                               write weights of the newest run
    meshwise weights mnist-cnn --out weights       write to the folder weights
    meshwise weights gpt --checkpoint step-00000040.1   write an older state
    """
    say = partial(print, "Note:", file=sys.stderr)
    print(training.weights.weights(run_folder(run), Path(out) if out else None, checkpoint, say)[1])
