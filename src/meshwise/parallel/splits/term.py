"""Keep a sum over rows unsummed until the program reads it.

A term looks like the sum and holds this rank's part of it. Linear operators keep it a term; any other operator gets
the sum, which costs one small all-reduce. A loss is such a term, so its backward needs no communication of its own,
and its value travels with the gradients (training/whole/backward.py).

A term has the gradient of a part (parallel/splits/crossing.py): `gradient_scale` times the gradient of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import Axis
from meshwise.parallel.splits.crossing import through
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.torch_compat.beside_dispatch import transforming
from meshwise.torch_compat.dispatch import over
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, called, on_parts
from meshwise.torch_compat.tree import map_kind

SCALED = "mul multiply div divide true_divide __mul__ __rmul__ __truediv__ __div__"
KEPT = "neg negative __neg__ positive float double to clone squeeze unsqueeze view reshape flatten contiguous sum mean"
ADDED = "add sub subtract __add__ __radd__ __sub__ __rsub__"
READS = {*rules.READS, "__deepcopy__"}
PLAIN = """dim ndimension numel nelement size __len__ is_floating_point is_complex element_size get_device stride
storage_offset is_contiguous __hash__ requires_grad_ .shape .dtype .device .requires_grad .grad_fn .is_leaf .ndim
.layout .itemsize .is_cuda .is_cpu .is_meta .is_sparse .is_quantized .names .output_nr ._version .is_nested"""
_PLAIN = {*PLAIN.split()}
_as_subclass, _item, _tolist = Tensor.as_subclass, Tensor.item, Tensor.tolist  # view="whole" replaces these methods

heard: list[Callable[[str, Args, Kwargs], None]] = []
"""Called with each operator on batches and terms while a step is observed (training/guards/same_program.py)."""


class Known:
    """What is known about a sum over the ranks. Several terms may share it."""

    __slots__ = ("axis", "by", "count", "divides", "local", "parent", "total", "value")

    def __init__(
        self, axis: Axis, local: Tensor | None = None, count: Tensor | int | None = None, parent: Known | None = None,
        by: Any = 1, divides: bool = False,
    ) -> None:  # fmt: skip
        self.axis, self.local, self.count, self.parent, self.by, self.divides = axis, local, count, parent, by, divides
        self.value: Tensor | float | None = None
        self.total: Tensor | float | None = None

    @property
    def root(self) -> Known:
        return self if self.parent is None else self.parent.root

    def get(self, reduce: bool = False) -> Tensor | float | None:
        """Return the sum, or None if it is not known. With `reduce`, compute the sum if needed, which is collective."""
        if self.value is None:
            if self.parent is not None:
                above = self.parent.get(reduce)
                self.value = above if above is None else above / self.by if self.divides else above * self.by
            elif reduce:
                self.set(self.axis.all_reduce(self.sent().clone()))
        return self.value

    def sent(self, room: int = 2) -> Tensor:
        """Return this rank's part, or [part, count] in float32 or wider if there is a count. room: on the CPU, pad
        these two with zeros to this length."""
        assert self.local is not None
        if self.count is None:
            return self.local
        wide = torch.promote_types(self.local.dtype, torch.float32)
        if self.local.device.type != "cpu" or type(self.local) is not Tensor:
            count = torch.as_tensor(self.count, dtype=wide, device=self.local.device)
            return torch.stack([self.local.to(wide), count])
        numbers = numpy.zeros(room, "f4" if wide is torch.float32 else "f8")  # faster than `torch.stack`
        numbers[:2] = _item(self.local), self.count if isinstance(self.count, int) else _item(self.count)
        return torch.from_numpy(numbers)

    def set(self, made: Tensor, times: int = 1) -> None:
        """Store the sum over the ranks of what `sent` returned.

        made: this sum, divided by `times`.
        """
        self.local = None
        if self.count is None:
            self.value = made if times == 1 else made * times
        elif made.device.type != "cpu":
            self.total, self.value = made[1] * times, made[0] / made[1]
        else:
            whole, count, *_ = _tolist(made)
            self.total, self.value = count * times, whole / count if count else math.nan


class Term(Tensor):
    """A sum over the ranks of an axis, of which this tensor holds this rank's part.

    assumed: if the sum must still be divided by a count of targets that the ranks have not exchanged, this is the count
        as if no target were ignored. Otherwise 0.
    """

    axis: Axis
    assumed: int

    @property
    def known(self) -> Known:
        """What is known about the sum. After a write to this tensor's memory, a new object is made."""
        known, written = self.__dict__["held"]
        with on_parts():
            if version(self) != written:
                known = self.known = Known(self.axis, self.detach().clone())
                self.assumed = 0  # a write through another term of this memory stores values that are divided already
        return known  # type: ignore[no-any-return]

    @known.setter
    def known(self, known: Known) -> None:
        self.__dict__["held"] = known, version(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = called(func)
        if name in _PLAIN:
            with on_parts():
                return func(*args, **(kwargs or {}))
        if name in READS:
            return rules.read_only(name, func(value_of(args[0]), *args[1:], **(kwargs or {})))
        if heard:
            heard[0](name, args, kwargs or {})
        if rules.writes_in_place(name) and isinstance(args[0], Term):
            return _written(func, args, kwargs or {})
        rule = RULES.get(name) if not transforming else None
        made = NotImplemented if rule is None else rule(func, args, kwargs or {})
        return func(*_sums(args), **_sums(kwargs or {})) if made is NotImplemented else made

    def backward(self, *args: Any, **kwargs: Any) -> None:  # bypasses `__torch_function__`: twice as fast
        """See `torch.Tensor.backward`."""
        backward(torch.Tensor.backward, (self, *args), kwargs)

    def item(self) -> Any:
        """See `torch.Tensor.item`."""
        return value_of(self).item()  # not `_item`: the replaced `Tensor.item` notices that a model reads a sum


def term(local: Tensor, axis: Axis, known: Known | None = None, assumed: int = 0) -> Term:
    """Turn `local`, in place, into a term, and return it. See `Term`."""
    known = known or Known(axis, local.detach())
    local.__class__ = over(Term, type(local))
    local.axis, local.known, local.assumed = axis, known, assumed  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def plain(value: Term) -> Tensor:
    """Return this rank's part as a plain tensor, with its gradient."""
    with on_parts():
        return _as_subclass(value, Tensor)


def value_of(value: Term) -> Tensor:
    """Return the sum, without its gradient. Collective if it is not known."""
    with on_parts():
        found = value.known.get(reduce=True)
        assert found is not None
        if not isinstance(found, Tensor):
            found = value.known.value = torch.full(value.shape, found, dtype=torch.float64).to(value.dtype)
        found = found if found.shape == value.shape else found.reshape(value.shape)
        return found if found.dtype == value.dtype else found.to(value.dtype)


def settled(value: Term) -> Term:
    """Return the sum as a term that is divided by its count. Collective if the ranks have not exchanged the count."""
    known = value.known
    if not value.assumed:
        return value
    known.get(reduce=True)
    with on_parts():
        return term(over_count(plain(value), value), value.axis, known)


def over_count(local: Tensor, value: Term) -> Tensor:
    """Return `local` divided by the count over all ranks, by which `value` is not divided yet."""
    return local / _count(value)


def _count(value: Term) -> Tensor | float:
    total = value.known.root.total
    return total.to(value.dtype) if isinstance(total, Tensor) else total or math.nan


class _Given(torch.autograd.Function):
    """Returns a known sum, with the backward of the sum."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, scale: int) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale, None, None


def resolved(value: Term) -> Tensor:
    """Return the sum as a plain tensor, with its gradient. Collective if it is not known."""
    known = value_of(value)
    if not value.requires_grad or not torch.is_grad_enabled():
        return known.clone()
    return through(_Given, plain(settled(value)), known, value.axis.gradient_scale)


def _sums(given: Any) -> Any:
    """Return arguments with the sums in place of terms."""
    return map_kind(Term, resolved, dict(given) if isinstance(given, Mapping) else tuple(given))


def _is_number(thing: Any) -> bool:
    return not isinstance(thing, Tensor) or not (isinstance(thing, (Term, SplitTensor)) or thing.requires_grad)


def _scaled(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    value, by = args if isinstance(args[0], Term) else args[::-1]
    divides = "div" in called(func)
    if not isinstance(value, Term) or not _is_number(by):
        return NotImplemented
    if divides and (value is not args[0] or not value.is_floating_point()):  # divide integers only after the sum
        return NotImplemented
    with on_parts():
        local, by = func(*args), by.clone() if isinstance(by, Tensor) else by  # the program may change `by` later
        return term(local, value.axis, Known(value.axis, parent=value.known, by=by, divides=divides), value.assumed)


def _kept(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor)]
    if not isinstance(value, Term) or others or (value.dim() and value.assumed):
        return NotImplemented
    with on_parts():
        local = func(*args, **kwargs)
        if local.dtype != value.dtype and not local.is_floating_point():  # parts would be rounded separately
            return NotImplemented
        same = local.numel() == value.numel()
        known = Known(value.axis, parent=value.known, by=-1 if "neg" in called(func) else 1) if same else None
        return term(local, value.axis, known, value.assumed)


def _detached(func: Func, args: Args, kwargs: Kwargs) -> Any:
    with on_parts():
        return term(args[0].detach(), args[0].axis, args[0].known, args[0].assumed)


def _scale(value: Term) -> Tensor | float:
    """Return the ratio of a part's gradient to the sum's gradient. Collective if the count is not known."""
    if value.assumed:
        value_of(value)  # so that a backward divides by the real count, not by the assumed count
    return value.axis.gradient_scale / (_count(value) if value.assumed else 1)


def gradient_of_sum(found: Tensor, value: Term) -> Tensor:
    """Convert a gradient of this rank's part to the gradient of the sum. Collective if the sum's count is unknown."""
    scale = _scale(value)
    with on_parts():
        return found / scale


def _hooked(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Register a hook for the gradient of a sum, or keep this gradient."""
    value, *hook = (*args, *kwargs.values())
    scale = _scale(value)

    def hooked(gradient: Tensor) -> Any:
        found = hook[0](gradient / scale)
        return found * scale if isinstance(found, Tensor) else found

    with on_parts():
        return func(value, hooked) if hook else func(value)


def _gradient(func: Func, args: Args, kwargs: Kwargs) -> Tensor | None:
    with on_parts():
        found = func(args[0])
    return None if found is None else gradient_of_sum(found, args[0])


def backward(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Run `loss.backward()` as `torch.autograd.backward`, which training/whole/backward.py replaces."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    values = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    torch.autograd.backward((args[0],), values.pop("gradient", None), **values)


def _added(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or set(kwargs) - {"alpha"} or any(isinstance(each, SplitTensor) for each in args):
        return NotImplemented
    axis = next(each for each in args if isinstance(each, Term)).axis
    parts = [_part(each, axis) for each in args]
    with on_parts():
        return term(func(*parts, **kwargs), axis)


def _part(thing: Any, axis: Axis) -> Any:
    """Return this rank's part of a summand. Rank 0 adds a whole summand, or all ranks add equal shares of it."""
    if isinstance(thing, Term):
        return settled(thing)
    if isinstance(thing, Tensor):
        return thing / axis.size if thing.requires_grad else thing if axis.rank == 0 else torch.zeros_like(thing)
    return thing if axis.rank == 0 else type(thing)(0)


_ADD = {"__iadd__": torch.add, "add_": torch.add, "__isub__": torch.sub, "sub_": torch.sub}


def _written(func: Func, args: Args, kwargs: Kwargs) -> Term:
    """Run an in-place operator on a term, and return that term. Only addition and subtraction keep it unsummed."""
    target: Term = args[0]
    made: Any = _added(_ADD[called(func)], args, kwargs) if called(func) in _ADD else NotImplemented
    if made is NotImplemented or not torch.can_cast(made.dtype, target.dtype):  # torch refuses an invalid cast below
        written, *others = _sums(args)
        func(written, *others, **_sums(kwargs))
        made = term(_part(written, target.axis) + 0, target.axis)
    root = target.known.root
    with on_parts():
        root.local = None if root.local is None else root.local.clone()  # earlier results still need the old value
        target.copy_(made)
    target.known, target.assumed = made.known, 0
    return target


RULES: dict[str, Callable[[Func, Args, Kwargs], Any]] = {
    **dict.fromkeys(SCALED.split(), _scaled),
    **dict.fromkeys(KEPT.split(), _kept),
    **dict.fromkeys(ADDED.split(), _added),
    **dict.fromkeys(("detach", ".data"), _detached),
    **dict.fromkeys(("register_hook", "retain_grad"), _hooked),
    ".grad": _gradient,
    "backward": backward,
}
