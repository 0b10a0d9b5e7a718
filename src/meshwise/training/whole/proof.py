"""Prove that no row of a module's output depends on another row.

The module runs twice without gradients: on split tensors over an axis whose other rank does not exist, where each
operator that needs that rank's rows raises; and on plain tensors with this rank's rows. Both must give the same values,
so that a module that uses the number of rows is noticed too. Buffers, attributes and random states are put back.

Dropout is left out of both runs: it draws independently for each row.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwise.parallel.module_state import NUMBERS, VALUES, ModuleState
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.rows_axis import Crossing, ProofAxis
from meshwise.parallel.splits.tensor import SplitTensor, split
from meshwise.parallel.splits.term import READS, Term, heard
from meshwise.spec.user_code import OURS
from meshwise.torch_compat.compiling import without_compiling
from meshwise.torch_compat.torch_function import called, named, on_parts
from meshwise.torch_compat.tree import all_leaves, map_kind
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.seeds import set_states, states

PROOF = ProofAxis()
DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
DROPOUTS |= {"feature_dropout", "native_dropout"}
ATTENTIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}  # the position of dropout_p
ASKS = {"all": "min", "any": "max", "max": "max", "min": "min", "amax": "max", "amin": "min"}
ASKED = {"__bool__", "item"}
BELOW, ABOVE = {"lt", "le", "__lt__", "__le__"}, {"gt", "ge", "__gt__", "__ge__"}


@dataclass
class Verdict:
    """Whether calls of one kind keep rows apart, and what was seen in them."""

    dims: list[int] | None = None
    why: str = ""
    draws: bool = False
    reads: bool = False
    nodes: set[int] = field(default_factory=set)
    calls: int = 0
    answers: list[tuple[str | None, bool]] = field(default_factory=list)
    written: list[tuple[nn.Module, str]] = field(default_factory=list)
    others: dict[Any, Verdict] = field(default_factory=dict)

    def attributes(self) -> list[Any]:
        """Return the values of the attributes that a call writes."""
        return [vars(module).get(name) for module, name in self.written]

    def set_attributes(self, values: list[Any]) -> None:
        for (module, name), value in zip(self.written, values, strict=True):
            setattr(module, name, value)


class Answer(Tensor):
    """This rank's answer to a question about all rows, or their largest or smallest value. It can only be
    compared with a number, and only that result can be read."""

    op: str


class _Quiet(TorchFunctionMode):
    """Leaves out dropout. Records whether it was called, whether values were read, and the split tensors made."""

    draws = reads = False

    def __init__(self, ask: Callable[[bool, str], bool]) -> None:
        super().__init__()
        self.ask, self.answers = ask, list[tuple[str | None, bool]]()
        self.given: Iterator[tuple[str | None, bool]] | None = None  # in the second run, the answers of the first run
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = called(func), dict(kwargs or {})
        if name in DROPOUTS:
            values = named(("input", "p", "training"), args, kwargs)
            self.draws |= bool(values.get("training", name != "native_dropout")) and values.get("p", 0.5) != 0
            return values["input"]
        if name == "gumbel_softmax":  # compute it without noise
            self.draws = True
            return args[0].softmax(kwargs.get("dim", -1))
        if (at := ATTENTIONS.get(name, 0)) and (len(args) > at or "dropout_p" in kwargs):
            self.draws |= bool(args[at] if len(args) > at else kwargs["dropout_p"]) and kwargs.get("training", True)
            args = (*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args
            kwargs |= {} if len(args) > at else {"dropout_p": 0.0}
        rows = [each for each in args if isinstance(each, (SplitTensor, Answer))]
        if name in ASKS and len(args) == 1 and not kwargs and rows and not isinstance(args[0], Answer):
            with on_parts():
                local = func(*args)
            answer: Answer = local.as_subclass(Answer)
            answer.op = ASKS[name]
            return answer
        if name == "__contains__" and not isinstance(args[1], Tensor):
            return self._answered(bool((args[0] == args[1]).as_subclass(Tensor).any()), "max" if rows else None)
        if rows and isinstance(rows[0], Answer):
            value = rows[0].as_subclass(Tensor)
            if name in BELOW | ABOVE and not isinstance(args[1], Tensor) and value.dtype is not torch.bool:
                compared: Answer = func(value, args[1]).as_subclass(Answer)
                compared.op = rows[0].op if name in ABOVE else {"min": "max", "max": "min"}[rows[0].op]
                return compared
            if name not in ASKED or value.dtype is not torch.bool:
                raise Crossing("uses a value of all rows")
            return self._answered(bool(value), rows[0].op)
        if name in ASKED and isinstance(args[0], Tensor) and args[0].dtype is torch.bool and not rows:
            return self._answered(bool(func(*args)), None)
        self.reads |= name in READS
        made = func(*args, **kwargs)
        self.note(made)
        return made

    def _answered(self, own: bool, op: str | None) -> bool:
        if self.given is not None:
            return next(self.given, (None, own))[1]
        self.answers.append((op, own if op is None else self.ask(own, op)))
        return self.answers[-1][1]

    def note(self, made: Any) -> Any:
        every = made if isinstance(made, (list, tuple)) else (made,)
        self.made += [weakref.ref(each) for each in every if isinstance(each, (SplitTensor, Term))]
        return made

    def kept(self, known: list[Any]) -> bool:
        """Return whether a split tensor that is not in `known` is still held, for example by a global list."""
        ids = set(map(id, known))

        def alive() -> bool:
            return any(id(each) not in ids for ref in self.made if (each := ref()) is not None)

        if alive():
            gc.collect()
        return alive()


def outputs(output: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors and numbers in what a module returns, also those inside objects such as caches."""
    for leaf in all_leaves(output):
        if isinstance(leaf, VALUES):
            yield leaf
        elif depth < 4 and holds_values(leaf):
            yield from outputs(list(vars(leaf).values()), depth + 1)
        else:
            yield leaf


