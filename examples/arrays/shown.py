"""What the examples of this folder share: the devices of the command line, seconds and bytes, a picture as a PNG."""

import argparse
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import torch

import meshwise as mw


def arguments(description, **defaults):
    """The words of the command line: --devices, and one for each default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    several = torch.cuda.device_count() > 1
    parser.add_argument("--devices", default="cuda" if several else "2xcpu", help="such as cuda, or 4xcpu to try it")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def measured(name, run):
    """What `run` gives, after a line with its seconds and with the bytes that moved between devices."""
    with mw.comm_log() as log:
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
    moved = sum(row.bytes for row in log if "host" not in (row.source, row.target))
    print(f"{name:<24} {seconds:8.3f} s  {moved:>12,} bytes moved between devices")
    return result


def save_png(path, picture):
    """Write a picture, (rows, columns) or (rows, columns, 3) of numbers from 0 to 1, as a PNG file."""
    levels = (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
    colours = levels if levels.ndim == 3 else np.repeat(levels[..., None], 3, axis=2)
    rows, columns, _ = colours.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), colours.reshape(rows, columns * 3)], axis=1)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    print(f"picture: {path}")


def heat_colours(values):
    """Numbers from 0 to 1 as colours from black over red and yellow to white."""
    return np.stack([np.clip(3 * values - k, 0, 1) for k in range(3)], axis=-1)
