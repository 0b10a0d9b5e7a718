"""Tutorial 2's CuPy example in its correct form: an array copied from GPU 0 to GPU 1, and work on both at once.

The tutorial's `cp.copy(a, b)` copies nothing into `b`, `cp.arange(n, device=0)` is no call of CuPy, and its two
computations run one after the other on the current GPU. Here `mw.copy` crosses devices, and each computation runs
under its own device. Tensors and CuPy arrays share memory through DLPack: what stays where it is, is not copied.

python examples/10_cupy_and_dlpack.py [--size 10000000]

With one GPU both ends are that one. Without CuPy and a GPU, NumPy on the host stands in, and the program says so.
"""

import argparse
from contextlib import nullcontext

import numpy as np
import torch

import meshwise as mw

try:
    import cupy as xp

    gpus = min(xp.cuda.runtime.getDeviceCount(), torch.cuda.device_count())
except Exception:  # not installed, or installed on a machine without a driver
    gpus = 0
if not gpus:
    xp = np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=10_000_000)
    size = parser.parse_args().size
    if gpus:
        first, second = xp.cuda.Device(0), xp.cuda.Device(min(1, gpus - 1))
        target = f"cuda:{second.id}"
    else:
        first, second, target = nullcontext(), nullcontext(), "cpu"
        print("CuPy with a GPU is not here, so this is NumPy on the host. With a GPU: pip install cupy-cuda12x")

    with first:
        a = xp.arange(size, dtype=xp.float32)
    tensor = torch.empty(size, device=target)
    with mw.comm_log() as log:
        mw.copy(tensor, a, verify=True)  # from GPU 0 to GPU 1, from CuPy to torch
    print(log)

    with second:
        b = xp.from_dlpack(tensor)
    tensor[0] = 9
    print("written by torch, read by the array:", float(b[0]))

    # Launches return at once: one thread keeps both GPUs busy.
    with first:
        doubled = a * 2
    with second:
        rooted = xp.sqrt(b)
    print("a * 2   =", [float(value) for value in doubled[:4]])
    print("sqrt(b) =", [round(float(value), 3) for value in rooted[:4]])


if __name__ == "__main__":
    main()
