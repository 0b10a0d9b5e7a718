"""Add notes to errors of Python and torch that meshwise recognises."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from types import FrameType

from torch import Tensor, nn
from torch.nn.parallel import distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.spec.words import text_of

DDP_FILE = distributed.__file__
BACKWARD = "meshwise.script.distribute", "backward"
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
_OTHER_KIND = re.compile(r"'?(\w+)'? object (?:is not callable|is not iterable|has no attribute '(?:step|zero_grad)')")
_UNPACKED = re.compile(r"cannot unpack non-iterable (\w+) object")


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
        if any(frame.f_code.co_filename == DDP_FILE for frame in _frames(error)):
            return "Remove DistributedDataParallel: mw.distribute takes the model itself, and averages its gradients."
        return "mw.distribute makes the process group: call it before you use torch.distributed."
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
    if isinstance(error, TypeError | AttributeError) and _is_swapped(error, text):
        return "mw.distribute returns things in the order of its arguments: compare the names on the left side."
    loss = [f.f_locals["loss"] for f in _frames(error) if (f.f_globals.get("__name__"), f.f_code.co_name) == BACKWARD]
    if loss and not isinstance(loss[0], Tensor):
        return f"mw.backward takes the loss, a tensor of one number, but was passed a {type(loss[0]).__name__}."
    return ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_swapped(error: BaseException, text: str) -> bool:
    """Check whether a program assigned the results of mw.distribute to the wrong variables, such as the model to
    `optimizer`."""
    match = _OTHER_KIND.search(text) or _UNPACKED.search(text)
    held = [
        value
        for frame in _frames(error)
        if "distribute" in frame.f_code.co_names
        for value in frame.f_locals.values()
        if isinstance(value, nn.Module | Optimizer | LRScheduler) or type(value).__name__ == "DistributedLoader"
    ]
    return match is not None and match[1] in {type(value).__name__ for value in held}
