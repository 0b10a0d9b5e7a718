"""N bodies that attract each other: each device has some, and calculates the pull of all on its own.

A step moves each body's place to the other devices once, 3 n (devices - 1) numbers: the work grows with the square.

python examples/arrays/nbody.py [--devices 4xcpu] [--bodies 1000] [--steps 20] [--picture nbody.png]
"""

import numpy as np
from shown import arguments, heat_colours, measured, save_png

import meshwise as mw


def disc(bodies, seed=1):
    """A turning disc: masses, places and speeds."""
    rng = np.random.default_rng(seed)
    radius, angle = np.sqrt(rng.random(bodies)), 2 * np.pi * rng.random(bodies)
    flat = np.stack([np.cos(angle), np.sin(angle), 0.05 * rng.standard_normal(bodies)])
    turned = np.stack([-np.sin(angle), np.cos(angle), np.zeros(bodies)])
    return np.full(bodies, 1 / bodies), (radius * flat).T.copy(), (0.8 * np.sqrt(radius) * turned).T.copy()


def pull(xp, masses, places):
    """The acceleration of each body, softened where two meet."""
    apart = places[:, None, :] - places[None, :, :]
    squares = (apart * apart).sum(axis=2) + 1e-3
    return -(apart * (masses / (squares * xp.sqrt(squares)))[:, :, None]).sum(axis=1)


def step(xp, masses, places, speeds, steps, seconds=0.01):
    """Places and speeds after some leapfrog steps. xp: NumPy, or a namespace of meshwise."""
    speeds = speeds + seconds / 2 * pull(xp, masses, places)
    for _ in range(steps):
        places = places + seconds * speeds
        speeds = speeds + seconds * pull(xp, masses, places)
    return places, speeds


def picture(places, side=400):
    """How many bodies are seen at each point from above."""
    seen, _, _ = np.histogram2d(places[:, 1], places[:, 0], bins=side, range=[[-1.5, 1.5], [-1.5, 1.5]])
    return heat_colours(np.sqrt(seen / seen.max()))


def main():
    words = arguments(__doc__, bodies=1000, steps=20, picture="nbody.png")
    start = disc(words.bodies)
    xp = mw.array_namespace(words.devices)
    masses = xp.asarray(start[0], sharding=xp.replicated())
    x, v = map(xp.asarray, start[1:])
    places = measured("N bodies", lambda: step(xp, masses, x, v, words.steps)[0].numpy())
    expected, _ = measured("NumPy", lambda: step(np, *start, words.steps))
    print(f"largest difference of a place: {np.abs(places - expected).max():.1e}")
    save_png(words.picture, picture(places))


if __name__ == "__main__":
    main()
