"""Read private parts of `fully_shard`: parameter groups and unreduced gradients.

Based on torch 2.11, 2.13 and 2.15: `distributed/fsdp/_fully_shard/_fsdp_param_group.py` and `_fsdp_state.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Shard, placement_types

Before = Callable[["Group"], None]
Around = Callable[..., contextlib.AbstractContextManager[None]]


class _Surrounded:
    """Wraps a collective that `fully_shard` calls, so that it runs inside a context manager."""

    def __init__(self, real: Any, kind: str, of: str, around: Around) -> None:
        self._real, self._kind, self._of, self._around = real, kind, of, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, **given: Any) -> Any:
        moved = given[self._of]
        with self._around(self._kind, moved.nbytes, given["group"], dtype=moved.dtype):
            return self._real(**given)


class Group:
    """A group of parameters that `fully_shard` gathers and reduces together."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards of the group's parameters, even while the parameters are gathered."""
        return [part.sharded_param for part in self._group.fsdp_params]

    def made_from(self) -> dict[int, nn.Parameter]:
        """Return a dict from `id(whole parameter)` to this rank's shard, for each parameter that was ever gathered."""
        return {id(whole): held for held, whole in self.wholes()}

    def wholes(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return (shard, whole parameter) for each parameter that has been gathered at least once."""
        parts = self._group.fsdp_params
        return [(part.sharded_param, part._unsharded_param) for part in parts if hasattr(part, "_unsharded_param")]

    def around_collectives(self, around: Around) -> None:
        """Run each all-gather and reduce-scatter of this parameter group inside the context manager that `around(kind,
        bytes, group, dtype=...)` returns. bytes: the size of the whole tensor over all ranks."""
        for name, kind, of in (
            ("_all_gather_comm", "all-gather of parameters", "output_tensor"),
            ("_reduce_scatter_comm", "reduce-scatter of gradients", "input_tensor"),
        ):
            if hasattr(self._group, name):  # if torch lacks the attribute, the collectives run unwrapped
                setattr(self._group, name, _Surrounded(getattr(self._group, name), kind, of, around))

    def before_reducing(self, call: Before) -> None:
        """Call `call(self)` before each reduction of this group's gradients, once the parameters were gathered."""
        reduce = self._group.post_backward

        def post_backward(*unused: Any) -> None:
            if self._group.reduce_grads and self.gathered:
                call(self)
            reduce(*unused)

        self._group.post_backward = post_backward

    @property
    def gathered(self) -> bool:
        """Whether this rank has ever gathered the group's parameters. The first forward that uses them gathers them."""
        return bool(self.wholes())

    @property
    def ran(self) -> bool:
        """Whether a forward of the sharded model has run on this rank since the last backward."""
        return bool(getattr(self._group.comm_ctx, "post_forward_order", ()))  # unset before the first forward

    def reached(self) -> list[bool]:
        """Return a list that says for each parameter of the group whether it has a gradient that is not reduced yet."""
        return [_waiting(part) is not None for part in self._group.fsdp_params]

    def versions(self) -> int:
        """Return a number that changes when a gathered parameter is written in place (but not through `p.data`)."""
        return sum(whole._version for _, whole in self.wholes() if not whole.is_inference())

    def written(self) -> nn.Parameter | None:
        """Return a parameter that the program has changed while it was gathered; None if there is none."""
        rank = getattr(self._group.mesh_info, "shard_mesh_rank", 0)
        for part in self._group.fsdp_params:
            own, wholes = part._sharded_param_data, part.all_gather_outputs
            if part.fsdp_placement.dim != 0 or len(wholes) != 1 or wholes[0].untyped_storage().size() == 0:
                continue  # not comparable: sharded on dim 1, with an `fsdp_pre_all_gather`, or not gathered
            there = wholes[0].narrow(0, rank * own.numel(), own.numel())
            if not torch.equal(there.view(torch.uint8), own.to(there).view(torch.uint8)):
                found: nn.Parameter = part._unsharded_param
                return found
        return None

    def fill(self, index: int) -> None:
        """Give the gathered parameter at `index` a zero gradient, so that it takes part in the reduction."""
        whole = self._group.fsdp_params[index]._unsharded_param
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))

    def gather_as_stored(self, indices: Collection[int]) -> None:
        """Make gathers return the parameters at `indices` in the dtype in which they are stored, and all others in the
        dtype of the mixed precision policy."""
        for index, part in enumerate(self._group.fsdp_params):
            part.init_dtype_attrs = functools.partial(_mixed_dtypes, part, part.init_dtype_attrs, index in indices)

    def in_one_dtype(self) -> None:
        """Cast the gradients that are not reduced yet to the dtype in which they will be reduced."""
        if hasattr(self._group, "_set_unsharded_grad_dtypes"):  # since torch 2.15
            self._group._set_unsharded_grad_dtypes(defer_upcast=False)
            return
        for part in self._group.fsdp_params:
            part.accumulate_unsharded_grad_if_needed()
            part.to_accumulated_grad_if_needed()

    def waiting(self) -> list[Tensor]:
        """Return this rank's gradients that are not reduced yet. Writing to them in place changes what is reduced."""
        found = [_waiting(part) for part in self._group.fsdp_params]
        return [g for g in found if g is not None]

    def let_go(self, places: Collection[int]) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]], nn.Parameter]]:
        """Stop gathering and reducing the parameters at these indices. Return for each parameter (this rank's shard,
        the (module, name) pairs that hold it, a new parameter of the whole shape). The shard and the new parameter are
        placeholders full of NaN, which need almost no memory."""
        found = []
        for part in [self._group.fsdp_params[place] for place in places]:
            info, held = part._module_info, part.sharded_param
            modules = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            seen = nn.Parameter(_empty_like(part._unsharded_param.detach()), held.requires_grad)
            empty(held)
            found.append((held, modules, seen))
            self._group.fsdp_params.remove(part)
        if hasattr(self._group, "_init_reduce_scatter_param_order"):  # since torch 2.15
            wider = self._group._fsdp_params_with_wider_grad_dtype
            wider[:] = [part for part in wider if part in self._group.fsdp_params]
            self._group._init_reduce_scatter_param_order()
        return found

    def reduce_now(self) -> None:
        """Reduce the gradients that are not reduced yet, outside of a backward. Collective."""
        group = self._group
        group.reduce_grads = group.all_reduce_grads = True
        group.post_backward()
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()


