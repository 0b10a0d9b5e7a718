"""Add notes to errors of Python and torch that meshwise recognises."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable

from torch import nn

from meshwise.spec.words import text_of

_NO_GROUP = "Default process group has not been initialized"
_FORKED_LOADER = "Cannot re-initialize CUDA in forked subprocess"
_NO_GRAPH = "element 0 of tensors does not require grad"
_NO_DEVICE = re.compile(
    r"Torch not compiled with (\w+) enabled|not linked with support for (\w+) devices|No (CUDA) GPUs are available"
    r"|Found no NVIDIA driver|no (\w+)-capable device is detected|no (XPU) device is available"
)
_OF_SYSTEM = {
    errno.EMFILE: "More files are open than is allowed. Raise the limit with ulimit -n 4096.",
    errno.EFBIG: "A file is larger than is allowed. Raise the limit with ulimit -f unlimited.",
    errno.ENOSPC: "A disk is full: see df -h for the folder of the run, for TMPDIR and for /dev/shm.",
}
_NO_SUCH_INDEX = "invalid device ordinal"
explainers: list[Callable[[BaseException], None]] = []
"""Functions that other parts of the package add to this list. Each may add a note to an error that it recognises."""


def add_hint(error: BaseException) -> None:
    """Add notes that explain an error to the user. They come from the functions in `explainers` and from `hint`."""
    for explain in explainers:
        with contextlib.suppress(Exception):  # the error that is there already is the one to tell
            explain(error)
    if text := hint(error):
        error.add_note(text)


def hint(error: BaseException) -> str:
    """Return a hint on how to fix the user's code. An empty string if the error is unknown."""
    text = text_of(error)
    if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
        return _OF_SYSTEM[error.errno]
    if isinstance(error, AttributeError) and error.name == "module" and isinstance(error.obj, nn.Module):
        return "meshwise does not wrap the model: use model instead of model.module."
    if _NO_GROUP in text:
        return "mw.distribute makes the process group: call it before torch.distributed, and instead of DDP."
    if _NO_GRAPH in text:
        return (
            "This loss does not depend on the model, perhaps because it uses none of the samples of this rank. Keep "
            "the output of the model in the loss: output[mask].sum() / max(n, 1), or loss + 0 * output.sum()."
        )
    if _FORKED_LOADER in text and "DataLoader worker" in text:
        return "DataLoader workers are forked: return CPU tensors, or set its multiprocessing_context='spawn'."
    if found := _NO_DEVICE.search(text):
        kind = next(filter(None, found.groups()), "such")
        return (
            f"This machine has no {kind} device. Remove .cuda() and .to('cuda'): mw.distribute puts the model, and its "
            "loaders their batches, on the device of each worker. Make your own tensors on x.device."
        )
    if _NO_SUCH_INDEX in text:
        return "A worker sees only its own device. Remove the device index: write .to('cuda') or .to(x.device)."
    return ""
