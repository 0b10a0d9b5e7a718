"""Gather the ranks' records on rank 0, and compare them.

Values that should be equal on every rank are compared between the ranks, because rank 0 alone would not show what
another rank got wrong. Tensors are sent as NumPy arrays, which pickle serializes a hundred times faster.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.checker.difference import apart, finite, precision_of
from meshwise.checker.model_state import buffers_of, optimizer_state_of, parameters_of
from meshwise.checker.sketches import sketch
from meshwise.checker.trace import Contents, Divergence, Output, StepTrace, Trace
from meshwise.spec.world import World
from meshwise.torch_compat.collectives import Group
from meshwise.torch_compat.dispatch import without_interception
from meshwise.training.data.keyed import Rows
from meshwise.training.data.order import BatchSlice
from meshwise.transfer import stages
from meshwise.transfer.collectives import gather_objects
from meshwise.transfer.groups import everyone, get_rank

Name = TypeVar("Name", str, tuple[str, str])
LACKS = float("inf")  # the difference that is recorded if a rank lacks a value
TINY = torch.finfo(torch.float64).tiny


class _Arrays(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Pickle a plain strided tensor as a NumPy array on the host."""
        plain = type(value) is Tensor and not value.requires_grad
        if plain and value.layout == torch.strided and value.dtype != torch.bfloat16:
            return torch.from_numpy, (value.numpy(force=True),)
        return NotImplemented


