"""Fake a process group of any size in one process.

Collectives send nothing. Every other rank is assumed to hold the same data and to make the same calls as this one.

The collectives are those of torch's own `fake` backend, which is part of torch's test utilities. Code that compares
facts through the store, or sends objects, needs answers: these are given as if every rank had made the same call.
Based on torch 2.11, 2.13 and 2.15: `testing/_internal/distributed/fake_pg.py`, `distributed_c10d.py`. In 2.13:
`distributed/tensor/_sharding_prop.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwise.torch_compat import fake, fake_device
from meshwise.torch_compat.dispatch import real_values

_Backend = torch._C._distributed_c10d.Backend
_MESH_METHODS = ("__init__", "_concatenate", "__getitem__", "_flatten", "_unflatten")
"""Methods of `DeviceMesh` that read ranks from tensors. They must run with real tensors."""


class _Store:
    """A key-value store that answers as if every rank had made the same calls as this one."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._counts: dict[str, int] = {}
        self._facts: dict[str, str] = {}

    def add(self, key: str, count: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + count * self.ranks
        return self._counts[key]

    def compare_set(self, key: str, expected: str, fact: str) -> bytes:
        return self._facts.setdefault(key, fact).encode()

    def set(self, key: str, fact: str) -> None:
        self._facts[key] = fact

    def get(self, key: str) -> bytes:
        return self._facts[key].encode()


@contextmanager
def resizing(call: Callable[[Tensor, int], None]) -> Iterator[None]:
    """Within the context, call `call(tensor, bytes)` whenever FSDP2 resizes a tensor's storage."""
    real = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def alloc(tensor: Tensor) -> None:
        call(tensor, tensor.numel() * tensor.itemsize)
        real[0](tensor)

    def free(tensor: Tensor) -> None:
        call(tensor, 0)
        real[1](tensor)

    with patch.multiple(_fsdp_param, alloc_storage=alloc, free_storage=free):
        yield


@contextmanager
def start_values_unread() -> Iterator[None]:
    """Within the context, let `torch.nn.init.trunc_normal_` initialize tensors without reading their values, which fake
    tensors do not have."""

    def drawn(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        with torch.no_grad():
            return tensor.normal_()

    with patch.object(torch.nn.init, "_no_grad_trunc_normal_", drawn):
        yield


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Within the context, make this process rank `rank` in a process group of `size` ranks."""
    if size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store, hook = _Store(size), sys.excepthook
    kinds = ("cpu", *([fake_device.NAME] if fake_device.is_there() else []))
    backends = ",".join(f"{kind}:fake" for kind in kinds)
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
            patch.object(dist.ProcessGroup, "_has_hooks", lambda group: False),  # the original warns for a fake group
            # A fake backend does not count collectives.
            patch.object(_Backend, "_get_sequence_number_for_group", lambda backend: 0),
            patch.object(dist, "all_gather_object", _of_all),
            patch.object(dist, "broadcast_object_list", lambda box, **others: None),
            patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
            patch.object(_sharding_prop, "detect_fake_mode", lambda *inputs: fake.plain_mode()),
            # A deep copy of a model copies its DTensors. The copies must keep the same mesh.
            patch.object(DeviceMesh, "__deepcopy__", lambda mesh, memo: mesh, create=True),
            patch.multiple(DeviceMesh, **{name: _on_real(name) for name in _MESH_METHODS if hasattr(DeviceMesh, name)}),
        ):
            try:
                yield
            finally:
                dist.destroy_process_group()
                # Meshes of the same layout are equal, even on different ranks. DTensor's caches could give the next
                # rank this rank's groups, whose names may then belong to other groups.
                _clear_sharding_prop_cache()
    finally:
        sys.excepthook = hook  # undo torch's hook, which names a rank in each line of a traceback


class _Chunks(Sequence[Tensor]):
    """The `count` chunks of a tensor, made on demand: FSDP2 reads only two of them."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        length = self._tensor.size(self._dim)
        size = -(-length // self._count)
        if not 0 <= place < self._count:
            raise IndexError(place)
        if place and place * size >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, place * size, min(size, length - place * size))


def _of_all(parts: list[Any], value: Any, group: Any = None) -> None:
    parts[:] = [value] * len(parts)


def _on_real(name: str) -> Any:
    """Wrap a method of `DeviceMesh` so that it runs with real tensors."""
    method = DeviceMesh.__dict__[name]

    def real(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def without_modes(*args: Any, **kwargs: Any) -> Any:
            with real_values():
                return call(*args, **kwargs)

        return without_modes

    return staticmethod(real(method.__func__)) if isinstance(method, staticmethod) else real(method)
