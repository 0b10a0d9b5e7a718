"""Silent bugs of other frameworks, each played here: what went wrong there goes wrong on the plan's side.

A row names the report that it is from. Kind, module and cause are what a person would say who reads that report; they
were written down before the first run. (Three models were changed after it: the blocks of SB012 and SB058 were too
small to be divided by themselves, so that nothing was planted, and in SB100 no largest magnitude was that of a negative
number.) `NOT_PLAYED` says of the other rows why not. Where a name is in brackets, each of them is fair; module None: it
is everywhere, or nowhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.checker.proof import Proof
from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import add_up
from meshwise.parallel.splits.tensor import SplitTensor, split
from meshwise.spec.plan import Plan
from meshwise.torch_compat.torch_function import on_parts
from meshwise.transfer import collectives
from tests.checker import decoders
from tests.checker.jobs_to_check import checked
from tests.checker.seams import (
    after_backward,
    after_update,
    around,
    at_start,
    before_division,
    loss_changed,
    mean_of_rank_means,
    replaced,
    tokens_weigh_by_samples,
)

Plant = Callable[[Any], None]
Words = str | tuple[str, ...]


def rank() -> int:
    """This process among all of the run."""
    return collectives.get_rank(collectives.everyone())


# --- what a module is given, gives, or sends back


def module_changed(name: str, change: Callable[[Any], Any]) -> Plant:
    """Let `change(output)` be what module `name` gives."""

    def hook(model: Any) -> None:
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: change(output))

    return lambda patch: before_division(patch, hook)


def input_changed(name: str, change: Callable[[Any], Any]) -> Plant:
    def hook(model: Any) -> None:
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (change(inputs[0]), *inputs[1:]))

    return lambda patch: before_division(patch, hook)


def gradient_changed(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """The same tensor, whose gradient `change` changes."""

    def hooked(tensor: Any) -> Any:
        if tensor.requires_grad:
            tensor = tensor.view_as(tensor)
            tensor.register_hook(change)
        return tensor

    return hooked


def inside(patch: Any, name: str) -> list[bool]:
    """Whether the forward of module `name` runs now."""
    now = [False]

    def hook(model: Any) -> None:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *given: now.__setitem__(0, True))
        module.register_forward_hook(lambda *given: now.__setitem__(0, False))

    before_division(patch, hook)
    return now


def parameters_changed(start: str, hook: Callable[[], Callable[[Tensor], Tensor]]) -> Plant:
    """Give each parameter whose name begins so a hook of its own, once it is the one that is trained: those of a
    deferred model are made anew after the plan has divided it."""

    def hooked(model: nn.Module, optimizer: Any) -> None:
        for name, p in model.named_parameters():
            if name.startswith(start):
                p.register_hook(hook())

    return lambda patch: at_start(patch, after=hooked)


def own_columns(gradient: Tensor) -> Tensor:
    """Of the scores of experts, only what this rank's expert sends back."""
    mine = torch.zeros_like(gradient)
    mine[..., rank()] = gradient[..., rank()]
    return mine


# --- tensor and context: between whole and split


def crossings(patch: Any, kind: str, name: str, change: Callable[[Any, Tensor, Any], Tensor]) -> None:
    """Let `change(real, tensor, over)` do the crossing of this kind while module `name` runs."""
    now = inside(patch, name)

    def through(real: Any, function: Any, tensor: Tensor, way: str, where: Any, *more: Any) -> Any:
        if way == kind and now[0]:
            return change(lambda tensor, where: real(function, tensor, way, where, *more), tensor, where)
        return real(function, tensor, way, where, *more)

    around(patch, "crossing to and from parts", through)


def never_added_back(name: str) -> Plant:
    """What enters in module `name` gets the gradient of this rank alone."""
    return lambda patch: crossings(patch, "enter", name, lambda real, whole, axis: whole.view_as(whole))


def sum_left_out(name: str) -> Plant:
    """The ranks' products in module `name` are not added up."""
    return lambda patch: crossings(patch, "add up", name, lambda real, value, axis: value.view_as(value))


def sum_added_up_backward(name: str) -> Plant:
    """The backward of a sum over ranks adds up again."""

    def twice(real: Any, value: Tensor, axis: Any) -> Tensor:
        return gradient_changed(lambda gradient: gradient * axis.size)(real(value, axis))

    return lambda patch: crossings(patch, "add up", name, twice)


def gathered_logits_add_gradients(patch: Any) -> None:
    """The gradient of what was gathered is added up over the ranks, which all have the same one."""

    def through(real: Any, function: Any, tensor: Tensor, way: str, where: Any, *more: Any) -> Any:
        found = real(function, tensor, way, where, *more)
        return gradient_changed(lambda g: g * 2)(found) if way == "gather" else found

    around(patch, "crossing to and from parts", through)


