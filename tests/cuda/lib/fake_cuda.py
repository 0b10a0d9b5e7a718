"""Loads the operators that compute (operators.cpp), at the end of torch's import, and says what was used.

DNN and the attention kernels that only a GPU has are switched off; `counts()` and `calls()` are for tests.
"""

import ctypes
from pathlib import Path

FOLDER = Path(__file__).parent.parent
COUNTS = ("streams", "events", "pinned bytes", "device bytes", "peak bytes", "launches outside of operators")


def load() -> None:
    import torch

    torch.ops.load_library(str(FOLDER / "operators.so"))
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def counts(device: int = 0) -> dict[str, int]:
    """What lives now: streams and events that were made, bytes of pinned and device memory."""
    library = ctypes.CDLL(str(FOLDER / "libcudart.so"))
    library.fake_count.restype = ctypes.c_long
    return {name: library.fake_count(what, device) for what, name in enumerate(COUNTS)}


def calls() -> dict[str, int]:
    """How often each operator was computed."""
    library = ctypes.CDLL(str(FOLDER / "operators.so"))
    library.fake_operator_calls.restype = ctypes.c_long
    room = library.fake_operator_calls(None, 0) + 65536
    text = ctypes.create_string_buffer(room)
    library.fake_operator_calls(text, room)
    return {name: int(count) for name, count in (line.split() for line in text.value.decode().splitlines())}