def groups_of(module: FSDPModule) -> list[Group]:
    """Return the parameter groups of one sharded module, without those of sharded modules inside it."""
    state: Any = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # torch 2.11 has at most one group per module
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [Group(group) for group in found]


def leave_forward(module: FSDPModule) -> None:
    """Reset FSDP's state after an exception was raised in a sharded model's forward. module: the root of the model."""
    state: Any = module._get_fsdp_state()
    idle = type(state._training_state).IDLE
    state._training_state = idle
    for group in groups_of(module):
        group._group._training_state = idle
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None
    communication = state._comm_ctx
    if (last := getattr(communication, "all_gather_state", None)) is not None:
        communication.all_gather_copy_in_stream.wait_event(last.event)
        communication.all_gather_stream.wait_event(last.event)
        communication.all_gather_state = None


def around_method(
    root: FSDPModule, ran: Callable[[FSDPModule], None], output: list[Any]
) -> contextlib.AbstractContextManager[None] | None:
    """Return a context manager in which a method other than forward runs with gathered parameters; None if a forward or
    backward of FSDP is running. The caller appends the method's result to `output` inside the block. `ran(root)` is
    called when the block ends."""
    state: Any = root._get_fsdp_state()
    if state._training_state != type(state._training_state).IDLE:
        return None
    return _gathered(root, state, ran, output)


@contextlib.contextmanager
def _gathered(root: FSDPModule, state: Any, ran: Callable[[FSDPModule], None], output: list[Any]) -> Iterator[None]:
    state._pre_forward(root, (None,), {})  # None, because torch 2.11 cannot move an empty argument list to a GPU
    try:
        yield
    except BaseException:
        leave_forward(root)
        raise
    state._post_forward(root, (), output[0])
    ran(root)


def begin_backward_at(root: FSDPModule, loss: Tensor) -> None:
    """Make the backward of `loss` reduce the gradients of `root`, even if no forward of `root` returned `loss`."""
    state: Any = root._get_fsdp_state()
    state._register_pre_backward_hook(loss)


def without_empty_groups(module: FSDPModule) -> None:
    """Remove the module's parameter groups in which `Group.let_go` has left no parameters."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = [group for group in state._fsdp_param_groups if group.fsdp_params]
    elif state._fsdp_param_group is not None and not state._fsdp_param_group.fsdp_params:
        state._fsdp_param_group = None


def place_in_memory(tensor: Tensor) -> tuple[int, int]:
    """Return where the tensor's elements begin: an id of its storage, and an offset. Works for fake tensors too."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, without copying it. Return any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor: the local shard of a DTensor, and any other tensor itself."""
    return list(map(local_of, tensors))


