"""What the host does with a NumPy view, and with buffers that files get. Of torch_compat/c_methods.py too."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from meshwise.checker.races import host

USES: dict[str, tuple[Any, ...]] = {
    "reads": (lambda v: v.sum(), lambda v: v[1, 2], lambda v: v.tolist(), lambda v: np.concatenate([v, v])),
    "reads by files": (lambda v: io.BytesIO().write(v),),
    "writes": (lambda v: v.__iadd__(1), lambda v: v.__setitem__(0, 5), lambda v: np.add(1, 1, out=v)),
    "writes by functions": (lambda v: np.copyto(v, 2), lambda v: np.add.at(v, 0, 1), lambda v: v.fill(0)),
    "writes by files": (lambda v: io.BytesIO(bytes(8)).readinto(memoryview(v)),),
    "": (lambda v: (v.shape, v[0], v.T, np.reshape(v, -1), memoryview(v), len(v)),),
}


def test_elements_that_are_read_or_written_are_told() -> None:
    methods = io.BytesIO.write, io.FileIO.readinto
    for kind, use in [(kind, use) for kind, uses in USES.items() for use in uses]:
        told = [""]
        with host.listen(lambda used, writes, by, told=told: told.append("writes" if writes else "reads")):
            use(np.arange(12.0).reshape(3, 4).view(host.PinnedArray))
        assert max(told) == kind.partition(" ")[0], (kind, told)
    assert methods == (io.BytesIO.write, io.FileIO.readinto)
