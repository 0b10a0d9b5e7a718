"""Add notes to errors of Python and torch that meshwise recognizes."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable

from torch import nn

from meshwise.spec.words import text_of

_OF_SYSTEM = {
    errno.EMFILE: "More files are open than is allowed. Raise the limit with ulimit -n 4096.",
    errno.EFBIG: "A file is larger than is allowed. Raise the limit with ulimit -f unlimited.",
    errno.ENOSPC: "A disk is full: see df -h for the folder of the run, for TMPDIR and for /dev/shm.",
}
_OF_TEXT = {
    r"Default process group has not been initialized": (
        "mw.distribute makes the process group: call it before torch.distributed, and instead of DDP."
    ),
    r"element 0 of tensors does not require grad": (
        "This loss does not depend on the model, perhaps because it uses none of the samples of this rank. Keep "
        "the output of the model in the loss: output[mask].sum() / max(n, 1), or loss + 0 * output.sum()."
    ),
    r"(?s)DataLoader worker.*Cannot re-initialize CUDA in forked subprocess": (
        "DataLoader workers are forked: return CPU tensors, or set its multiprocessing_context='spawn'."
    ),
    r"Torch not compiled with \w+ enabled|not linked with support for \w+ devices|No CUDA GPUs are available"
    r"|Found no NVIDIA driver|no \w+-capable device is detected|no XPU device is available": (
        "This machine has no such device. Remove .cuda() and .to('cuda'): mw.distribute puts the model, and its "
        "loaders their batches, on the device of each worker. Make your own tensors on x.device."
    ),
    r"invalid device ordinal": (
        "A worker sees only its own device. Remove the device index: write .to('cuda') or .to(x.device)."
    ),
}
"""Hints for errors whose text matches a pattern."""
explainers: list[Callable[[BaseException], None]] = []
"""Functions that other parts of the package add to this list. Each may add a note to an error that it recognizes."""


def add_hint(error: BaseException) -> None:
    """Add notes that explain an error to the user. They come from the functions in `explainers` and from `hint`."""
    for explain in explainers:
        with contextlib.suppress(Exception):  # an error in `explain` must not hide the original error
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
    return next((told for pattern, told in _OF_TEXT.items() if re.search(pattern, text)), "")
