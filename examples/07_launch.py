"""Workers from Python: `mw.launch` calls a function once on every device, and gives back what each call returned.

Tutorial 3 initialises the process group by hand, and destroys it at the end. Here the group is there when the function
begins and gone when it returns, so torch.distributed can be used at once.

python examples/07_launch.py
"""

import torch
import torch.distributed as dist

import meshwise as mw


def add_ranks(start: float) -> tuple[int, int, float]:
    value = torch.tensor(start + dist.get_rank())
    dist.barrier()
    dist.all_reduce(value)  # the sum over all ranks, on every rank
    return dist.get_rank(), dist.get_world_size(), value.item()


if __name__ == "__main__":
    for rank, size, total in mw.launch(add_ranks, 10.0, devices="3xcpu"):
        print(f"rank {rank} of {size}: 10 + 11 + 12 = {total:.0f}")