def holds_values(leaf: Any) -> bool:
    """Return whether a call may write to this argument: an object that is not a module, function or class."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (*VALUES, nn.Module, type)) and not callable(leaf)


def prove(
    module: nn.Module,
    inner: Callable[..., Any],
    args: Any,
    kwargs: Any,
    engine: Engine,
    ask: Callable[[bool, str], bool],
) -> Verdict:
    """Return a verdict on calls like `inner(*args, **kwargs)`. args, kwargs: trees with split tensors. ask: returns all
    ranks' answer to a question about all rows, given this rank's answer and a reduction."""
    device = engine.world.device
    state, before, quiet = ModuleState(list(module.modules())), states(device), _Quiet(ask)

    def run(own: Callable[[SplitTensor], Tensor]) -> tuple[Any, list[Any]]:
        with on_parts():
            new_args, new_kwargs = map_kind(SplitTensor, own, (args, kwargs))
        listening, heard[:] = heard[:], []
        try:
            with engine.on_trial(), torch.no_grad(), without_compiling(), quiet:
                made = inner(*new_args, **new_kwargs)
            return list(outputs(made)), state.now()
        finally:
            heard[:] = listening
            state.put_back()
            set_states(device, before)

    def alone(x: SplitTensor) -> Any:
        dim = x.parts[0].dim
        return quiet.note(split(x.detach().clone(), SplitPart(PROOF, dim, 2 * x.shape[dim])))

    try:
        proven, written = run(alone)
        quiet.reads, quiet.given = False, iter(quiet.answers)
        kept = quiet.kept([*proven, *written])
        plain, written_apart = run(lambda x: x.detach().clone())
    except Crossing as crossing:
        return Verdict(why=f"{crossing}{_where(crossing)}")
    except Exception as error:
        return Verdict(why=f"{type(error).__name__}: {error}".rstrip("."))
    why = _differ(proven, plain) or _differ(written, written_apart)
    if kept:
        why = "keeps rows outside of itself"
    elif any(isinstance(each, (SplitTensor, Term)) for each in written):
        why = "keeps rows in an attribute"
    if why:
        return Verdict(why=why)
    dims = [each.parts[0].dim if isinstance(each, SplitTensor) else -1 for each in proven if isinstance(each, Tensor)]
    made = Verdict(dims, "", quiet.draws, quiet.reads, written=list(dict.fromkeys(state.written)))
    made.answers = quiet.answers if any(op for op, _ in quiet.answers) else []
    made.reads |= bool(quiet.answers) and not made.answers
    return made


def _differ(proven: list[Any], plain: list[Any]) -> str:
    if len(proven) != len(plain):
        return "returns something else for fewer rows"
    for one, other in zip(proven, plain, strict=True):
        if isinstance(one, Term):
            return "returns a sum over rows"
        if isinstance(one, SplitTensor) and (len(one.parts) > 1 or not one.parts[0].is_plain):
            return "returns rows in another order"
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return "returns other kinds of values for fewer rows"
        if isinstance(one, Tensor):
            with on_parts():
                if not _close(one, other):
                    return "uses the number of rows"
        elif isinstance(one, NUMBERS) and one != other:
            return "uses the number of rows"
        elif not isinstance(one, NUMBERS) and type(one) is not type(other):
            return "returns objects of other classes"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    far = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, far, far * float(other.abs().nan_to_num(0, 0, 0).max()), equal_nan=True)


def _where(error: BaseException) -> str:
    """Return the innermost line outside of torch and meshwise, as ` (model.py:31)`."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    found = [f" ({Path(f).name}:{n})" for f, n in lines if f"{os.sep}torch{os.sep}" not in f and not f.startswith(OURS)]
    return found[-1] if found else ""
