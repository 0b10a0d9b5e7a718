"""Average gradients over ranks that each hold the whole model.

This is data parallelism: each rank takes its slice of each batch.

Gradients are averaged by the reducer of DistributedDataParallel. This module calls the reducer directly, so the model
stays unchanged. Parameters that fit into one bucket need no such reducer: the bucket is full only after the backward,
and is averaged then.

    first backward    no reducer runs yet; every rank records which parameters its loss reached and in which order. The
                      ranks exchange these lists. A reducer is made for the parameters reached on any rank, its bucket
                      rebuild is run in advance, and it reduces the present gradients. From here on buckets never
                      change, so a resumed run adds up in the same order.
    every backward    the reducer is armed, and buckets are averaged while the backward still runs.
    a parameter that this rank's loss did not reach takes part with zero; one that no rank reached keeps its `grad`.
    a parameter reached for the first time later gets a reducer of its own.

`.grad` after a backward is the mean over ranks of each rank's `.grad`. Gradients that earlier local backwards left
unreduced are part of this mean. Gradients that were already reduced do not change, because they are equal on all ranks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.parallel.rng_notes import notes_of_draws
from meshwise.parallel.shard_units import roots_of
from meshwise.parallel.skipped import parameters_that_may_be_skipped
from meshwise.parallel.technique import CARRIED, SKIPPED, Setup, Technique, reached_parameters, reduced_in
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.torch_compat import reducer
from meshwise.torch_compat.modules import stored_in
from meshwise.torch_compat.reducer import FlatBucket, PlainBucket, copy_each, data_of, parts_of_bucket
from meshwise.transfer import collectives
from meshwise.transfer.reading import agree

_skipped = WeakIdKeyDictionary()  # parameters that some ranks may not use in a forward
_made = itertools.count()  # numbers the `DataParallel` objects, which all ranks make in the same order
_GRADIENT = operator.attrgetter("grad")
_IS_TRAINED = operator.attrgetter("requires_grad")
ALONE = 2  # a storage's use count if no gradient shares it: the bucket's tensor, and the object that reads the count
LATE_GRACE = 30.0  # seconds to wait for all ranks to report which parameters their losses reach


@dataclass(frozen=True)
class _Group:
    """Parameters that share one reducer, in the order in which a backward reaches them."""

    parameters: list[nn.Parameter]
    names: list[str]
    reducer: nn.parallel.DistributedDataParallel | reducer.PlainReducer | PlainBucket
    buckets: int


class DataParallel:
    """Averages the gradients of a model's parameters over all ranks."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        bucket_mb: int,
        piggyback_loss: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._named, self._dtype, self._bucket_mb = list(named), dtype, bucket_mb
        self._parameters = [p for _, p in self._named]
        self._loss_carrier = _loss_carrier(named[0][1]) if piggyback_loss and dtype is None and named else None
        self._groups, self._trained = list[_Group](), list[bool]()
        self._grouped = set[int]()  # ids of the parameters in `_groups`, and of frozen ones
        self._calls = self._buckets = 0  # buckets of this backward: reduced so far, and in total
        self._key = f"meshwise/data/{collectives.group_key()}/{next(_made)}"
        self._backwards = 0
        self._factor: Callable[[], Tensor] | None = None
        self._kept: dict[int, Tensor] = {}
        self.shared_terms = False
        self.unreduced = False
        """Whether `.grad` contains contributions that have not been averaged over the ranks."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
        run: Callable[..., None] | None = None,
    ) -> Tensor | None:
        """Run the backward of `loss`; see `Reduction.backward`."""
        self._backwards, run = self._backwards + 1, run or torch.autograd.backward
        before = dict[int, tuple[Tensor, int]]()
        trained = list(map(_IS_TRAINED, self._parameters))
        if trained != self._trained:  # the set of trained parameters has changed: form new groups
            self._trained, self._groups, self._grouped = trained, [], set()
        if any(map(operator.is_not, map(_GRADIENT, self._parameters), itertools.repeat(None))):
            before = {id(p): (p.grad, reducer.version(p.grad)) for p in self._parameters if p.grad is not None}
        if factor is not None and not whole:
            self._kept = {key: gradient for key, (gradient, _) in before.items()}
            for p in self._parameters:  # the loss weight must multiply only this backward's gradients
                p.grad = None
        groups, self._buckets = self._groups if reduce else [], 0
        if len(groups) > 1:
            groups = self._reached(loss)
        for group in groups:
            if not isinstance(group.reducer, PlainBucket):
                reducer.arm(group.reducer)
            self._buckets += group.buckets
        self._factor, self._calls = factor, 0
        carrier, order = self._loss_carrier if self._groups[:1] == groups[:1] != [] else None, list[int]()
        if carrier is not None:
            sent = value if value is not None and factor is None else carrier.new_zeros(1)
            if sent.shape != carrier.shape or sent.dtype is not carrier.dtype:
                sent = F.pad(sent.reshape(-1).to(carrier), (0, CARRIED - sent.numel()))
            if isinstance(groups[0].reducer, PlainBucket):
                carrier.grad = sent
                run((loss,))
            else:
                run((loss, carrier), (None, sent))
        elif reduce and not self._groups:
            order = self._watched(loss, run)
        else:
            run((loss,))
        if self._calls < self._buckets:
            only = groups[0].reducer if len(groups) == 1 and not before else None
            if not isinstance(only, PlainBucket) or not self._reduce(only, fresh=True):
                self._complete(groups, before)
        if factor is not None:
            self._finish_unarmed(groups, factor)
        if reduce and len(self._grouped) < len(self._parameters):
            self._reduce_ungrouped(order)
        self.unreduced = not reduce or (self.unreduced and len(groups) < len(self._groups))
        self._factor, self._kept, mean = None, {}, None
        if self._loss_carrier is not None:
            mean, self._loss_carrier.grad = self._loss_carrier.grad, None
        if value is None or carrier is None or factor is not None or mean is None:
            return None if value is None else collectives.all_reduce_mean(value.clone(), of="the loss")
        same = mean.shape == value.shape and mean.dtype is value.dtype
        return mean if same else mean[: value.numel()].view(value.shape).to(value.dtype)

    def plain(self, loss: Tensor) -> Tensor:
        """Return `loss` unchanged: it is a plain tensor already. See `Reduction.plain`."""
        return loss

    def reduce_now(self) -> None:
        """Average all gradients in `.grad`, which earlier backwards have left unreduced. Collective."""
        held = collectives.gather_objects([p.grad is not None for _, p in self._named])
        somewhere = {id(p) for (_, p), ranks in zip(self._named, zip(*held, strict=True), strict=True) if any(ranks)}
        groups = list(self._groups)
        self._reduce_ungrouped([])
        for group in groups:
            self._replay(group, [p.grad for p in group.parameters])
            for p in group.parameters:
                if id(p) not in somewhere:
                    p.grad = None
        self.unreduced = False

    def close(self) -> None:
        """Drop all references to the parameters, and to the reducers, which would otherwise keep the parameters in
        memory."""
        self._named, self._parameters, self._groups, self._grouped = [], [], [], set()

    def _watched(self, loss: Tensor, run: Callable[..., None]) -> list[int]:
        """Run the backward, and return the indices of the parameters it reached, in order."""
        order: list[int] = []
        handles = []
        for index, p in enumerate(self._parameters):
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index)))
        run((loss,))
        for handle in handles:
            handle.remove()
        return order

    def _reached(self, loss: Tensor) -> list[_Group]:
        """Return the groups with at least one parameter on which this loss depends."""
        reached = reached_parameters(loss)
        groups = [g for g in self._groups if any(id(p) in reached for p in g.parameters)]
        self._agree("loss", [name for g in groups for name in g.names[-1:]])
        return groups

    def _on_bucket(self, bucket: GradBucket | FlatBucket) -> torch.futures.Future[Tensor]:
        """Begin to average the gradients in a full bucket. The reducer calls this method as a hook."""
        self._calls += 1
        buffer = bucket.buffer()
        if self._factor is not None or self._kept:
            self._weigh(bucket)
        if self._dtype is None or self._dtype == buffer.dtype:
            return collectives.begin_mean(buffer, of="gradients")
        mean = collectives.begin_mean(stored_in(buffer, self._dtype), of="gradients")
        return mean.then(lambda done: buffer.copy_(done.value()))

    def _reduce(self, bucket: PlainBucket, *, fresh: bool = False) -> bool:
        """Average a bucket's gradients, or return False if one is missing. fresh: whether all are of this backward."""
        gradients = list(map(_GRADIENT, bucket.members))
        if not all(map(operator.is_not, gradients, itertools.repeat(None))):
            return False
        plain = self._factor is None and not self._kept and self._dtype is None
        flat = bucket.kept
        if flat is None or flat.requires_grad or reducer.references(reducer.address(flat.untyped_storage())) != ALONE:
            flat = bucket.members[0].new_empty(bucket.size)
            bucket.kept = flat if flat.is_cpu else None  # on a CPU, new memory in each step would cost page faults
        views = parts_of_bucket(flat, bucket.members)
        if plain and bucket.large:  # copy and divide in one pass
            for view, gradient in zip(views, gradients, strict=True):
                torch.div(gradient, bucket.ranks, out=view)
        else:
            copy_each(views, gradients)
        if not plain:
            self._on_bucket(FlatBucket(bucket.members, flat)).wait()
        else:
            self._calls += 1
            collectives.sum_now(flat if bucket.large else flat.div_(bucket.ranks), of="gradients")
        if fresh and all(map(Tensor.is_contiguous, gradients)):
            for p, view in zip(bucket.members, views, strict=True):
                p.grad = data_of(view)  # `.data`, so that autograd sees no view
        else:
            copy_each(gradients, views)
        return True

    def _weigh(self, bucket: GradBucket | FlatBucket) -> None:
        """Multiply a bucket's gradients by this backward's loss weight, and add earlier gradients that were kept."""
        if self._factor is not None:
            bucket.buffer().mul_(self._factor().to(bucket.buffer().dtype))
        for gradient, p in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if id(p) in self._kept:
                gradient.add_(self._kept.pop(id(p)))

    def _complete(self, armed: list[_Group], before: Mapping[int, tuple[Tensor, int]]) -> None:
        """Reduce the buckets that no hook has reduced."""
        missing = [
            (name, p)
            for group in armed
            for name, p in zip(group.names, group.parameters, strict=True)
            if (held := p.grad) is None
            or ((old := before.get(id(p))) is not None and old[0] is held and old[1] == reducer.version(held))
        ]
        missed_by_all = self._take_part(missing, before) if missing else None
        for group in armed:
            if isinstance(group.reducer, PlainBucket):
                self._reduce(group.reducer)
        if missed_by_all is not None:
            missed_by_all()

    def _take_part(
        self, missing: Sequence[tuple[str, nn.Parameter]], before: Mapping[int, tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Contribute zero gradients for the parameters in `missing`, which this rank's loss did not reach. Return a
        function that afterwards drops the gradients that no rank's loss reached."""
        store = reducer.default_store()
        keys = [f"{self._key}/unused/{self._backwards}/{name}" for name, _ in missing]
        for key, (_, p) in zip(keys, missing, strict=True):
            store.add(key, int(id(p) not in before))  # 0 if an earlier backward left a gradient, which must stay
        torch.stack([(p * 0).sum().real.float() for _, p in missing]).sum().backward()

        def missed_by_all() -> None:
            for key, (_, p) in zip(keys, missing, strict=True):
                if store.add(key, 0) == collectives.world_size() and id(p) not in before:
                    p.grad = None

        return missed_by_all

    def _finish_unarmed(self, armed: Sequence[_Group], factor: Callable[[], Tensor]) -> None:
        """Multiply gradients by the loss weight of this backward, for parameters that are not reduced in this
        backward."""
        done = {id(p) for group in armed for p in group.parameters}
        for _, p in self._named:
            if id(p) in done:
                continue
            if p.grad is not None:
                p.grad.mul_(factor().to(p.grad.dtype))
            if id(p) in self._kept:
                old = self._kept.pop(id(p))
                p.grad = old if p.grad is None else p.grad.add_(old)

    def _reduce_ungrouped(self, order: Sequence[int]) -> None:
        """Make a reducer for the parameters that have a gradient but no reducer yet, and reduce their gradients with
        it."""
        fresh = [i for i, (_, p) in enumerate(self._named) if p.grad is not None and id(p) not in self._grouped]
        if self._groups:
            if not fresh:
                return
            self._agree("parameters", [self._named[i][0] for i in fresh])
        else:
            everyone, trained = zip(*collectives.gather_objects(([*order, *fresh], self._trained)), strict=True)
            self._check_trained(trained)
            # Use rank 0's order, and append what only other ranks have reached.
            fresh = list(dict.fromkeys(index for reached in everyone for index in reached))
        fresh, frozen = [i for i in fresh if self._trained[i]], [i for i in fresh if not self._trained[i]]
        for p in (self._parameters[i] for i in frozen if self.unreduced):  # no later backward reduces these gradients
            p.grad = collectives.all_reduce_mean(torch.zeros_like(p) if p.grad is None else p.grad, of="gradients")
        self._grouped |= {id(self._parameters[i]) for i in frozen}
        later = [i for i, (_, p) in enumerate(self._named) if p.requires_grad and p in _skipped and i not in fresh]
        later = later if fresh and not self._groups else []  # parameters that a rank may skip belong to the first group
        if fresh:
            self._groups.append(self._make_group([*fresh, *later]))
            self._grouped |= {id(self._named[i][1]) for i in (*fresh, *later)}
        for i in later:
            self._named[i][1].grad = None

    def _check_trained(self, ranks: Sequence[Sequence[bool]]) -> None:
        """Raise PlanError for a parameter that only some ranks train. ranks: for each rank, which parameters it
        trains."""
        for (name, _), trains in zip(self._named, zip(*ranks, strict=False), strict=False):
            if len(set(trains)) > 1:
                raise PlanError(
                    f"parameter {name} is trained on rank {trains.index(True)} and frozen on rank "
                    f"{trains.index(False)}. Set requires_grad to the same on every rank."
                )

    def _make_group(self, indices: Sequence[int]) -> _Group:
        """Make a reducer for some parameters, and average their present gradients with it."""
        names = [self._named[i][0] for i in indices]
        parameters = [self._named[i][1] for i in indices]
        if self._loss_carrier is not None and not self._groups:
            names, parameters = ["the loss", *names], [self._loss_carrier, *parameters]
        gradients = [p.grad for p in parameters]
        # DDP expects gradients in the reverse of the order in which it is given the parameters.
        made = reducer.make_reducer(parameters[::-1], self._bucket_mb, self._on_bucket, collectives.dividing())
        group = _Group(parameters, names, made, 0)
        for _ in range(2):  # two empty iterations, because DDP rebuilds its buckets before the second
            self._replay(group, [None] * len(parameters))
        self._replay(group, gradients)
        return _Group(parameters, names, made, self._calls)

    def _replay(self, group: _Group, gradients: Sequence[Tensor | None]) -> None:
        """Average `gradients` over the ranks with the group's reducer."""
        self._factor, self._calls, self._buckets, self._kept = None, 0, 0, {}
        for p in group.parameters:
            p.grad = None
        if not isinstance(group.reducer, PlainBucket):
            reducer.arm(group.reducer)
        terms = [
            (p * (torch.zeros_like(p) if g is None else g.conj())).sum().real.float()
            for p, g in reversed(list(zip(group.parameters, gradients, strict=True)))
        ]  # autograd runs the newest node first: the last term's gradient is ready first
        torch.stack(terms).sum().backward()
        if isinstance(group.reducer, PlainBucket):
            self._reduce(group.reducer)

    def _agree(self, what: str, names: Iterable[str]) -> None:
        """Raise PlanError if the ranks name different parameters, before a collective on these parameters."""
        text = ", ".join(names)
        key = f"{self._key}/{what}/{self._backwards}"
        other = agree(key, text, collectives.world_size(), LATE_GRACE)
        if other is not None:
            others = f"the loss of another rank depends on {other}" if other else "the losses of other ranks do not"
            raise PlanError(
                f"backward {self._backwards}: the loss of this rank depends on {text or 'no parameter'}, but {others}. "
                "Use the same parameters on every rank in the same step, or freeze them with requires_grad_(False). "
                f"{SKIPPED}"
            )


def _loss_carrier(first: nn.Parameter) -> nn.Parameter:
    """Make the extra parameter whose gradient carries the loss."""
    dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32
    return nn.Parameter(torch.zeros(CARRIED, dtype=dtype, device=first.device))


def reduction_of(named: Mapping[str, nn.Parameter], plan: Plan, *, piggyback_loss: bool) -> DataParallel:
    """Make the object that averages the gradients of replicated parameters, which may belong to several models.

    piggyback_loss: see `apply` in parallel/apply.py.
    """
    dtype = reduced_in(plan.dtypes)
    return DataParallel(list(named.items()), bucket_mb=plan.bucket_mb, piggyback_loss=piggyback_loss, dtype=dtype)


def check_can_be_averaged(model: nn.Module) -> None:
    """Raise PlanError for a model whose gradients cannot be averaged over ranks."""
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise PlanError(
                f"parameter {name} belongs to a lazy module and has no shape yet, so each rank would create its own. "
                "Run a batch through the model before it is distributed, or use a module with given sizes."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise PlanError(
                f"module {name or type(module).__name__} makes sparse gradients (sparse=True), which are not averaged "
                "over ranks. Remove sparse=True (and SparseAdam, which needs it), or use one device."
            )


def _check_model(setup: Setup) -> None:
    if setup.world.size > 1:
        check_can_be_averaged(setup.model)


def _apply(setup: Setup) -> None:
    if setup.world.size == 1:
        return
    setup.notes += notes_of_draws(setup.model)
    if setup.reduction is None:
        named = dict(setup.model.named_parameters())
        _skipped.update({named[n]: True for n in parameters_that_may_be_skipped(setup.model, roots_of(setup.model))})
        setup.reduction = reduction_of(named, setup.plan, piggyback_loss=setup.piggyback_loss)


DATA = Technique(check_model=_check_model, apply=_apply)
