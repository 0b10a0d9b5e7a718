"""A film effect: spheres over a mirror floor, ray-marched, rows of the picture divided over devices, frame by frame.

Each ray goes on by the distance to what is nearest, until it is there. A pixel needs no other: nothing moves between
devices but the coordinates of a row of pixels, once, and the finished picture is read.

python examples/arrays/film.py [--devices 4xcpu] [--width 480] [--frames 1] [--picture film.png]
"""

import math

import numpy as np
from shown import arguments, measured, save_png

import meshwise as mw

LIGHT = (0.48, 0.8, -0.36)
SPHERES = [((-1.1, 0.6, 0.6), 0.6, (0.95, 0.35, 0.2)), ((0.2, 0.8, 1.6), 0.8, (0.25, 0.6, 0.95))]
SMALL = ((0.9, 0.35, 0.1), 0.35, (0.95, 0.85, 0.3))


def scene(time):
    """The spheres (centre, radius, colour) at a time from 0 to 1: the small one goes around."""
    turn = 2 * math.pi * time
    (x, y, z), radius, colour = SMALL
    return [*SPHERES, ((x + 0.4 * math.sin(turn), y, z + 0.4 * math.cos(turn)), radius, colour)]


def distance(xp, p, spheres):
    """From points to the nearest of the spheres and the floor."""
    nearest = p[1]
    for centre, radius, _ in spheres:
        away = [a - b for a, b in zip(p, centre, strict=True)]
        nearest = xp.minimum(nearest, xp.sqrt(dot(away, away)) - radius)
    return nearest


def dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def march(xp, origin, ray, spheres, steps):
    """(points where rays end, how far that is)."""
    far = xp.zeros_like(ray[0])
    for _ in range(steps):
        far = far + xp.clip(distance(xp, along(origin, ray, far), spheres), 0.0, 4.0)
    return along(origin, ray, far), far


def along(origin, ray, far):
    return [a + b * far for a, b in zip(origin, ray, strict=True)]


def colours(xp, p, far, ray, spheres):
    """(red, green, blue, how much of it is a mirror) where rays end: lit from one side, a chequered floor, a sky."""
    e = 1e-3
    around = [[a + (e if k == axis else 0.0) for k, a in enumerate(p)] for axis in range(3)]
    here = distance(xp, p, spheres)
    slope = [distance(xp, each, spheres) - here for each in around]
    length = xp.sqrt(dot(slope, slope)) + 1e-12
    lit = xp.clip(dot(slope, LIGHT) / length, 0.0, 1.0)
    shadow_of = [a + 0.02 * n / length for a, n in zip(p, slope, strict=True)]
    _, free = march(xp, shadow_of, same_ray(xp, far, LIGHT), spheres, 24)
    lit = xp.where(free > 8, lit, 0.25 * lit)
    tiles = xp.where((xp.floor(p[0] * 2) + xp.floor(p[2] * 2)) % 2 > 0, 0.25, -0.25)
    chequer = 0.6 + tiles * xp.exp(-0.02 * far * far)  # far away they are too small to be told apart
    found = [chequer, chequer, chequer]
    mirror = xp.full_like(far, 0.35)
    for centre, radius, colour in spheres:
        away = [a - b for a, b in zip(p, centre, strict=True)]
        on = xp.sqrt(dot(away, away)) - radius < 0.01
        found = [xp.where(on, c, before) for c, before in zip(colour, found, strict=True)]
        mirror = xp.where(on, 0.15, mirror)
    sky = xp.clip(ray[1], 0.0, 1.0)
    away = far > 20
    skies = [0.75 - 0.45 * sky, 0.85 - 0.35 * sky, 0.98 - 0.1 * sky]
    shades = [xp.where(away, s, f * (0.25 + 0.75 * lit)) for s, f in zip(skies, found, strict=True)]
    return shades, xp.where(away, 0.0, mirror), [n / length for n in slope]


def same_ray(xp, like, vector):
    return [xp.full_like(like, a) for a in vector]


def frame(xp, width, time=0.0, steps=90):
    """(rows, columns, 3): the picture at a time. xp: NumPy, or an array namespace of meshwise."""
    height = width * 9 // 16
    y, x = xp.meshgrid(xp.linspace(0.56, -0.56, height), xp.linspace(-1.0, 1.0, width), indexing="ij")
    spheres = scene(time)
    ray = [x, y - 0.15, xp.full_like(x, 1.4)]
    length = xp.sqrt(dot(ray, ray))
    ray = [a / length for a in ray]
    eye = same_ray(xp, x, (0.0, 1.0, -3.2))
    p, far = march(xp, eye, ray, spheres, steps)
    shades, mirror, normal = colours(xp, p, far, ray, spheres)
    turned = dot(ray, normal)
    back = [a - 2 * turned * n for a, n in zip(ray, normal, strict=True)]
    off = [a + 0.02 * n for a, n in zip(p, normal, strict=True)]
    p, far = march(xp, off, back, spheres, steps // 2)
    seen, _, _ = colours(xp, p, far, back, spheres)
    return xp.stack([a * (1 - mirror) + b * mirror for a, b in zip(shades, seen, strict=True)], axis=-1)


def main():
    words = arguments(__doc__, width=480, frames=1, picture="film.png")
    xp = mw.array_namespace(words.devices, default_float="float32")
    for number in range(words.frames):
        name = f"frame {number} on {words.devices}"
        picture = measured(name, lambda time=number / words.frames: frame(xp, words.width, time).numpy())
        path = words.picture if words.frames == 1 else words.picture.replace(".", f"_{number:03}.")
        save_png(path, picture)
    measured("NumPy, float64", lambda: frame(np, words.width, number / words.frames))


if __name__ == "__main__":
    main()
