"""Tutorial 2's transfer: a random 10000 × 10000 tensor made on one device and moved to another.

The tutorial writes `tensor.to("cuda:1")`, which is silently wrong on some machines. `mw.to` takes the faster path,
names it, and with verify=True proves that every bit arrived.

python examples/09_transfer.py [--size 10000] [--verify]

Two GPUs, else a GPU and the host; without a GPU two virtual devices, which show the same program without its speed.
"""

import argparse
from contextlib import nullcontext

import torch

import meshwise as mw


def ends() -> tuple[str, str]:
    """Where the tensor is made and where it goes."""
    count = torch.cuda.device_count()
    if count > 1:
        return "cuda:0", "cuda:1"
    return ("cuda:0", "cpu") if count else ("cpu:0", "cpu:1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--verify", action="store_true")
    words = parser.parse_args()
    source, target = ends()
    with mw.virtual_devices(2) if source == "cpu:0" else nullcontext():
        tensor = torch.randn(words.size, words.size, device=source)
        print(f"made on {mw.device_of(tensor)}")
        with mw.comm_log() as log:
            moved = mw.to(tensor, target, verify=words.verify)
            back = mw.to(moved, source, verify=words.verify)
        print(f"moved to {mw.device_of(moved)} and back: the same: {torch.equal(back, tensor)}")
    print(log)


if __name__ == "__main__":
    main()
