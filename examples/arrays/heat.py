"""The heat equation on a plate: rows divided over devices, slices of the array written as in NumPy, and a picture.

A step needs a row of each neighbour. The shifted slices `u[2:]` and `u[:-2]` bring it: two rows at each border of two
devices and no more, since the terms that lie alike are added first. Or torch computes each part, given with its halo.

python examples/arrays/heat.py [--devices 4xcpu] [--size 600] [--steps 500] [--picture heat.png]
"""

import numpy as np
from shown import arguments, heat_colours, measured, save_png

import meshwise as mw


def plate(size):
    """Cold, with a hot upper edge, and a hot disc in the middle."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1)
    u = ((x - 0.5) ** 2 + (y - 0.55) ** 2 < 0.15**2).astype(np.float64)
    u[0, :] = 1.0
    return u


def heat(xp, u, steps, rate=0.24):
    """`u` after some steps. xp: NumPy, or an array namespace of meshwise."""
    u = xp.asarray(u, copy=True)
    for _ in range(steps):
        flow = u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        u[1:-1, 1:-1] += rate * (flow + u[2:, 1:-1] + u[:-2, 1:-1])
    return u


def heat_with_halos(xp, u, steps, rate=0.24):
    """The same on the tensors of the parts, each with a row of its neighbours."""

    def step(part):  # the outer rows and columns stay; those of the halo are cut away
        new = part.clone()
        flow = part[2:, 1:-1] + part[:-2, 1:-1] + part[1:-1, 2:] + part[1:-1, :-2] - 4 * part[1:-1, 1:-1]
        new[1:-1, 1:-1] += rate * flow
        return new

    u = xp.asarray(u)
    for _ in range(steps):
        u = mw.map_shards(step, u, halo=1)
    return u


def main():
    words = arguments(__doc__, size=600, steps=500, picture="heat.png")
    start = plate(words.size)
    xp = mw.array_namespace(words.devices)
    u = measured(f"heat on {words.devices}", lambda: heat(xp, start, words.steps).numpy())
    parts = measured("by parts with halos", lambda: heat_with_halos(xp, start, words.steps).numpy())
    expected = measured("NumPy", lambda: heat(np, start, words.steps))
    print(f"largest differences: {np.abs(u - expected).max():.1e}, {np.abs(parts - expected).max():.1e}")
    save_png(words.picture, heat_colours(u))


if __name__ == "__main__":
    main()
