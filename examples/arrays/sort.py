"""A large sort: each device sorts its part, exact cuts say which elements belong where, and each moves at most once.

python examples/arrays/sort.py [--devices 4xcpu] [--size 10000000]
"""

import numpy as np
from shown import arguments, measured

import meshwise as mw


def main():
    words = arguments(__doc__, size=10_000_000)
    xp = mw.array_namespace(words.devices)
    x = xp.random.default_rng(0).normal(0, 1, words.size)
    values = x.numpy()
    found = measured("xp.sort", lambda: xp.sort(x))
    expected = measured("numpy.sort", lambda: np.sort(values))
    print(f"equal to NumPy's: {np.array_equal(found.numpy(), expected)}")
    quartiles = measured("xp.quantile", lambda: xp.quantile(x, [0.25, 0.5, 0.75]).numpy())
    print(f"quartiles: {quartiles.round(4)}, without a sort of all")


if __name__ == "__main__":
    main()
