"""Loads the operators that compute (operators.cpp), at the end of torch's import, and says what was used.

DNN and the attention kernels that only a GPU has are switched off; `counts()` and `calls()` are for tests. Under
FAKE_CUDA_LEAKS=1 a program ends with an error where something is left that it has made.
"""

import atexit
import ctypes
import gc
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent
COUNTS = ("streams", "events", "pinned bytes", "device bytes", "peak bytes", "launches outside of operators")


LEFT = {
    "streams": (128, "cudaStreamCreateWithPriority"),  # torch's own pools, which it never ends
    "events": (8, "cudaEventCreateWithFlags"),  # of autograd and the allocators
    "pinned bytes": (0, "cudaHostAlloc or cudaHostRegister"),
    "device bytes": (0, "cudaMalloc"),
}
"""What may be left of a device at a program's end, and the call that made it."""


def load() -> None:
    import torch

    torch.ops.load_library(str(FOLDER / "operators.so"))
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("FAKE_CUDA_LEAKS") == "1":
        atexit.register(_at_exit)


def _at_exit() -> None:
    for name in [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")]:
        delattr(sys.modules["__main__"], name)
    end_without_leaks()


def end_without_leaks() -> None:
    """End with 70 where more than LEFT is left of a device, once what torch keeps for later use is let go."""
    import torch

    if not torch.cuda.is_initialized():
        return
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch._C._host_emptyCache()
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        for name, count in counts(device).items():
            most, call = LEFT.get(name, (count, ""))
            if count > most:
                print(f"fake CUDA: device {device}: {count} {name} that {call} made are left at exit", file=sys.stderr)
                sys.stderr.flush()
                os._exit(70)


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
