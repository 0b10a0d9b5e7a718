"""Conway's Game of Life on a torus whose rows are divided over devices: `roll` brings the rows of the neighbours.

Rows are added before columns, so that a generation moves two rows at each border of two devices, one byte a cell.

python examples/arrays/life.py [--devices 4xcpu] [--size 512] [--generations 300] [--picture life.png]
"""

import numpy as np
from shown import arguments, measured, save_png

import meshwise as mw


def life(xp, cells, generations):
    """(the cells after so many generations, for each cell how many of these it lived). xp: NumPy, or ours."""
    cells = xp.asarray(cells)
    lived = xp.zeros_like(cells, dtype=xp.int32)
    for _ in range(generations):
        three = cells + xp.roll(cells, 1, axis=0) + xp.roll(cells, -1, axis=0)
        nine = three + xp.roll(three, 1, axis=1) + xp.roll(three, -1, axis=1)
        cells = xp.astype((nine == 3) | ((cells == 1) & (nine == 4)), xp.uint8)
        lived += cells
    return cells, lived


def main():
    words = arguments(__doc__, size=512, generations=300, picture="life.png")
    start = (np.random.default_rng(7).random((words.size, words.size)) < 0.3).astype(np.uint8)
    xp = mw.array_namespace(words.devices)
    cells, lived = measured(f"life on {words.devices}", lambda: [x.numpy() for x in life(xp, start, words.generations)])
    expected, _ = measured("NumPy", lambda: life(np, start, words.generations))
    print(f"{cells.sum():,} of {cells.size:,} cells live; as NumPy's: {np.array_equal(cells, expected)}")
    save_png(words.picture, 0.75 * lived / lived.max() + 0.25 * cells)


if __name__ == "__main__":
    main()
