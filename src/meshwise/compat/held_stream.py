"""Hold a CUDA stream, so that what is enqueued behind it starts without waiting for the host.

`torch.cuda._sleep` is what PyTorch's own tests use for this; it is private, and here alone.
"""

from __future__ import annotations

import torch

CYCLES_A_SECOND = 2_000_000_000  # of the fastest devices; on a slower one the stream is held a little longer


def hold_stream(seconds: float) -> bool:
    """Keep the current CUDA stream busy for about `seconds`; False where this torch cannot."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is None:
        return False
    sleep(int(seconds * CYCLES_A_SECOND))
    return True
