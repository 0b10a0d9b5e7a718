"""Record a rehearsed program's launches, allocations and frees.

They are recorded one operator at a time.

An operator that returns a view or only allocates memory launches nothing. Memory is recorded per storage. It is
allocated when an operator first returns a tensor on the storage, and freed when the last such tensor is deleted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.planner.async_collectives import AsyncCollectives
from meshwise.planner.operators import MATMULS
from meshwise.planner.places import Places
from meshwise.planner.timing import call_of
from meshwise.planner.work import MAIN, PHASES, Allocate, CollectiveOperation, Copy, Event, Free, Launch, Operation
from meshwise.torch_compat import fake_device
from meshwise.torch_compat.collective_calls import Moved, moved_by
from meshwise.torch_compat.dispatch import gives_view, operator_name, written_arguments
from meshwise.torch_compat.fake import Call, sums_in_place
from meshwise.torch_compat.fake_values import may_differ
from meshwise.torch_compat.profiling import flops_of
from meshwise.torch_compat.tree import tensors_in

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
TAKES_MEMORY = {
    "_unsafe_view",
    "scalar_tensor",
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
"""Operators that only allocate or reshape memory, without launching a kernel."""
ON_HOST = {"cpu", "meta"}
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operators that pass values to the program, or return a tensor whose size depends on values."""


