"""k-means: points divided over devices, centres on each of them; a step moves sums of the centres' size alone.

python examples/arrays/kmeans.py [--devices 4xcpu] [--points 300000] [--centres 8] [--steps 20] [--picture kmeans.png]
"""

import numpy as np
from shown import arguments, measured, save_png

import meshwise as mw


def clouds(points, centres, seed=0):
    """Points of the unit square around some centres."""
    rng = np.random.default_rng(seed)
    middles = rng.random((centres, 2))
    return (middles[rng.integers(0, centres, points)] + 0.05 * rng.standard_normal((points, 2))).clip(0, 1)


def kmeans(xp, points, centres, steps):
    """The centres after some steps, and to which of them each point belongs. xp: NumPy, or a namespace of meshwise."""
    kinds = xp.arange(centres.shape[0])
    for _ in range(steps):
        distances = xp.stack([((points - centre) ** 2).sum(axis=1) for centre in centres], axis=1)
        nearest = xp.argmin(distances, axis=1)
        belongs = xp.astype(nearest[:, None] == kinds, points.dtype)
        sums, counts = belongs.T @ points, xp.sum(belongs, axis=0)
        centres = xp.where(counts[:, None] > 0, sums / xp.maximum(counts, 1.0)[:, None], centres)
    return centres, nearest


def picture(points, nearest, centres, side=500):
    """Each point in the colour of its centre."""
    colours = np.random.default_rng(5).random((centres, 3)) * 0.8 + 0.2
    image = np.zeros((side, side, 3))
    x, y = (points * (side - 1)).astype(int).T
    image[y, x] = colours[nearest]
    return image


def main():
    words = arguments(__doc__, points=300_000, centres=8, steps=20, picture="kmeans.png")
    points = clouds(words.points, words.centres)
    xp = mw.array_namespace(words.devices)
    x, start = xp.asarray(points), xp.asarray(points[: words.centres], sharding=xp.replicated())
    centres, nearest = measured("k-means", lambda: [y.numpy() for y in kmeans(xp, x, start, words.steps)])
    expected, _ = measured("NumPy", lambda: kmeans(np, points, points[: words.centres], words.steps))
    print(f"largest difference of a centre: {np.abs(centres - expected).max():.1e}")
    save_png(words.picture, picture(points, nearest, words.centres))


if __name__ == "__main__":
    main()
