"""Save and load a script's files as one device would.

`save` writes the same file under every plan, and `load` reads it.

If a plan divides parameters or the optimizer's state, the parts are gathered on rank 0. Models and optimizers that were
distributed accept whole tensors in `load_state_dict`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwise.parallel.batch_norm import unjoined
from meshwise.records.files import write_with
from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.spec.words import error_text
from meshwise.spec.world import World
from meshwise.torch_compat.modules import without_hooks
from meshwise.torch_compat.reducer import default_store
from meshwise.torch_compat.tree import leaves_of
from meshwise.training.process import once
from meshwise.training.process.session import default_engine, process_engine
from meshwise.training.recovery.collect import collected
from meshwise.transfer.reading import wait_for_all
from meshwise.workers.join import rank_context
from meshwise.workers.verb_log import log_verb

GRACE = 60.0  # seconds within which all ranks must reach the same save or load


def save(thing: Any, path: str | Path) -> None:
    """Save `thing` with `torch.save` on rank 0. The file is written completely or not at all. The other ranks do not
    wait until it is written.

    If the plan divides the model or the optimizer's state among ranks, every rank must make this call, and `thing` must
    consist of state_dicts. The file then contains whole tensors.

    thing: state_dicts, or anything that contains them. A model is saved without the hooks of meshwise."""
    engine, path = default_engine(), Path(path)
    once.free(path)
    world = rank_context().world  # all ranks; engine.world counts the ranks that split one model as one rank
    plan, name, saves = engine.plan, str(path.resolve()), process_engine().given.saves
    saves[name] += 1
    if plan.state_divided:
        if isinstance(thing, nn.Module | torch.optim.Optimizer):
            raise UsageError(f"under {plan}, mw.save saves only state dicts. Use mw.save(thing.state_dict(), path).")
        log_verb("mw.save")
        _all_come(f"meshwise/saves/{name}/{saves[name]}", world, f"mw.save({path}) under {plan}")
        thing = collected(thing)
    if world.rank == 0:
        with contextlib.ExitStack() as stack:
            for model in leaves_of(nn.Module, thing):
                stack.enter_context(unjoined(model))
                stack.enter_context(without_hooks(model, _is_ours))
            write_with(path, lambda file: torch.save(thing, file))
        if world.size > 1:
            default_store().set(f"meshwise/saved/{name}/{saves[name]}", "1")


def _is_ours(hook: Any) -> bool:
    """Return whether a module's hook was added by meshwise."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("meshwise.")


def load(path: str | Path) -> Any:
    """Load a file with `torch.load` to the CPU. All ranks must call it, and none continues until all have read it.

    If rank 0 has not finished an `mw.save` to the same path, this waits for it. Raises CheckpointError for a file that
    is damaged, or that holds anything but tensors and plain values."""
    log_verb("mw.load")
    engine, path = process_engine(), Path(path)
    world, name = rank_context().world, str(path.resolve())
    if world.size > 1 and name in engine.given.saves:
        default_store().wait([f"meshwise/saved/{name}/{engine.given.saves[name]}"])
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, MemoryError):
        raise  # the program may handle these, for example a missing file
    except Exception as error:
        raise CheckpointError(
            f"mw.load({path}): the file is damaged, or contains more than tensors and plain values. Load another file, "
            f"or one that you trust by torch.load(path, weights_only=False). {error_text(error)}"
        ) from None
    engine.given.loads += 1
    _all_come(f"meshwise/loaded/{engine.given.loads}", world, f"mw.load({path})")
    return loaded


def _all_come(key: str, world: World, what: str) -> None:
    if world.size == 1:
        return
    default_store().add(key, 1)
    if not wait_for_all(key, world.size, GRACE):
        raise UsageError(f"{what} was not called on every rank. Make this call on all ranks, not under `if rank == 0`.")