class Record:
    """Records the events of one rank in a rehearsal: launches, allocations and frees."""

    def __init__(self, device: str) -> None:
        """device: the type of the device that computes."""
        self.device = device
        self.events: list[Event] = []
        self.places = Places()
        self.collectives = AsyncCollectives()
        self.reads_values = False
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._alive: dict[int, Allocate] = {}
        self._categories: dict[int, str] = {}
        self._next = 0
        self._operations: dict[Operation, Operation] = {}
        self._names: dict[str, str] = {}

    @property
    def phase(self) -> str:
        """The part of the training step that is running now: `forward`, `backward`, `optimizer` or `other`."""
        phase = self.places.phase
        return phase if phase in PHASES else "other"

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Call) -> Any:
        """Run an operator, and record its launch and memory allocations. Implements `torch_compat.fake.Handler`."""
        if func is torch.ops.aten.add.Tensor and sums_in_place(args):
            func = run.func = torch.ops.aten.add_.Tensor
        if self.phase in ("forward", "backward") and _tells_values(func, args):
            self.reads_values = True
        out = run()
        if out is NotImplemented:  # a call on DTensors: its operators on the local parts are recorded when they run
            return out
        given = [out] if isinstance(out, Tensor) else list(tensors_in(out))
        for tensor in given:
            self._notice(tensor)
        moved = moved_by(func, args, out)
        if moved is not None:
            self._on_collective(moved, (args, out))
            return out
        noted = None if run.alike is None else run.alike.noted
        how = self.device, torch.get_float32_matmul_precision()
        if noted is None or how not in noted:
            what = self._what(func, args, kwargs, out, given)
            if noted is not None:
                noted[how] = what
        else:
            what = noted[how]
        if what is not None:
            self._launch(what, self._stream, self._awaited((args, kwargs)))
        return out

    def _what(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, given: list[Tensor]
    ) -> Operation | Copy | None:
        name = operator_name(func)
        if func.namespace == "prim" or name in TAKES_MEMORY or gives_view(func):
            return None
        taken = list(tensors_in((args, kwargs)))
        kinds = {tensor.device.type for tensor in (*taken, *given) if tensor.dim() or tensor.device.type == self.device}
        if self.device != "cpu" and len(kinds) == 2 and kinds & ON_HOST:
            source, target = taken[-1], given[0] if given else taken[0]
            size = max(source.nbytes, target.nbytes)
            return Copy(size, "host" if target.device.type in ON_HOST else "device")
        if self.device not in kinds:
            return None  # a computation on the host is not recorded
        operation = Operation(
            f"{func.namespace}.{name}",
            tuple(tuple(tensor.shape) for tensor in taken),
            self._dtypes(name, taken),
            flops_of(func, args, kwargs, out),
            _read(name, taken, given),
            sum(_bytes(tensor) for tensor in given or tensors_in(written_arguments(func, args, dict(kwargs)))),
            call_of(func, args, kwargs) if self.device == "cpu" else "",
            _layout(taken) if "convolution" in name else "",
        )
        return self._operations.setdefault(operation, operation)

    def _dtypes(self, name: str, taken: list[Tensor]) -> tuple[str, ...]:
        """Return the dtypes of tensors. Float32 becomes `tf32` in matrix products if the program allows TF32."""
        words = tuple(_word(tensor) for tensor in taken)
        loose = self.device != "cpu" and torch.get_float32_matmul_precision() != "highest"
        return tuple("tf32" if word == "fp32" else word for word in words) if loose and name in MATMULS else words

    def _on_collective(self, moved: Moved, values: Any) -> None:
        """Record a collective, or a wait for one."""
        what, own = _collective(moved), self._stream
        if what is None:  # a barrier, or a wait for a collective
            self.collectives.wait(moved.work, own, self._storages(values))
            return
        self._buffers(what, moved)
        stream = self.collectives.stream_of(what) if moved.beside else own
        if stream != own and self.device != "cpu":
            self.collectives.wait_for(fake_device.last_of(own), stream)
        place = self._launch(what, stream, self._awaited(values))
        if stream != own:
            self.collectives.begin(place, self._storages(values), moved.work)

    def waits(self, work: Any) -> None:
        """Record that the program waits for the collective with the handle `work`."""
        self.collectives.wait(work, self._stream, ())

    @property
    def _stream(self) -> str:
        return MAIN if self.device == "cpu" else fake_device.stream_of().name

    def _named(self, stream: str) -> str:
        """Return the name of a stream in the trace."""
        return self._names.setdefault(stream, f"stream {len(self._names)}") if stream.startswith("stream ") else stream

    def _awaited(self, values: Any) -> Iterable[int]:
        return self._storages(values) if self.collectives.running else ()

    def _storages(self, values: Any) -> Iterable[int]:
        found = (self._numbers.get(tensor.untyped_storage()) for tensor in tensors_in(values))
        return [number for number in found if number is not None]

    def _launch(self, what: Operation | CollectiveOperation | Copy, stream: str, storages: Iterable[int]) -> int:
        """Record a launch, and return its index. storages: the numbers of the storages that it reads or writes."""
        place = len(self.events)
        after = self.collectives.after(stream, storages) | set(fake_device.launched(stream, place))
        where = self.places.now()
        self.events.append(Launch(what, self._named(stream), self.phase, *where, tuple(sorted(after))))
        return place

    # Memory.

    def _buffers(self, what: CollectiveOperation, moved: Moved) -> None:
        """Set the category of a collective's one-dimensional tensors to `communication`, since they are its buffers."""
        if what.kind in ("all-gather", "reduce-scatter", "all-reduce"):
            self.tell((t for t in moved.tensors if t.dim() == 1 and t.numel() > 1), "communication")

    def _notice(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        self._numbers[storage] = number = self._next
        self._next += 1
        weakref.finalize(storage, self._gone, number).atexit = False
        self._take(number, storage.nbytes(), tensor)

    def resized(self, tensor: Tensor, size: int) -> None:
        """Record that a tensor's storage is resized to `size` bytes. FSDP2 gathers and frees parameters in this way."""
        self._notice(tensor)
        number = self._numbers[tensor.untyped_storage()]
        self._gone(number)
        self._categories.setdefault(number, "communication")
        if size:
            self._take(number, size, tensor)

    def _take(self, number: int, size: int, tensor: Tensor) -> None:
        if not size:
            return
        on_host = self.device != "cpu" and tensor.device.type in ON_HOST
        category = self._categories.get(number) or ("activations" if self.phase == "forward" else "temporary")
        self._alive[number] = event = Allocate(number, size, category, on_host, self._named(self._stream))
        self.events.append(event)

    def _gone(self, number: int) -> None:
        if self._alive.pop(number, None) is not None:
            self.events.append(Free(number))

    def tell(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of these tensors' memory, also in events that have already been recorded."""
        for tensor in tensors:
            self._notice(tensor)
            self._categories[self._numbers[tensor.untyped_storage()]] = category

    def allocated_since(self, place: int, category: str) -> None:
        """Set the category to `category` for all memory that was allocated since the event at index `place`."""
        for event in self.events[place:]:
            if isinstance(event, Allocate):
                self._categories[event.storage] = category

    def backward_ends(self) -> None:
        """Set the category of temporary memory to `gradients` if it is still allocated when a backward ends."""
        for number, event in self._alive.items():
            if event.category == "temporary":
                self._categories.setdefault(number, "gradients")

    def cut(self) -> tuple[tuple[Allocate, ...], tuple[Event, ...]]:
        """Return the memory in use now and the events recorded so far, and clear these events."""
        events, self.events = self.events, []
        self.collectives = AsyncCollectives()
        fake_device.begin_record()
        return tuple(self.with_categories(self._alive.values())), tuple(self.with_categories(events))

    def with_categories(self, events: Iterable[Any]) -> Iterator[Any]:
        """Yield these events with the categories that are known now."""
        for event in events:
            category = self._categories.get(event.storage) if isinstance(event, Allocate) else None
            yield event if category is None else replace(event, category=category)


def _collective(moved: Moved) -> CollectiveOperation | None:
    if not moved.tensors:
        return None
    ranks = tuple(dist.get_process_group_ranks(moved.group))
    if moved.peer is not None:
        ends = dist.get_rank(), ranks[moved.peer]
        ranks = ends if moved.kind == "send" else ends[::-1]
    size = sum(tensor.nbytes for tensor in moved.tensors)
    return CollectiveOperation(moved.kind, size, ranks, _word(moved.tensors[0]))


def _tells_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator passes values to the program that may differ for another batch."""
    name = operator_name(func)
    if name == "index":
        return any(tensor.dtype == torch.bool and may_differ(tensor) for tensor in tensors_in(args[1:]))
    return name in READS and any(map(may_differ, tensors_in(args)))


def _word(tensor: Tensor) -> str:
    return DTYPES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def _layout(tensors: list[Tensor]) -> str:
    """Return `channels_last` if any tensor has this memory layout, otherwise an empty string."""
    images = [tensor for tensor in tensors if tensor.dim() == 4 and not tensor.is_contiguous()]
    last = any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in images)
    return "channels_last" if last else ""


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor uses. An expanded tensor uses less than its shape suggests."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


GATHERS = {"embedding", "index_select", "gather", "index", "take"}
"""Operators that read only as many bytes of their first tensor as they return."""
PICKS = {"nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1, "nll_loss2d_backward": 1}
"""For each loss operator, the index of the tensor with the scores. It reads one score per row."""


def _read(name: str, taken: list[Tensor], given: list[Tensor]) -> int:
    sizes = [_bytes(tensor) for tensor in taken]
    if name in GATHERS and sizes:
        sizes[0] = min(sizes[0], sum(_bytes(tensor) for tensor in given))
    if name in PICKS and len(sizes) > PICKS[name] + 1:
        sizes[PICKS[name]] = min(sizes[PICKS[name] : PICKS[name] + 2])
    return sum(sizes)
