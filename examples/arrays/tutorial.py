"""The tutorial's arrays: ten million numbers on each of two devices, * 2 and sqrt, and a copy from one to the other.

The tutorial's `cp.copy(a, b)` copies nothing into b, and its ufuncs run on the current device only. Here an operation
runs where its array lies, devices work side by side, and one array may lie on all of them.

python examples/arrays/tutorial.py [--devices 2xcpu] [--size 10000000]
"""

from shown import arguments, measured

import meshwise as mw


def on_two_devices(xp, size):
    """An array on each end of the list of devices."""
    first, last = xp.devices[0], xp.devices[-1]
    a = xp.arange(size, dtype="float32", device=first)
    b = xp.arange(size, dtype="float32", device=last)
    doubled = a * 2  # on the first
    roots = xp.sqrt(b)  # on the last, at the same time
    b[...] = a  # the copy: into b, on its device
    return doubled, roots, b


def on_all_devices(xp, size):
    """One array, a part of it on each device: the same lines, and nothing to copy."""
    x = xp.arange(size, dtype="float32")
    return xp.sqrt(x) * 2


def main():
    words = arguments(__doc__, size=10_000_000)
    xp = mw.array_namespace(words.devices)
    doubled, roots, copied = measured("two arrays, two devices", lambda: on_two_devices(xp, words.size))
    print(f"a * 2 on {doubled.device}, sqrt(b) on {roots.device}, a copied to {copied.device}")
    whole = measured("one array, all devices", lambda: on_all_devices(xp, words.size))
    print(f"parts of {[len(part) for part in whole.shards]}, mean {float(whole.mean()):.3f}")


if __name__ == "__main__":
    main()
