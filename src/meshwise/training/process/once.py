"""Let a script's effects on files and trackers happen once.

Every rank runs the whole script. Rank 0 writes files as one device does. Any other rank sees the files as they were
when `begin` was called, and its own writes, which go to a private folder; so no rank waits for another.
rank_files.py gives each rank this view of the files.

Not covered: programs started other than by subprocess.run or os.system, and files opened by C code that
scratch_files.py does not list. A handle that is open for reading does not see what its rank writes later. Loader
workers' files stay with their rank. A saved file has more hard links while the script runs, so that gzip refuses it
without -f.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from meshwise.torch_compat.reducer import default_store
from meshwise.training.process.rank_files import FirstFiles, LaterFiles
from meshwise.training.process.session import tell
from meshwise.workers.environment import RUN_FOLDER
from meshwise.workers.scratch import made_folder, own
from meshwise.workers.scratch_files import replaced

ALONE = "a rank does not see {folder}, so its files stay private. Set MESHWISE_RUN to a folder that all machines share."
EARLY = "wandb.init came before mw.distribute, so every rank records a run. Call it after mw.distribute."
_begun, _met, _free, _views = count(), count(), list[str](), list[Any]()


def begin(rank: int, size: int) -> Callable[[], None]:
    """Let side effects happen once from now on, and return a function that ends this. Called on every rank."""
    if size == 1:
        return lambda: None
    key, run, stack = f"meshwise/once/{next(_begun)}", os.environ.get(RUN_FOLDER), contextlib.ExitStack()
    if rank == 0:
        made, _lock = (tempfile.mkdtemp(prefix=".once-", dir=run), None) if run else made_folder("once")
        default_store().set(key, os.path.realpath(made))
        if getattr(sys.modules.get("wandb"), "run", None) is not None:
            tell(EARLY)
    folder = default_store().get(key).decode()
    shared = os.path.isdir(folder)
    if not shared:
        tell(ALONE.format(folder=folder))
        made, _lock = made_folder("once")  # `_lock` protects the folder until `once` locks it
        folder = str(made)
    stack.enter_context(once(rank, size, folder, shared=shared))
    atexit.register(stack.close)
    return stack.close


@contextlib.contextmanager
def once(rank: int, size: int, folder: str, *, shared: bool = True) -> Iterator[None]:
    """Let side effects happen once until the `with` block ends. Then the last rank removes the folder.

    folder: an empty folder, the same on all ranks.
    shared: whether this rank sees the files in it that rank 0 makes."""
    cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # torch's own name for the folder
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    temporary, _lock = (None, None) if rank == 0 else made_folder("own")  # locked until this context exits
    wandb: Any = sys.modules.get("wandb")
    run, kind = os.environ.get(RUN_FOLDER), LaterFiles if rank else FirstFiles
    view = kind(os.path.realpath(folder), rank, size, shared, [*_free, *([run] if run else [])])
    os.environ |= {"WANDB_MODE": "disabled"} if rank else {}
    if rank and wandb is not None:
        wandb.init = partial(_disabled, wandb.init)
    _views.append(view)
    with own(Path(folder)):
        try:
            with replaced(view, str(temporary) if temporary else tempfile.tempdir):
                yield
        finally:
            _views.remove(view)
            if rank:
                shutil.rmtree(str(temporary), ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # the run's folder may have been removed
                Path(folder, f"ended{rank}").touch()
            if all(os.path.exists(f"{folder}/ended{each}") for each in (range(size) if shared else [rank])):
                shutil.rmtree(folder, ignore_errors=True)


def free(path: str | Path) -> None:
    """Let every rank use a file or a folder as it is, because meshwise itself writes there."""
    there = os.path.realpath(path)
    if there not in _free:
        _free.append(there)
        for view in _views:
            view.add_free(there)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Let all ranks see the files that rank 0 has written so far. The `with` block must wait for all ranks."""
    name = f"meeting {next(_met)}"
    for view in _views:
        view.turn(name, before=True)
    yield
    for view in _views:
        view.turn(name, before=False)


def _disabled(init: Callable[..., Any], *given: Any, **named: Any) -> Any:
    run = init(*given, **(named | {"mode": "disabled"}))
    os.makedirs(run.dir, exist_ok=True)
    return run
