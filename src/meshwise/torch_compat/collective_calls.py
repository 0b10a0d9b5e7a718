"""Observe every collective that this process begins, and what each moves.

DDP's reducer in C++, `fully_shard` and the program itself may all begin collectives. Each of them calls one operator of
the namespace `c10d` (such as `c10d::allreduce_`). A kernel of this module wraps these operators at the dispatch key
`BackendSelect`, through which every call goes, even in inference mode and from C++. The kernel changes no argument and
no result. If one of the operators is missing, `watch` raises AttributeError and wraps nothing. Each call's `async_op`
says whether the caller waits at once. It never does for sends, receives and functional collectives
(`_c10d_functional`), but on fake tensors torch waits for functional ones at once. Based on torch 2.11, 2.13 and 2.15:
`Ops.cpp` and `Functional.cpp` of `csrc/distributed/c10d`. The end of a collective is observed where the program waits
for it, or else by a thread that also waits. With nccl, a callback of the collective's future runs at once and records
the end on a stream; a blocking collective runs in the current stream.

A gloo group whose collectives were observed is never destroyed before the process ends. Dropping its last reference
would deadlock: the caller holds the GIL and waits for gloo's threads, which need the GIL to free what Python has seen.
Not observed: calls that torch coalesces (`batch_isend_irecv` on nccl), CUDA graphs, and gloo on CUDA tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.spec.user_code import is_users, place
from meshwise.torch_compat.driver import is_capturing
from meshwise.torch_compat.tree import tensors_in

OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
}
"""For each operator: the kind of collective, and the index of the argument that holds its data (None: no data)."""
_groups: dict[int, dist.ProcessGroup] = {}
WAIT: Any = dist.Work.wait
GLOO_THREADS = 2  # threads of a gloo group, each of which runs one collective at a time
SOURCES = (
    ("nn/utils/clip_grad.py", "", "the gradient norm"),
    ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", "parameters"),
    ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce", "gradients"),
    ("distributed/fsdp/_flat_param.py", "", "parameters"),
    ("distributed/fsdp/_runtime_utils.py", "_post_backward", "gradients"),
    ("distributed/algorithms/ddp_comm_hooks/", "", "gradients"),
    ("nn/modules/_functions.py", "", "batch norm"),
    ("nn/parallel/distributed.py", "_sync_buffers", "buffers"),
    ("nn/parallel/distributed.py", "__init__", "start values"),
    ("nn/parallel/distributed.py", "_pre_forward", "bucket sizes"),
    ("distributed/optim/zero_redundancy_optimizer.py", "", "parameters"),
    ("distributed/checkpoint/", "", "the checkpoint"),
)
"""Places in torch that call collectives: the file or folder, the beginning of the function's name, and what is sent."""
ENGINE = ("autograd/graph.py", "_engine_run_backward")
IN_PYTHON = ("distributed/distributed_c10d.py", "torch/_ops.py")
MOST_FRAMES = 60
TORCH = "torch/"


@dataclass(frozen=True)
class Call:
    """Describes a collective operation that begins now.

    of: what the collective sends, such as `gradients`, or the source line of the user's code that calls it.
    size: the number of ranks in its process group.
    blocking: whether the caller waits until the collective has ended, before it does anything else.
    in_python: whether Python code begins the collective, rather than C++ code."""

    kind: str
    of: str
    bytes: int
    dtype: str
    device: str
    size: int
    blocking: bool
    in_python: bool


Ended = Callable[[], None]


