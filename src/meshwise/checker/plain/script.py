"""Watch the ranks of a script that does not use meshwise.

Such a script trains without functions of meshwise, for example with DDP or accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from meshwise.checker.plain.record import Follow, Record
from meshwise.checker.plain.watch import watch_plain
from meshwise.spec.errors import UsageError
from meshwise.training.process.session import has_begun
from meshwise.workers.join import rank_context

BY_ACCELERATE = ("accelerate", "transformers", "trl", "peft", "diffusers")


def names_accelerate(script: Path) -> bool:
    """Return whether the script's text mentions accelerate, or a library that trains with accelerate."""
    text = script.read_text(encoding="utf-8", errors="replace")
    return any(library in text for library in BY_ACCELERATE)


def watch(
    script: Callable[[], object], steps: int, seed: int, follow: Follow | None, accelerate: bool
) -> Record | None:
    """Run the script on this rank and return a record of it. Return None if the script calls meshwise."""
    if accelerate and find_spec("accelerate") is not None:
        import_module("accelerate")  # import it now, to patch its methods before the script keeps a reference to one
    record = watch_plain(script, steps, seed, follow, rank_context().world.rank)
    return None if has_begun() else record


def refuse_unjudged(name: str, ranks: Sequence[Record]) -> None:
    """Raise UsageError if the ranks of a script did nothing that can be compared with one process."""
    refused = next((record.refused for record in ranks if record.refused), "")
    if refused:
        raise UsageError(f"{name}: {refused}.")
    if not ranks[0].steps:
        raise UsageError(
            f"{name}: no torch optimizer made a step with gradients in the checked processes. If the script starts its "
            "ranks itself (mp.spawn), let it read RANK and WORLD_SIZE from the environment instead, as under torchrun."
        )
    if not any(record.wrapped for record in ranks):
        raise UsageError(
            f"{name}: the ranks train without DistributedDataParallel or accelerate, so there is nothing to check. "
            "Write model, optimizer, loader = mw.distribute(model, optimizer, loader) before the loop."
        )