def hashes_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the XOR of the elements' bits of each tensor. Of a DTensor, this rank's local tensor is read. Tensors
    without elements are skipped."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in locals_of(t.detach() for t in tensors)]
    found = [torch.hash_tensor(t).view(torch.int64).cpu() for t in real if t.numel()]
    hashes: list[int] = torch.stack(found).tolist() if found else []
    return hashes


def empty(tensor: Tensor) -> None:
    """Free the memory of a tensor, or of a DTensor's local tensor. All of its elements then share one NaN in memory."""
    _hold(tensor, _empty_like)


def refill(tensor: Tensor) -> None:
    """Undo `empty`: allocate memory for a tensor, or for a DTensor's local tensor. Its values are undefined."""
    _hold(tensor, functools.partial(torch.empty_like, memory_format=torch.contiguous_format))


def _hold(tensor: Tensor, made_like: Callable[[Tensor], Tensor]) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = made_like(tensor._local_tensor)
    else:
        tensor.data = made_like(tensor.detach())


def _empty_like(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return DTensor(_empty_like(tensor._local_tensor), tensor._spec, requires_grad=False)
    return torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """Yield (name, module) for every module of `model` that `fully_shard` was applied to, outer ones first."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def mend_sharded_class(module: nn.Module) -> None:
    """Fix the subclass that `fully_shard` gives a module. Give it the name of the original class, and make `zero_grad`
    also zero the gradients of the module's shards, even between a forward and its backward."""
    kind: Any = type(module)
    of = kind.__mro__[2]
    kind.__name__, kind.__qualname__, kind.__module__ = of.__name__, of.__qualname__, of.__module__
    kind.zero_grad = _zero_grad


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """Zero the gradients of a module's parameters, and of its shards, which a gathered module does not list."""
    parts = [p for _, sharded in sharded_modules(module) for group in groups_of(sharded) for p in group.parameters]
    for p in parts:
        p.grad = None if set_to_none or p.grad is None else p.grad.detach().zero_()
    type(module).__mro__[2].zero_grad(module, set_to_none)  # type: ignore[attr-defined]


def _mixed_dtypes(
    part: Any, init: Callable[[MixedPrecisionPolicy], None], as_stored: bool, policy: MixedPrecisionPolicy
) -> None:
    """Set the dtypes in which FSDP gathers a parameter and reduces its gradient. init: FSDP's method that sets them."""
    init(MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype) if as_stored else policy)
    part.reduce_dtype = policy.reduce_dtype


def _waiting(part: Any) -> Tensor | None:
    gradient: Tensor | None = getattr(part, "unsharded_accumulated_grad", None)
    whole = getattr(part, "_unsharded_param", None)
    return gradient if gradient is not None or whole is None else whole.grad


def packed(dim: int, sections: int) -> Placement:
    """Return a placement that cuts a dim into `sections` equal sections, and shards each section over the ranks."""
    strided: Placement = placement_types._StridedShard(dim, split_factor=sections) if sections > 1 else Shard(dim)
    return strided


def division(placement: Placement) -> tuple[int, int] | None:
    """Return (dimension, number of sections) for a sharded placement; None for any other."""
    if isinstance(placement, placement_types._StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


def in_order_of_division(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[tuple[int, int, int]]:
    """Return (mesh axis, dim, sections) for each axis that shards a tensor, in the order in which the axes cut the
    tensor. `sections` is the number of sections into which the dim is cut first (see `packed`). torch stores it
    multiplied by the sizes of the inner axes, so it is divided by them."""
    found = [(axis, *divided) for axis, each in enumerate(placements) if (divided := division(each)) is not None]
    plain = [each for each in found if each[2] == 1]
    strided = []
    for axis, dim, sections in reversed([each for each in found if each[2] > 1]):
        within = math.prod(mesh.size(other) for other, along, _ in found if along == dim and other > axis)
        strided.append((axis, dim, sections if sections % within else sections // within))
    return plain + strided


def with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor like `tensor` with the local tensor `local`. Return `local` itself if `tensor` is no DTensor.

    `local` stays on its device. `DTensor.from_local` would move it to the device of the mesh."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)