def local_smoothing(patch: Any) -> None:
    """The even share of label smoothing is the mean over this rank's part of the vocabulary: its third sum."""
    number = [0]

    def summed(real: Any, value: Tensor, axis: Any) -> Tensor:
        number[0] += 1
        return value * axis.size if number[0] % 3 == 0 else real(value, axis)

    around(patch, "sums of a loss over parts", summed)


def full_logits_taken_for_parts(patch: Any) -> None:
    """Each rank has all logits, and the sums of exponentials are added up all the same: loss + log 2."""

    def log_sum(real: Any, x: Any) -> Any:
        below, total = real(x)
        return below, total + math.log(x.part.axis.size)

    around(patch, "log of the sum over a row", log_sum)


def padded_words_count(patch: Any) -> None:
    """The vocabulary is padded to a multiple of the ranks, and what pads it is in the softmax, with logit 0."""

    def log_sum(real: Any, x: Any) -> Any:
        below, total = real(x)
        largest = (x - below).narrow(x.part.dim, 0, 1)
        return below, torch.logaddexp(total, -largest)

    around(patch, "log of the sum over a row", log_sum)


def rule(name: str, wrong: Callable[..., Any]) -> Plant:
    """Let `wrong` be what an operator does with split tensors."""
    return lambda patch: patch.setitem(rules.RULES, name, wrong)


def view_takes_other_dims(func: Any, args: Any, kwargs: Any) -> Any:
    found = VIEW(func, args, kwargs)
    local = found.transpose(-1, -2).reshape(found.shape)
    return split(local, found.part)


VIEW = rules.RULES["unflatten"]