def watch(begin: Callable[[Call], Ended | None], waits: Callable[[], Ended | None]) -> Callable[[], None]:
    """Call `begin(call)` whenever a collective begins in any thread of this process. If it returns a function, call
    that function when the collective has ended. Likewise, call `waits()` when the program begins to wait for an
    asynchronous collective, and call what it returns when the wait is over. Return a function that ends the watch."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    ends = _Ends()
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATORS:
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, _kernel(name, operator, after, begin, ends), "BackendSelect", with_keyset=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default

    def wait_kernel(keyset: Any, tensor: Tensor) -> Any:
        with _around(waits):
            return wait_tensor.redispatch(keyset & after, tensor)

    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == dist.distributed_c10d.__file__:  # called by a blocking collective
            with _around(ends.take):
                return WAIT(work, *arguments, **named)
        with _around(waits):
            return WAIT(work, *arguments, **named)

    functional.impl("wait_tensor", wait_kernel, "BackendSelect", with_keyset=True)
    dist.Work.wait = wait  # type: ignore[assignment, method-assign]

    def end() -> None:
        dist.Work.wait = WAIT  # type: ignore[method-assign]
        library._destroy()
        functional._destroy()
        ends.close()

    return end


@contextlib.contextmanager
def _around(begin: Callable[[], Ended | None]) -> Iterator[None]:
    ended = begin()
    try:
        yield
    finally:
        if ended is not None:
            ended()


class _Ends:
    """Calls the callback of each collective when that collective has ended."""

    def __init__(self) -> None:
        self._blocking = threading.local()
        self._running: queue.SimpleQueue[tuple[Any, Ended] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def expect(self, work: Any, call: Call, ended: Ended) -> None:
        """Arrange that `ended()` is called when a collective has ended. work: the handle of the collective."""
        if work is None:  # a blocking nccl call, which runs in the current stream, or a barrier that has ended
            ended()
        elif has_streams(call.device):
            future = work.get_future()
            if future.done():  # nccl: the callback runs now, in a stream that waits for the collective
                future.then(lambda done: ended())
        elif call.blocking and call.in_python:
            self._blocking.ended = ended
        else:
            while len(self._threads) < GLOO_THREADS:
                self._threads.append(threading.Thread(target=self._wait, daemon=True))
                self._threads[-1].start()
            self._running.put((work, ended))

    def take(self) -> Ended | None:
        """Return the callback of the blocking collective that this thread waits for, if any, and forget it."""
        ended: Ended | None = getattr(self._blocking, "ended", None)
        self._blocking.ended = None
        return ended

    def close(self) -> None:
        for _ in self._threads:
            self._running.put(None)

    def _wait(self) -> None:
        while (running := self._running.get()) is not None:
            work, ended = running
            with contextlib.suppress(Exception):  # the program gets the error where it waits
                WAIT(work)
                ended()
            del running, work, ended


def _kernel(
    name: str, operator: Any, after: Any, begin: Callable[[Call], Ended | None], ends: _Ends
) -> Callable[..., Any]:
    kind, moved = OPERATORS[name]

    def kernel(keyset: Any, *arguments: Any) -> Any:
        call = _call(kind, moved, _named(operator, arguments), sys._getframe().f_back)
        ended = None if call is None else begin(call)
        result = operator.redispatch(keyset & after, *arguments)
        work = result[-1] if isinstance(result, tuple) else result
        if call is not None and ended is not None and work is not None:
            ends.expect(dist.Work.unbox(work), call, ended)
        return result

    return kernel


def _call(kind: str, moved: int | None, given: dict[str, Any], frame: FrameType | None) -> Call | None:
    """Describe the collective that begins. Return None if it is not observed."""
    tensors = [] if moved is None else list(tensors_in([*given.values()][moved]))
    group, device = given["process_group"], tensors[0].device.type if tensors else ""
    if dist.distributed_c10d._world.pg_coalesce_state or device == "meta" or not isinstance(group, torch.ScriptObject):
        return None
    if has_streams(device) and is_capturing():
        return None
    of, inside_c = _source(frame)
    blocking = inside_c or not given.get("async_op", kind not in ("send", "receive"))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    its: Any = dist.ProcessGroup.unbox(group)
    if not has_streams(device) and id(its) not in _groups:  # keep gloo groups: freeing one could deadlock (see the top)
        _groups[id(its)] = its
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(its))
    return Call(kind, of, sum(tensor.nbytes for tensor in tensors), dtype, device, its.size(), blocking, not inside_c)


def _source(frame: FrameType | None) -> tuple[str, bool]:
    """Return what a collective sends, in words or as a user's line, and whether torch's C++ code waits for it."""
    frames = list(_frames(frame))
    if not frames or _is(frames[0][0], *ENGINE):  # DDP's reducer: autograd's threads have no Python frame
        return "gradients", False
    (first, _), (last, line) = frames[0], frames[-1]
    inside_c = not first.co_filename.endswith(IN_PYTHON)
    for file, function, of in SOURCES:
        if any(_is(code, file, function) for code, _ in frames):
            return of, inside_c
    if is_users(last.co_filename):
        return place(last.co_filename, line), inside_c
    return ("gradients" if _is(last, *ENGINE) else ""), inside_c


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield (code, line number) of each frame outwards, up to user code, the engine, or MOST_FRAMES."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        if _is(frame.f_code, *ENGINE) or is_users(frame.f_code.co_filename):
            return
        frame = frame.f_back


def _is(code: CodeType, file: str, function: str) -> bool:
    """Return whether `code` is a function of torch in this file or folder whose name begins with `function`."""
    return code.co_name.startswith(function) and f"{TORCH}{file}" in code.co_filename


WAIT_TENSOR = "wait_tensor"


@dataclass(frozen=True)
class Moved:
    """What one operator of torch.distributed moves between ranks.

    kind: the collective, such as `all-gather`, or `wait`.
    tensors: the tensors that are moved: the input of a scatter or reduce-scatter, the output of a gather or all-gather.
    peer: the group rank to which a send goes, or from which a receive comes; None for other operations.
    beside: whether the operator is asynchronous.
    work: the handle of the operation; None if it has none."""

    kind: str
    tensors: tuple[Tensor, ...]
    group: dist.ProcessGroup | None
    peer: int | None = None
    beside: bool = False
    work: Any = None


def moved_by(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    """Return what an operator of torch.distributed moves between ranks. None for any other operator."""
    if operator.namespace == "c10d":
        return _of_group(operator, arguments, result)
    if operator.namespace == "_c10d_functional":
        return _functional(operator, arguments, result)
    return None


def _named(operator: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in operator._schema.arguments), arguments, strict=False))


def _of_group(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    name = operator._schema.name.removeprefix("c10d::")
    if name not in OPERATORS:
        return None
    kind, moved = OPERATORS[name]
    given = _named(operator, arguments)
    tensors = () if moved is None else tuple(tensors_in(arguments[moved]))
    peer = given["dst"] if kind == "send" else given["src"] if kind == "receive" else None
    beside = kind in ("send", "receive") or bool(given.get("async_op", True))
    found = result[-1] if isinstance(result, list | tuple) else result
    work = dist.Work.unbox(found) if isinstance(found, torch.ScriptObject) else None
    return Moved(kind, tensors, dist.ProcessGroup.unbox(given["process_group"]), peer, beside, work)


def _functional(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    name = operator._schema.name.removeprefix("_c10d_functional::")
    if name == WAIT_TENSOR:
        return Moved("wait", (), None)
    kinds = [kind for kind, _ in OPERATORS.values() if name.replace("_", "-").startswith(kind)]
    if not kinds:
        return None
    named = _named(operator, arguments)["group_name"]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group = resolve(named) if isinstance(named, str) else named
    kind = max(kinds, key=len)
    full = result if kind == "all-gather" else arguments[0]
    return Moved(kind, tuple(tensors_in(full)), group, None, True)


def waiting(call: Callable[[Any], None]) -> contextlib.AbstractContextManager[Any]:
    """In the block, call `call(work)` before each `work.wait()` of the program for a collective of torch's fake
    backend."""
    kind: Any = torch._C._distributed_c10d.FakeWork
    real = kind.wait

    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        call(work)
        return real(work, *arguments, **named)

    return patch.object(kind, "wait", wait)
