"""Watch the ranks of a script that does not use meshwise.

Such a script trains without functions of meshwise, for example with DDP or accelerate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from meshwise.checker.plain.record import Follow, Record
from meshwise.checker.plain.watch import watch_plain
from meshwise.spec.errors import UsageError
from meshwise.training.process.session import has_begun
from meshwise.workers.join import rank_context

LIBRARIES = {
    "accelerate": r"accelerate|transformers|trl|peft|diffusers",
    "lightning": r"\blightning\b",
    "pytorch_lightning": "pytorch_lightning",
}
"""Maps a library to a pattern that is found in scripts that train with it."""


def libraries_of(script: Path) -> list[str]:
    """Return the installed libraries that the script's text says it trains with."""
    text = script.read_text(encoding="utf-8", errors="replace")
    return [name for name, words in LIBRARIES.items() if re.search(words, text) and find_spec(name) is not None]


def watch(
    script: Callable[[], object], steps: int, seed: int, follow: Follow | None, libraries: Sequence[str]
) -> Record | None:
    """Run the script on this rank and return a record of it. Return None if the script calls meshwise."""
    for library in libraries:  # import it now, to patch its methods before the script keeps a reference to one
        import_module(library)
    record = watch_plain(script, steps, seed, follow, rank_context().world)
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
