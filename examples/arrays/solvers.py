"""A system of equations whose matrix no one device holds: Jacobi's method and conjugate gradients, as in NumPy.

The matrix is made in parts, a block of rows on each device; a step sends each device the entries of the vector that it
has not, n (devices - 1) numbers, and a number for each product of two vectors.

python examples/arrays/solvers.py [--devices 4xcpu] [--size 3000]
"""

import numpy as np
from shown import arguments, measured

import meshwise as mw


def equations(xp, n):
    """A symmetric matrix that decays off its diagonal, and a right-hand side. xp: NumPy, or a namespace of meshwise."""
    i = xp.arange(n, dtype=xp.float64)
    matrix = xp.exp(-xp.abs(i[:, None] - i[None, :]) / 2) + 4 * (i[:, None] == i[None, :])
    return matrix, xp.sin(i)


def jacobi(xp, matrix, b, steps):
    """Each unknown from its own equation, with the others of the step before."""
    diagonal = xp.linalg.diagonal(matrix)
    x = xp.zeros_like(b)
    for _ in range(steps):
        x = x + (b - matrix @ x) / diagonal
    return x


def conjugate_gradients(xp, matrix, b, tolerance=1e-10):
    """The solution, and after how many steps the residual is below `tolerance`."""
    x, r = xp.zeros_like(b), b
    direction, size = r, r @ r
    steps = 0
    while float(size) > tolerance**2 and steps < 10 * b.shape[0]:
        image = matrix @ direction
        share = size / (direction @ image)
        x, r = x + share * direction, r - share * image
        before, size = size, r @ r
        direction = r + size / before * direction
        steps += 1
    return x, steps


def main():
    words = arguments(__doc__, size=3000, steps=60)
    xp = mw.array_namespace(words.devices)
    matrix, b = equations(xp, words.size)
    expected = np.linalg.solve(*equations(np, words.size))
    x = measured("Jacobi", lambda: jacobi(xp, matrix, b, words.steps).numpy())
    print(f"largest difference from numpy.linalg.solve: {np.abs(x - expected).max():.1e}")
    x, steps = measured("conjugate gradients", lambda: conjugate_gradients(xp, matrix, b))
    print(f"largest difference: {np.abs(x.numpy() - expected).max():.1e}, after {steps} steps")
    x = measured("xp.linalg.solve", lambda: xp.linalg.solve(matrix, b).numpy())
    print(f"largest difference: {np.abs(x - expected).max():.1e}")


if __name__ == "__main__":
    main()
