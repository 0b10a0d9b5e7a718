"""Principal components of a tall table, rows divided over devices, by a singular value decomposition.

Each device factors its rows; the small triangular factors meet on one, columns^2 numbers from each device, and as much
goes back. Neither the table nor its covariance is on one device.

python examples/arrays/pca.py [--devices 4xcpu] [--rows 200000] [--columns 40] [--picture pca.png]
"""

import numpy as np
from shown import arguments, heat_colours, measured, save_png

import meshwise as mw


def table(rows, columns, seed=2):
    """Measurements that four hidden causes explain, and noise."""
    rng = np.random.default_rng(seed)
    causes = rng.standard_normal((rows, 4)) * [8, 4, 2, 1]
    causes[:, 1] += causes[:, 0] ** 2 / 12
    return causes @ rng.standard_normal((4, columns)) + 0.5 * rng.standard_normal((rows, columns)) + 3


def principal(xp, values, count):
    """Scores and directions of the first components, and the share of the variance of each. xp: NumPy, or meshwise."""
    centred = values - values.mean(axis=0)
    u, s, vh = xp.linalg.svd(centred, full_matrices=False)
    return u[:, :count] * s[:count], vh[:count], s[:count] ** 2 / (s**2).sum()


def main():
    words = arguments(__doc__, rows=200_000, columns=40, picture="pca.png")
    values = table(words.rows, words.columns)
    xp = mw.array_namespace(words.devices)
    x = xp.asarray(values)
    scores, ways, shares = measured("components", lambda: [y.numpy() for y in principal(xp, x, 4)])
    expected = measured("NumPy", lambda: principal(np, values, 4))
    sign = np.sign((ways * expected[1]).sum(axis=1))
    print(f"largest difference of a direction: {np.abs(ways * sign[:, None] - expected[1]).max():.1e}")
    print(f"shares of the variance: {shares.round(4)}")
    seen, _, _ = np.histogram2d(scores[:, 1], scores[:, 0], bins=400)
    save_png(words.picture, heat_colours(np.log1p(seen) / np.log1p(seen).max()))


if __name__ == "__main__":
    main()
