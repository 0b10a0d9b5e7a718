"""Workers from Python: `mw.launch` calls a function once on every device, inside one process group.

Tutorial 3 initialises and destroys the process group by hand; here it is there when the function begins.

python examples/07_launch.py
"""

import torch
import torch.distributed as dist

import meshwise as mw


def add_ranks() -> tuple[int, int, float]:
    value = torch.tensor(float(dist.get_rank()))
    dist.barrier()
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


if __name__ == "__main__":
    for rank, size, total in mw.launch(add_ranks, devices="3xcpu"):
        print(f"rank {rank} of {size}: the ranks add up to {total:.0f}")
