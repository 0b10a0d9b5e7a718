"""Keep loader workers alive through a scheduler's warning signal.

The scheduler sends it to every process of a task.

SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 end torch's worker processes: the rank then fails in the middle of the step
after which it would have saved its state. Here only their rank ends them, as usual. Read in torch 2.11, 2.13 and 2.15:
`utils/data/_utils/worker.py` (its handler of SIGTERM is set before `worker_init_fn` is called) and
`utils/data/dataloader.py`. Tested in tests/faults/test_signals.py.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import dataloader

from meshwise.spec.exit_codes import WARNINGS

SPARED = (*WARNINGS, signal.SIGINT)


@dataclass(frozen=True)
class Spared:
    """A `worker_init_fn` of a DataLoader that makes the worker ignore warning signals of schedulers (see `spare`).

    then: the user's own `worker_init_fn`, which is called afterwards. None if there is none."""

    then: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        spare()
        if self.then is not None:
            self.then(worker)


def spare() -> None:
    """Make this DataLoader worker ignore SIGINT and the warning signals of schedulers. A SIGTERM from the rank that
    started the worker still ends it. Call this function in the main thread."""
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)
        threading.Thread(target=_wait, args=(os.getppid(),), name="meshwise-signals", daemon=True).start()


def _wait(rank: int) -> None:
    while True:
        came = signal.sigwaitinfo(SPARED)
        if came.si_pid == rank and came.si_signo == signal.SIGTERM:
            os._exit(0)  # as torch's own handler does


def spare_loader_workers() -> None:
    """Make the workers of every DataLoader of this process ignore SIGINT and the warning signals of schedulers. See
    `spare`."""
    kind: Any = dataloader._MultiProcessingDataLoaderIter
    if isinstance(getattr(kind.__init__, "__wrapped__", None), Callable):  # type: ignore[arg-type]
        return
    begin = kind.__init__

    @functools.wraps(begin)
    def begins(self: Any, loader: Any) -> None:
        own = loader.worker_init_fn
        loader.worker_init_fn = Spared(own)
        try:
            begin(self, loader)
        finally:
            loader.worker_init_fn = own

    kind.__init__ = begins