def to_rank_0(value: Any, group: Group = None) -> list[Any]:
    """Gather `value` from every rank of `group` on the group's rank 0."""
    written = io.BytesIO()
    _Arrays(written, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    parts = gather_objects(written.getvalue(), group)
    return [pickle.loads(part) for part in parts] if get_rank(group) == 0 else []


def of_any_rank(named: dict[Name, Any], group: Group = None) -> dict[Name, Any]:
    """Return, for each name that any rank has, the value from the first rank that has it."""
    names = gather_objects(list(named), group)
    earlier = {name for others in names[: get_rank(group)] for name in others}
    parts = to_rank_0({name: value for name, value in named.items() if name not in earlier}, group)
    return {name: value for part in reversed(parts) for name, value in part.items()}


def tensors_diverge(
    kind: str, named: Mapping[str, Tensor], *, divided: bool = False, group: Group = None
) -> Divergence:
    """Return how far each tensor that differs between ranks is from the first rank's copy."""
    ranks = to_rank_0({name: sketch(value) for name, value in named.items()}, group)
    found = {}
    for name in {name for sketches in ranks for name in sketches}:
        held = [sketches[name] for sketches in ranks if name in sketches]
        most = LACKS
        if (divided or len(held) == len(ranks)) and all(other.shape == held[0].shape for other in held):
            far = max(finite(float(apart(other, held[0]).norm())) for other in held)
            most = far / _length(held[0]) if far > 0 else 0.0
        if most > 0:
            found[kind, name] = most
    return found


def numbers_diverge(kind: str, named: Mapping[str, float], group: Group = None) -> Divergence:
    """Return how much each number differs from rank 0's, relative to its size."""
    ranks = gather_objects(dict(named), group)
    found = {}
    for name in {name for numbers in ranks for name in numbers}:
        held = [numbers.get(name, LACKS) for numbers in ranks]
        if len({str(number) for number in held}) > 1:  # compared as text, so that NaN equals NaN
            found[kind, name] = max(finite(abs(other - held[0]) / max(abs(held[0]), TINY)) for other in held)
    return found


def start_diverges(trace: Trace) -> Divergence:
    """Return the differences between ranks before the first step."""
    found: Divergence = {}
    group = _alike()
    ranks = gather_objects((trace.tied, trace.modules, list(trace.initial_parameters)), group)
    for tied, modules, names in ranks:
        found |= {("initial parameters", name): LACKS for name in set(names) ^ set(ranks[0][2])}
        found |= {("tied weights", " = ".join(group)): LACKS for group in set(tied) ^ set(ranks[0][0])}
        found |= {("modules", name): LACKS for name, _ in modules.items() ^ ranks[0][1].items()}
    found |= tensors_diverge("initial parameters", trace.initial_parameters, group=group)
    return found | tensors_diverge("initial buffers", trace.initial_buffers, group=group)


def _alike() -> Group:
    """Return the process group whose ranks must have equal parameters, gradients and losses."""
    return None if stages.pipe() is not None else everyone()


def cannot_train(divergence: Divergence) -> bool:
    """Return whether some rank lacks parameters or tied weights that another rank has."""
    return any(far == LACKS and kind in ("tied weights", "initial parameters") for (kind, _), far in divergence.items())


def slices_of_ranks(slices: Sequence[BatchSlice], world: World) -> tuple[list[list[list[int]]], list[Rows]]:
    """Return each rank's sample indices and this rank's rows, by microbatch. Collective."""
    ranks = gather_objects([(own.indices[: own.samples].tolist(), len(own.indices)) for own in slices])
    samples = [[own[k][0] if k < len(own) else [] for own in ranks] for k in range(len(slices))]
    rows = [
        Rows(sum(map(len, parts[: world.rank])), ranks[world.rank][k][1], sum(map(len, parts)), len(parts[world.rank]))
        for k, parts in enumerate(samples)
    ]
    return samples, rows


def collect_step(step: StepTrace, model: nn.Module, optimizers: Sequence[Optimizer], *, divided: bool) -> None:
    """Complete the trace of a step with the values of all ranks. Collective."""
    differ = _join_outputs(step)
    rank = get_rank(everyone())
    own = to_rank_0((rank, step.own_gradients), _alike())
    step.alike = tuple(rank for rank, part in gather_objects((rank, get_rank()), everyone()) if part == 0)
    step.own_gradients = {(rank, number): named for rank, each in own for (_, number), named in each.items()}
    step.evaluating = set().union(*gather_objects(step.evaluating))
    step.loaded = any(gather_objects(step.loaded))
    step.changed_behind = set().union(*gather_objects(step.changed_behind))
    step.nan_while_open = sorted({text for own in gather_objects(step.nan_while_open) for text in own})
    ranks = enumerate(gather_objects(step.modified_between_backwards))
    step.modified_between_backwards = [(rank, *found[1:]) for rank, each in ranks for found in each]
    step.numbers = [numbers for own in gather_objects(step.numbers) for numbers in own]
    step.rng_mismatch = any(gather_objects(step.rng_mismatch))
    step.drawn_alike = set.intersection(*gather_objects(step.drawn_alike))
    step.parameters, step.buffers = parameters_of(model), buffers_of(model)
    state = {name: value for each in optimizers for name, value in optimizer_state_of(each, model).items()}
    group = _alike()
    step.rank_divergence |= {
        **differ,
        **tensors_diverge("gradients", step.gradients, group=group),
        **tensors_diverge("clipped gradients", step.clipped_gradients, divided=divided, group=group),
        **numbers_diverge("learning rate", step.learning_rates, group),
        **tensors_diverge("optimizer state", state, divided=divided, group=group),
        **tensors_diverge("parameters", step.parameters, group=group),
        **tensors_diverge("buffers", step.buffers, group=group),
        **numbers_diverge("loss", {"loss": step.loss}, group),
    }
    with without_interception():  # which would make the casts here casts to float64
        lower = gather_objects({name: precision_of(p) for name, p in step.parameters.items()})
    step.low_precision = {name: dtype for of in lower for name, dtype in of.items() if dtype.endswith("16")}
    step.optimizer_state, step.clipped_gradients = of_any_rank(state), of_any_rank(step.clipped_gradients)
    _join_stages(step)


def _join_outputs(step: StepTrace) -> Divergence:
    """Gather batches and module outputs on rank 0. Return how far the copies differ."""
    found: dict[int, list[tuple[list[Output], list[Contents]]]] = {}
    differ: Divergence = {}
    for rank, outputs, contents in to_rank_0((get_rank(), step.outputs, step.contents), _alike()):
        found.setdefault(rank, []).append((outputs, contents))
        first = {output.key: output for output in found[rank][0][0]}
        for output in outputs:
            far = _apart(first[output.key], output) if output.key in first else LACKS
            if far > 0:
                key = "module outputs", output.module
                differ[key] = max(far, differ.get(key, 0.0))
    step.outputs = [output for each in found.values() for output in each[0][0]]
    step.contents = [contents for each in found.values() for contents in each[0][1]]
    return differ


def _apart(first: Output, other: Output) -> float:
    """Return how much the outputs of one call differ, relative to `first`."""
    shapes = [{layout: rows.shape for layout, rows in output.sketches.items()} for output in (first, other)]
    if shapes[0] != shapes[1]:
        return LACKS
    far = (float(apart(rows, other.sketches[layout]).norm()) / _length(rows) for layout, rows in first.sketches.items())
    return max(map(finite, far), default=0.0)


def _length(sketch: Tensor) -> float:
    return max(float(sketch.nan_to_num(0.0, 0.0, 0.0).norm()), TINY)


def _join_stages(step: StepTrace) -> None:
    """Join the parts of `step` that the stages of a pipeline hold, on the first stage."""
    pipe = stages.pipe()
    if pipe is None:
        return
    group = pipe.group
    _join_named(step, ("gradients", "clipped_gradients", "optimizer_state", "parameters", "buffers"), group)
    step.rank_divergence |= numbers_diverge("loss", {"loss": step.loss}, group)
    step.low_precision = of_any_rank(step.low_precision, group)
    step.rank_divergence = of_any_rank(step.rank_divergence, group)
    step.own_gradients = {k: named for each in to_rank_0(step.own_gradients, group) for k, named in each.items()}
    step.outputs = [output for outputs in to_rank_0(step.outputs, group) for output in outputs]
    step.rng_mismatch = any(gather_objects(step.rng_mismatch, group))
    step.evaluating = set().union(*gather_objects(step.evaluating, group))


def collect_run(trace: Trace) -> None:
    """Complete the trace of a run with the values of all ranks. Collective."""
    pipe = stages.pipe()
    for group in (None,) if pipe is None else (None, pipe.group):
        trace.unkeyed = set().union(*gather_objects(trace.unkeyed, group))
        trace.random_modules = set().union(*gather_objects(trace.random_modules, group))
    trace.rank_divergence |= numbers_diverge("evaluation", trace.evaluation, _alike())
    if pipe is not None:
        _join_named(trace, ("initial_parameters", "initial_buffers"), pipe.group)


def _join_named(found: StepTrace | Trace, kinds: Sequence[str], group: Group) -> None:
    """Join tensors that each stage of a pipeline has some of."""
    for kind in kinds:
        named = getattr(found, kind)
        found.rank_divergence |= tensors_diverge(kind.replace("_", " "), named, divided=True, group=group)
        setattr(found, kind, of_any_rank(named, group))