def mean_of_local_means(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return add_up(func(*args, **kwargs), x.part.axis) / x.part.axis.size


def own_mean(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def largest_before_abs(func: Any, args: Any, kwargs: Any) -> Any:
    """The maximum over ranks of maxima that have a sign."""
    x = args[0]
    largest = x.detach().amax(x.part.dim, keepdim=True)
    return x.part.axis.all_reduce(largest, "max").abs()


def uneven_parts_in_equal_places(patch: Any) -> None:
    def gathered(real: Any, part: SplitPart, local: Tensor) -> Tensor:
        whole: Tensor = real(part, local)
        return whole if part.is_even or not part.is_plain else whole.roll(1, part.dim)

    around(patch, "parts are put together", gathered)


def positions_of_the_other_group(patch: Any) -> None:
    """Both ranks take the positions of the first."""

    def divided(real: Any, value: Tensor, part: SplitPart) -> Any:
        first = replace(part, axis=replace(part.axis, rank=0))  # type: ignore[type-var]
        return split(first.slice_of(value).clone(), part)

    around(patch, "positions are divided", divided)


def keys_gathered_along_heads(patch: Any) -> None:
    def turned(real: Any, k: Tensor, v: Tensor, columns: SplitPart) -> Iterator[Any]:
        for keys, values, owner in real(k, v, columns):
            other = keys.transpose(1, 2).reshape(keys.shape)
            yield (keys if owner == columns.axis.rank else other), values, owner

    around(patch, "keys go round", turned)


def wrong_log_sum(patch: Any) -> None:
    """What other ranks' keys add to a softmax is merged with a logarithm of another base: it weighs twice."""
    at: list[Any] = []

    def noting(real: Any, k: Tensor, v: Tensor, columns: SplitPart) -> Iterator[Any]:
        for keys, values, owner in real(k, v, columns):
            at[:] = [owner != columns.axis.rank]
            yield keys, values, owner

    around(patch, "keys go round", noting)
    around(patch, "scores of a block", lambda real, *given: real(*given) + math.log(2) * at[0])


def block_of_another_mask(patch: Any) -> None:
    """The causal mask of a block is that of the block beside it."""

    def blocks(real: Any, asked: Any, columns: SplitPart, owner: int, *rest: Any) -> Iterator[Any]:
        for own_rows, cols, hidden in real(asked, columns, owner, *rest):
            yield own_rows, cols, (None if owner == columns.axis.rank and hidden is not None else hidden)

    around(patch, "blocks of attention", blocks)


def own_positions_from_zero(output: Any) -> Any:
    """Each rank numbers its positions from 0."""
    return output.roll(rank(), 0)


def rows_at_local_places(output: Any) -> Any:
    """Rows are combined by their numbers within the part."""
    if not isinstance(output, SplitTensor):
        return output
    with on_parts():
        return split(output.roll(1, 1), output.part)


def other_group_when_recomputed(patch: Any) -> None:
    """The second run of a block adds up over the ranks that have other samples. In the first step: where these have as
    many. (Of other counts the sums have other sizes, and gloo ends the process: no silent bug.)"""
    again, first = [False], [False]

    def step(real: Any, engine: Any, job: Any, state: Any, parts: Any) -> Any:
        first[0] = state.step == 0
        return real(engine, job, state, parts)

    @contextlib.contextmanager
    def second(real: Any, *given: Any) -> Iterator[None]:
        again[0] = True
        try:
            with real(*given):
                yield
        finally:
            again[0] = False

    def all_reduce(real: Any, axis: Any, tensor: Tensor, op: str = "sum") -> Tensor:
        if again[0] and first[0] and op == "sum":
            return collectives.all_reduce(tensor, op, collectives.dividing())
        found: Tensor = real(axis, tensor, op)
        return found

    around(patch, "microbatches of a step", step)
    around(patch, "second run of a block", second)
    around(patch, "sum over an axis", all_reduce)


# --- gradients


def before_clipping(change: Callable[[dict[str, nn.Parameter]], None]) -> Plant:
    """Change gradients of shards when they are reduced."""

    def plant(patch: Any) -> None:
        models: list[Any] = []
        at_start(patch, before=lambda model, optimizer: models.append(model))

        def backward(real: Any, self: Any, loss: Tensor, *, reduce: bool, **more: Any) -> Any:
            value = real(self, loss, reduce=reduce, **more)
            if reduce:
                change(dict(models[-1].named_parameters()))
            return value

        around(patch, "backward of shards", backward)

    return plant


def experts_times(factor: float) -> Callable[[Any], None]:
    def change(named: Any) -> None:
        for name, p in named.items():
            if ".experts." in name:
                p.grad.mul_(factor)

    return change


def not_reduced(word: str) -> Plant:
    def init(real: Any, self: Any, named: Any, **more: Any) -> None:
        real(self, [(name, p) for name, p in named if word not in name], **more)

    return lambda patch: around(patch, "replicas are made", init)


def hooks_are_lost(patch: Any) -> None:
    """From the second step on nobody reduces."""
    done = [0]
    replaced(patch, "guard of steps", lambda *arguments: True)

    def backward(real: Any, self: Any, loss: Tensor, *, reduce: bool, **more: Any) -> Any:
        done[0] += reduce
        return real(self, loss, reduce=reduce and done[0] < 2, **more)

    around(patch, "backward of replicas", backward)


def reduced_in_one_dim_of_the_mesh(patch: Any) -> None:
    def foreach_reduce(real: Any, parts: Any, gradients: Any, *rest: Any) -> Any:
        given = list(rest)
        given[7] = None  # the group of the all-reduce
        return real(parts, gradients, *given)

    around(patch, "reduce of shards", foreach_reduce)


def loss_times(factor: Callable[[int, bool, int], float]) -> Plant:
    """Multiply the loss of a microbatch by `factor(its number, whether it is the last, step from 1)`."""

    def plant(patch: Any) -> None:
        at = [0, 1]

        def scaled(loss: Tensor, last: bool) -> Tensor:
            found = loss * factor(at[0], last, at[1])
            at[:] = [0, at[1] + 1] if last else [at[0] + 1, at[1]]
            return found

        loss_changed(patch, scaled)

    return plant


def last_microbatch_alone(patch: Any) -> None:
    def backward(real: Any, self: Any, loss: Tensor, *, reduce: bool, **more: Any) -> Any:
        for gradient in [g for group in self._groups for g in group.waiting()] if reduce else ():
            gradient.zero_()
        return real(self, loss, reduce=reduce, **more)

    around(patch, "backward of shards", backward)


def second_use_is_lost(patch: Any) -> None:
    """Of a layer that runs twice, the gradient of the second call is lost."""
    calls = [0]

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        calls[0] += module.training
        if calls[0] % 2 or not module.training:
            return None
        return nn.functional.linear(inputs[0], module.weight.detach(), module.bias.detach())

    before_division(patch, lambda model: model.layers[0].mlp.down.register_forward_hook(hook))


# --- shards


def gathered_block(name: str, change: Callable[[Tensor, Any], None]) -> Plant:
    """Let `change(gathered, key)` write what block `name` is gathered into."""

    def plant(patch: Any) -> None:
        block: list[Any] = []

        def init(real: Any, self: Any, setup: Any) -> None:
            real(self, setup)
            block[:] = [setup.model.get_submodule(name)]

        def copy_out(real: Any, result: Any, parts: Any, group: Any) -> None:
            real(result, parts, group)
            for number, part in enumerate(parts if parts[0]._module_info.module is block[0] else ()):
                for place, gathered in enumerate(part.all_gather_outputs):
                    change(gathered.data, (number, place))

        around(patch, "shards are made", init)
        around(patch, "gather of shards", copy_out)

    return plant


def weights_of_the_step_before(patch: Any) -> None:
    before: dict[Any, Tensor] = {}
    now: dict[Any, Tensor] = {}

    def late(gathered: Tensor, key: Any) -> None:
        now[key] = gathered.clone() if key not in now else now[key]
        if key in before:
            gathered.copy_(before[key])

    def stepped(training: Any) -> None:
        before.update(now)
        now.clear()

    replaced(patch, "guard of gathered weights", lambda *arguments, **more: None)
    gathered_block("things.layers.0", late)(patch)
    after_update(patch, stepped)


def gone_in_the_backward(patch: Any) -> None:
    """A block's weights are let go by another thread before its backward has used them."""
    gathers: dict[Any, int] = {}

    def zero(gathered: Tensor, key: Any) -> None:
        gathers[key] = gathers.get(key, 0) + 1
        if gathers[key] == 2:
            gathered.zero_()

    replaced(patch, "guard of gathered weights", lambda *arguments, **more: None)
    gathered_block("things.layers.1", zero)(patch)
    after_update(patch, lambda training: gathers.clear())


# --- pipeline


def second_half_of_what_comes_is_zero(patch: Any) -> None:
    def receive(real: Any, tensor: Tensor, *rest: Any) -> Tensor:
        found: Tensor = real(tensor, *rest)
        if found.is_floating_point():
            found.view(-1)[found.numel() // 2 :] = 0
        return found

    around(patch, "receive", receive)


def divided_by_each_stage(patch: Any) -> None:
    def send(real: Any, self: Any, now: Any) -> None:
        now.gradients = [None if g is None else g / 2 for g in now.gradients]
        real(self, now)

    around(patch, "gradients go to the stage before", send)


def ties_in_another_layout(patch: Any) -> None:
    def add(real: Any, self: Any) -> None:
        named = dict(self.model.named_parameters())
        for name, _ in self._shared if rank() else ():
            gradient = named[name].grad
            gradient.copy_(gradient.flatten().roll(1).view_as(gradient))
        real(self)

    around(patch, "gradients of ties", add)


def stale() -> Callable[[Tensor], Tensor]:
    """A stage's weight gradients of the second microbatch are those of the first."""
    held: list[Tensor] = []

    def old(gradient: Tensor) -> Tensor:
        if held:
            return held.pop()
        held.append(gradient.clone())
        return gradient

    return old


def not_clipped_in_a_pipeline(patch: Any) -> None:
    replaced(patch, "clipping over stages", lambda self, norm: None)


def later_layers_stay_in_evaluation(patch: Any) -> None:
    """After an evaluation the first chunk of a rank trains again, and the other does not."""

    def evaluated(real: Any, engine: Any, job: Any, model: Any, batches: Any) -> Any:
        found = real(engine, job, model, batches)
        for layer in model.layers[2:]:
            layer.eval()
        return found

    around(patch, "evaluation", evaluated)


# --- clipping


def _squares(gradients: list[Tensor]) -> Tensor:
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return torch.stack([g.double().square().sum() for g in whole]).sum()


def clipped_by(norm_of: Callable[[dict[str, Tensor]], Tensor]) -> Plant:
    """Let `norm_of(gradients by name)` be the norm that gradients are clipped by."""

    def plant(patch: Any) -> None:
        models: list[Any] = []
        at_start(patch, before=lambda model, optimizer: models.append(model))

        def clip(real: Any, parameters: Any, norm: float) -> None:
            named = {n: p for n, p in models[-1].named_parameters() if p.grad is not None}
            total = norm_of({n: p.grad for n, p in named.items()}).to(torch.float64)
            for p in named.values():
                p.grad.mul_(float((norm / (total + 1e-6)).clamp(max=1.0)))

        around(patch, "clipping", clip)

    return plant


def experts_weigh(factor: float) -> Callable[[dict[str, Tensor]], Tensor]:
    def norm(named: dict[str, Tensor]) -> Tensor:
        parts = [[g for n, g in named.items() if (".experts." in n) == of] for of in (False, True)]
        return (_squares(parts[0]) + factor * _squares(parts[1])).sqrt()

    return norm


def replicated_weigh_twice(named: dict[str, Tensor]) -> Tensor:
    whole = [g for g in named.values() if isinstance(g, DTensor) and g.placements[0].is_replicate()]
    return (_squares(list(named.values())) + _squares(whole)).sqrt()


def norm_of_own_parts(named: dict[str, Tensor]) -> Tensor:
    return _squares([g.to_local() if isinstance(g, DTensor) else g for g in named.values()]).sqrt()


def norm_of_the_first_rank(named: dict[str, Tensor]) -> Tensor:
    return collectives.broadcast(norm_of_own_parts(named).detach().clone(), 0, collectives.everyone())


def norm_times(factor: float) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda named: _squares(list(named.values())).sqrt() * factor


def nothing_is_clipped(patch: Any) -> None:
    """Its iterator over the parameters was used up before."""
    around(patch, "clipping", lambda real, parameters, norm: real(list(iter(())), norm))


# --- optimizer, start, data, buffers


def optimizer_of_old_parameters(patch: Any) -> None:
    def swap(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]

    replaced(patch, "guard of steps", lambda *arguments: True)
    at_start(patch, after=swap)


def untied(patch: Any) -> None:
    def untie(model: Any, optimizer: Any) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    at_start(patch, after=untie)


def start_values(which: str) -> Plant:
    """Values of parameters are drawn anew."""

    def draw(model: Any, optimizer: Any) -> None:
        for name, p in model.named_parameters():
            if which in name:
                local = p.to_local() if isinstance(p, DTensor) else p
                local.data.normal_(generator=torch.Generator().manual_seed(2 + rank()))

    return lambda patch: at_start(patch, before=draw)


def order_of_the_first_epoch(patch: Any) -> None:
    around(patch, "order of an epoch", lambda real, seed, epoch, samples: real(seed, 0, samples))


def after_resume(change: Callable[[Any, int], None]) -> Plant:
    """Call `change(state, how many times it was resumed)` when a run goes on from what was saved."""

    def plant(patch: Any) -> None:
        times = [0]

        def unpack(real: Any, state: Any, saved: Any) -> None:
            real(state, saved)
            times[0] += 1
            change(state, times[0])

        around(patch, "saved state is loaded", unpack)

    return plant


def shuffled_again(state: Any, times: int) -> None:
    state.seed += 1


def loader_begins_anew(state: Any, times: int) -> None:
    if times == 2:
        state.index = 0


def moments_are_lost(state: Any, times: int) -> None:
    state.optimizer.state.clear()


def ticks_are_lost(state: Any, times: int) -> None:
    state.scheduler.last_epoch = 0
    state.scheduler.step()


def frozen(state: Any, times: int) -> None:
    state.model.net[2].requires_grad_(False)


def bias_hook_is_missing(patch: Any) -> None:
    before_division(patch, lambda model: [setattr(layer.mlp, "counts", False) for layer in model.layers])


def balance_of_each_microbatch(patch: Any) -> None:
    """What balances experts is not divided by the number of microbatches."""

    def heavier(model: Any) -> None:
        model.balance_weighs *= 3

    before_division(patch, heavier)


def nothing(patch: Any) -> None:
    """The program itself is wrong on several ranks."""


@dataclass(frozen=True)
class Silent:
    """A row that is played. of: the report. plant, job, plan: how. kind, module, cause: what a person would say."""

    row: str
    of: str
    plant: Plant
    job: str
    plan: Plan
    kind: Words
    module: Words | None
    cause: Words


DATA, SHARD, TENSOR, CONTEXT = Plan(data=2), Plan(shard=2), Plan(tensor=2), Plan(context=2)
DATA_2, SHARD_2 = Plan(data=2, accumulate=2), Plan(shard=2, accumulate=2)
PIPELINE = Plan(pipeline=2, accumulate=2)
OUTPUTS, GRADIENTS, CLIPPED, ORDER = (
    "module outputs",
    "gradients",
    ("gradient norm", "clipped gradients"),
    "sample order",
)
MISSING, DOUBLED, WEIGHTING, CLIP = "missing reduction", "doubled reduction", "loss weighting", "clip norm"
STALE = "optimizer bound to old parameters"

SILENT = [
    Silent("SB001", "label smoothing by the local vocabulary", local_smoothing, "decoder, smoothed", TENSOR,
           "loss", None, "loss"),
    Silent("SB002", "split cross entropy of whole logits", full_logits_taken_for_parts, "decoder", TENSOR,
           "loss", None, "loss"),
    Silent("SB003", "second token's loss by local counts", nothing, "decoder, two words ahead", DATA,
           "loss", None, WEIGHTING),
    Silent("SB004", "recompute adds over the global group", other_group_when_recomputed, "decoder",
           Plan(data=2, tensor=2, recompute="full"), GRADIENTS, "layers.1", "backward"),
    Silent("SB005", "positions scattered over another group", positions_of_the_other_group, "decoder", CONTEXT,
           OUTPUTS, "embed", "module"),
    Silent("SB011", "head and embedding drift apart", untied, "decoder, tied", Plan(data=2, zero1=True),
           "tied weights", ("embed", "head"), "tied weight"),
    Silent("SB012", "a parameter is read before its all-gather", weights_of_the_step_before, "two-tower", SHARD,
           OUTPUTS, "things.layers.0", "module"),
    Silent("SB017", "a vocabulary that does not divide", padded_words_count, "decoder", TENSOR, "loss", None, "loss"),
    Silent("SB020", "norm omits experts", clipped_by(experts_weigh(0)), "experts, clipped", TENSOR,
           CLIPPED, None, CLIP),
    Silent("SB021", "experts reduced over another group", not_reduced(".experts."), "experts", DATA,
           GRADIENTS, "layers.1.mlp.experts", MISSING),
    Silent("SB022", "norm does not know experts", clipped_by(experts_weigh(2)), "experts, clipped", DATA,
           CLIPPED, None, CLIP),
    Silent("SB028", "ties of two stages added in other layouts", ties_in_another_layout, "decoder, tied", PIPELINE,
           GRADIENTS, ("embed", "head"), "tied weight"),
    Silent("SB030", "replicated weights counted by each rank", clipped_by(replicated_weigh_twice), "decoder, clipped",
           TENSOR, CLIPPED, None, CLIP),
    Silent("SB031", "accumulated gradients are added again", loss_times(lambda k, last, step: 2.0 - last), "decoder",
           DATA_2, GRADIENTS, None, WEIGHTING),
    Silent("SB032", "all-reduce missing without a bias", sum_left_out("layers.0.attn.o"), "decoder", TENSOR,
           OUTPUTS, "layers.0.attn.o", MISSING),
    Silent("SB033", "all-reduce missing in an expert", sum_left_out("layers.0.mlp.experts.1.down"), "experts", TENSOR,
           OUTPUTS, "layers.0.mlp.experts.1.down", MISSING),
    Silent("SB034", "gradient of a layer norm not added", never_added_back("norm"), "decoder", CONTEXT,
           GRADIENTS, "norm", MISSING),
    Silent("SB035", "each rank clips by its own norm", clipped_by(norm_of_own_parts), "decoder, clipped", TENSOR,
           CLIPPED, None, CLIP),
    Silent("SB036", "hooks of replaced parameters", hooks_are_lost, "decoder", DATA, GRADIENTS, None, MISSING),
    Silent("SB037", "copies between devices lose data", second_half_of_what_comes_is_zero, "decoder", PIPELINE,
           OUTPUTS, "layers.1", "module"),
    Silent("SB042", "optimizer of unwrapped parameters", optimizer_of_old_parameters, "decoder", SHARD,
           ("optimizer state", "parameters"), None, STALE),
    Silent("SB043", "experts' input sliced along another dim",
           input_changed("layers.0.mlp.experts.0", lambda x: x.transpose(1, 2).reshape(x.shape)), "experts", TENSOR,
           OUTPUTS, "layers.0.mlp.experts.0", "module"),
    Silent("SB044", "each stage divides by the microbatches", divided_by_each_stage, "decoder", PIPELINE,
           GRADIENTS, "layers.0", DOUBLED),
    Silent("SB045", "only the first microbatch is copied to the host", loss_times(lambda k, last, step: k == 0),
           "decoder", Plan(shard=2, accumulate=2, offload=("optimizer",)), GRADIENTS, None, MISSING),
    Silent("SB046", "divided by a loss scale that was never applied", loss_times(lambda k, last, step: 2.0**-16),
           "decoder", Plan(data=2, precision="bf16"), GRADIENTS, None, WEIGHTING),
    Silent("SB047", "divided by the microbatches twice", loss_times(lambda k, last, step: 1 / 3), "decoder",
           Plan(data=2, accumulate=3), GRADIENTS, None, WEIGHTING),
    Silent("SB049", "experts' gradients twice as large", after_backward(experts_times(2)), "experts", DATA,
           GRADIENTS, "layers.1.mlp.experts", DOUBLED),
    Silent("SB050", "later steps number microbatches otherwise",
           loss_times(lambda k, last, step: float(step == 1 or last)), "decoder", SHARD_2, GRADIENTS, None, MISSING),
    Silent("SB052", "averaged over ranks that share samples", loss_times(lambda k, last, step: 0.5), "decoder",
           CONTEXT, GRADIENTS, None, DOUBLED),
    Silent("SB053", "norm of the first rank's parts", clipped_by(norm_of_the_first_rank), "decoder, clipped", TENSOR,
           CLIPPED, None, CLIP),
    Silent("SB058", "weights gone in the backward (the effect of a race)", gone_in_the_backward, "two-tower", SHARD,
           GRADIENTS, ("things.layers", "things.embed", "users.embed"), "backward"),
    Silent("SB059", "only the last microbatch survives", last_microbatch_alone, "decoder", SHARD_2,
           GRADIENTS, None, MISSING),
    Silent("SB061", "router statistics of each rank", nothing, "experts, counted", DATA,
           "buffers", "layers.0.mlp", "buffer"),
    Silent("SB063", "gradients below the experts not added", never_added_back("layers.1.mlp"), "experts", TENSOR,
           GRADIENTS, ("layers.1.mlp", "layers.1.norm2"), MISSING),
    Silent("SB065", "gathered along another dim", keys_gathered_along_heads, "decoder", CONTEXT,
           OUTPUTS, "layers.0.attn", "module"),
    Silent("SB066", "local numbers of tokens taken for global", module_changed("layers.0.mlp", rows_at_local_places),
           "experts", CONTEXT, OUTPUTS, "layers.0.mlp", "module"),
    Silent("SB067", "the hook that balances experts is missing", bias_hook_is_missing, "experts, counted", TENSOR,
           "buffers", "layers.0.mlp", "buffer"),
    Silent("SB068", "gathered logits add gradients up", gathered_logits_add_gradients, "decoder, log probabilities",
           TENSOR, GRADIENTS, None, DOUBLED),
    Silent("SB076", "normalised by rank and microbatch", mean_of_rank_means, "decoder", DATA_2,
           GRADIENTS, None, WEIGHTING),
    Silent("SB077", "gradient of the experts' input not added", never_added_back("layers.0.mlp"), "experts", TENSOR,
           GRADIENTS, ("layers.0.mlp", "layers.0.norm2"), MISSING),
    Silent("SB078", "router's gradient not added",
           parameters_changed("layers.1.mlp.route", lambda: own_columns), "experts", TENSOR,
           GRADIENTS, "layers.1.mlp", MISSING),
    Silent("SB079", "experts divided by too little", before_clipping(experts_times(2)), "experts", SHARD,
           GRADIENTS, "layers.1.mlp.experts", DOUBLED),
    Silent("SB084", "one placement for a mesh of two dims", reduced_in_one_dim_of_the_mesh, "decoder",
           Plan(data=2, shard=2), GRADIENTS, None, MISSING),
    Silent("SB085", "each epoch in the order of the first", order_of_the_first_epoch, "decoder", DATA,
           ORDER, None, "data order"),
    Silent("SB086", "another order after resume", after_resume(shuffled_again), "decoder", DATA,
           ORDER, None, "data order"),
    Silent("SB087", "the second resume begins anew", after_resume(loader_begins_anew), "decoder", SHARD,
           ORDER, None, "data order"),
    Silent("SB089", "a shared key part added to split heads", never_added_back("layers.1.attn.join"),
           "decoder, latent", TENSOR, GRADIENTS, "layers.1.attn", MISSING),
    Silent("SB090", "norm eight times as large", clipped_by(norm_times(8)), "decoder, clipped", SHARD,
           CLIPPED, None, CLIP),
    Silent("SB091", "a norm's weight in split heads not added", never_added_back("layers.1.attn.q_norm"), "decoder",
           TENSOR, GRADIENTS, "layers.1.attn.q_norm", MISSING),
    Silent("SB092", "the backward of a sum adds up", sum_added_up_backward("layers.1.mlp.down"), "decoder", TENSOR,
           GRADIENTS, "layers.1.mlp.down", DOUBLED),
    Silent("SB093", "all-reduce too many below the common expert",
           module_changed("layers.1.mlp.common", gradient_changed(lambda g: g * 2)), "experts", TENSOR,
           GRADIENTS, "layers.1.mlp.common", DOUBLED),
    Silent("SB095", "view of a split dim", rule("unflatten", view_takes_other_dims), "decoder", TENSOR,
           OUTPUTS, "layers.0.attn", "module"),
    Silent("SB096", "mean over parts of unequal length", rule("mean", mean_of_local_means), "classes of odd texts",
           CONTEXT, OUTPUTS, "head", "module"),
    Silent("SB097", "uneven parts put together", uneven_parts_in_equal_places, "decoder, log probabilities", TENSOR,
           (OUTPUTS, "loss"), ("head", ""), ("module", "loss")),
    Silent("SB098", "a number of this rank's part is read", rule("mean", own_mean), "decoder, a number is read",
           CONTEXT, OUTPUTS, "scaled", "module"),
    Silent("SB099", "start values by the number of ranks", start_values(""), "decoder", TENSOR,
           "initial parameters", None, "start values"),
    Silent("SB100", "largest magnitude taken before the absolute value",
           rule("linalg_vector_norm", largest_before_abs), "decoder, peaks", TENSOR,
           OUTPUTS, "layers.0.mlp.peak", "module"),
    Silent("SB101", "stale weight gradients in a stage", parameters_changed("layers.0.", stale), "decoder",
           PIPELINE, GRADIENTS, "layers.0", (MISSING, "backward")),
    Silent("SB104", "attention of divided positions", wrong_log_sum, "decoder", CONTEXT,
           OUTPUTS, "layers.0.attn", "module"),
    Silent("SB109", "scores' gradients of local experts alone",
           module_changed("layers.1.mlp.scores", gradient_changed(own_columns)), "experts", TENSOR,
           GRADIENTS, "layers.1.mlp", MISSING),
    Silent("SB111", "mean of means", tokens_weigh_by_samples, "decoder", SHARD_2, ("loss", GRADIENTS), None, WEIGHTING),
    Silent("SB114", "optimizer from before tensor parallel", optimizer_of_old_parameters, "decoder", TENSOR,
           ("optimizer state", "parameters"), None, STALE),
    Silent("SB119", "set_epoch has no effect", order_of_the_first_epoch, "decoder", SHARD, ORDER, None, "data order"),
    Silent("SB124", "set_epoch does not reach the sampler", order_of_the_first_epoch, "plain", DATA_2,
           ORDER, None, "data order"),
    Silent("SB129", "balance loss not divided by microbatches", balance_of_each_microbatch, "experts, balanced",
           Plan(data=2, accumulate=3), ("loss", GRADIENTS), None, WEIGHTING),
    Silent("SB131", "loaded experts keep random values", start_values(".experts."), "experts", SHARD,
           "initial parameters", "layers.0.mlp.experts", "start values"),
    Silent("SB132", "nothing is clipped over stages", not_clipped_in_a_pipeline, "decoder, clipped", PIPELINE,
           CLIPPED, None, CLIP),
    Silent("SB134", "divided by tokens of replicas, not of ranks", loss_times(lambda k, last, step: 0.5), "decoder",
           TENSOR, GRADIENTS, None, (WEIGHTING, DOUBLED)),
    Silent("SB137", "norm divided by the microbatches", clipped_by(norm_times(0.5)), "decoder, clipped", SHARD_2,
           CLIPPED, None, CLIP),
    Silent("SB140", "iterator used up before clipping", nothing_is_clipped, "decoder, clipped", DATA,
           CLIPPED, None, CLIP),
    Silent("SB143", "means of ranks and microbatches", tokens_weigh_by_samples, "decoder", Plan(data=2, accumulate=3),
           ("loss", GRADIENTS), None, WEIGHTING),
    Silent("SB144", "chunks stay in evaluation mode", later_layers_stay_in_evaluation,
           "decoder of four layers with dropout", Plan(pipeline=2, accumulate=2, schedule="interleaved"),
           OUTPUTS, "layers.2", "training mode"),
    Silent("SB145", "a reused layer loses a gradient (the effect of a race)", second_use_is_lost,
           "decoder, its layers twice", SHARD, GRADIENTS, "layers.0.mlp.down", (MISSING, "backward")),
    # not of the list: what it has not, and these plans can get wrong
    Silent("also 1", "positions numbered from 0 on each rank", module_changed("place", own_positions_from_zero),
           "decoder", CONTEXT, OUTPUTS, "place", "module"),
    Silent("also 2", "causal mask of another block", block_of_another_mask, "decoder", CONTEXT,
           OUTPUTS, "layers.0.attn", "module"),
    Silent("also 3", "moments lost when resumed", after_resume(moments_are_lost), "decoder", SHARD,
           "resumed state", None, "state after a resume"),
    Silent("also 4", "ticks lost when resumed", after_resume(ticks_are_lost), "plain", DATA,
           "resumed state", None, "state after a resume"),
    Silent("also 5", "frozen when resumed", after_resume(frozen), "counting", DATA, GRADIENTS, "net.2", "backward"),
]  # fmt: skip

NOT_PLAYED = {
    "SB026": "memory of another CUDA stream is reused: a race, which --perturb is for",
    "SB056": "an infinite norm: a check computes in float64, where nothing overflows, and one device has it too",
    "SB057": "gradients that underflow in float16: a check computes in float64; its rounding shows them",
    "SB105": "rounding: other buckets add up in another order, below 1e-9 by far",
    "SB107": "a checkpoint that was not written is found when it is loaded: it is not silent here",
    "SB113": "gradients reduced more often than needed: the numbers are the same",
    "SB133": "recomputation that is not applied: the numbers are the same, only memory is not",
}
"""Rows that are not played, and why."""


def judged(bug: Silent, pool: Any) -> dict[str, Any]:
    """Check a job with the bug in it, with the options that a check has by default, and what is right of what it
    says."""
    cloudpickle.register_pickle_by_value(decoders)
    proof = checked(pool, bug.job, bug.plan, plant=_planted(bug.plant))
    return rightness(proof, bug.kind, bug.module, bug.cause)


def rightness(proof: Proof, kind: Words, module: Words | None, cause: Words) -> dict[str, Any]:
    """What is right of a proof, where these are what a person would say. Found: another exit code than 0."""
    first, named = proof.comparison.first, proof.cause
    if first is None or named is None:
        return in_words("; ".join(proof.not_judged), cause)
    within = (module,) if isinstance(module, str) else module or ()
    where = f"{proof.module}."
    return {
        "found": True,
        "kind right": fair(first.kind, kind),
        "module right": not within or any(where.startswith(f"{name}.") or not name for name in within),
        "cause right": fair(named.name, cause),
        "said": f"{first.kind} of {first.name!r} in step {first.step}, module {proof.module!r}, {named.name}: "
        f"{named.evidence}",
    }


IN_WORDS = {
    "use mw.sum(total) / mw.sum(count)": "evaluation without mw.sum",
    "keep parameters and optimizer state in float32": "master weights",
    "Not the same data": "data order",
    "its gradient comes from one rank alone": "missing reduction",
}
"""Causes that not_judged and refusals say in a sentence."""


def in_words(said: str, cause: Words, found: bool = True) -> dict[str, Any]:
    """What is right of what is not judged or refused, neither of which has a kind, a module or a named cause."""
    named = any(words in said and fair(name, cause) for words, name in IN_WORDS.items())
    about = {"kind right": False, "module right": False, "cause right": named}
    return {"found": found and bool(said), **about, "said": said or "equal"}


def _planted(plant: Plant) -> Plant:
    """A function of this module, whose functions travel to the workers."""
    return lambda patch: plant(patch)


def fair(said: str, expected: Words) -> bool:
    return said in ((expected,) if isinstance(expected, str) else expected)
