"""transformers' Trainer on all devices: `trainer = mw.distribute(trainer)`, then `trainer.train()`.

The Trainer of each rank is told that it is alone, so that all that it does for several processes rests, and batches,
backwards, evaluations and files are meshwise's. Its class, and that of its Accelerator, get a class of ours in front:

    batches     `per_device_train_batch_size` is that of all devices together; each rank reads its rows of every batch,
                in the order that the Trainer has on one device
    ahead       Trainer reads all batches of a step before the first forward, to count `num_items_in_batch`: they are
                looked at, and given to the loop one by one, so that each is worked on with its own share
    loss        a sum over `num_items_in_batch`, which is that of all ranks; else a mean over samples, or over what a
                cross entropy counts
    evaluation  the loss is that of the whole batch, and the rows of all ranks come in the order of the data
    files       rank 0 writes, what a plan divides is whole, and any number of devices goes on from it

Read in transformers 5.23 and accelerate 1.15; nothing is imported of them. Tested in tests/script/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from meshwise.autograd.loss_graph import cross_entropy_means
from meshwise.compat.tree import all_leaves, map_tensors
from meshwise.data.order import BatchSlice
from meshwise.engine import steps
from meshwise.engine.engine import Engine
from meshwise.guards.unsummed import UnsummedLoops
from meshwise.recovery.collect import collected
from meshwise.script.distributed_loader import DistributedLoader
from meshwise.script.over_ranks import joined
from meshwise.script.verbs import accumulate
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.tracking import tracking
from meshwise.transfer import collectives
from meshwise.workers.join import rank_context, rejoin

TRAINER = "transformers.trainer"
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SUM, MEAN, ITEMS = "a sum over num_items_in_batch", "a mean over samples", "a mean over the items of a cross entropy"
WHOLE = (
    "Trainer: per_device_train_batch_size={train} and per_device_eval_batch_size={eval} are of all {ranks} devices "
    "together."
)
UNLIKE = ("_runtime", "_per_second", "_time", "total_flos", "num_input_tokens_seen")
"""Of what is logged: times, and what was computed, for which a rank pads to the longest of its own rows."""
REFUSED = "mw.distribute(trainer) on {ranks} devices: {what} is refused: {instead}."
SWEEP = "each rank would try other values. Loop over them in the script, with a Trainer for each"
Share = tuple[Any, BatchSlice]


def is_trainer(thing: Any) -> bool:
    """Whether it is transformers' Trainer, or of a class made from it."""
    return any(cls.__module__ == TRAINER and cls.__name__ == "Trainer" for cls in type(thing).__mro__)


def join_as_trainer() -> None:
    """TrainingArguments have opened a process group, which may have no backend for the CPU: make it anew, as ours."""
    rank_context()
    rejoin()


def model_of(trainer: Any) -> list[nn.Module]:
    """The model that the plan is applied to now; one of `model_init` is when it is made."""
    return [trainer.model] if trainer.model_init is None and isinstance(trainer.model, nn.Module) else []


def distribute_trainer(trainer: Any, engine: Engine, plan: Plan | None, share: Callable[[Any], Any]) -> Any:
    """Make the Trainer work on all ranks, in place. share: `mw.distribute` of one thing. Raises UsageError for what
    would not be the same on several devices."""
    if isinstance(trainer, _Trainer):
        return trainer
    world = rank_context().world
    if world.size > 1:
        _refuse(trainer, world.size)
    ranks = _Ranks(engine, plan, share, trainer)
    _be_alone(trainer)
    accelerator = trainer.accelerator
    _put_in_front(_Accelerator, accelerator, ranks)
    _put_in_front(_Trainer, trainer, ranks)
    gather = functools.partial(accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object)
    trainer.gather_function = gather
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        engine.add_optimizer(trainer.optimizer)
    if world.size > 1:
        args = trainer.args
        train, evaluation = args.per_device_train_batch_size, args.per_device_eval_batch_size
        engine.notify(WHOLE.format(train=train, eval=evaluation, ranks=engine.world.size))
    return trainer


def _put_in_front(front: type, thing: Any, ranks: _Ranks) -> None:
    cls = type(thing)
    thing.__class__ = type(cls.__name__, (front, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    thing.meshwise = ranks


def _be_alone(trainer: Any) -> None:
    """Accelerate's states anew, for a world of one; which process writes and logs is still known."""
    state, world = import_module("accelerate.state"), rank_context().world
    alone = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    alone["ACCELERATE_TORCH_DEVICE"] = world.device
    with mock.patch.dict(os.environ, alone, clear=True):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        told = state.PartialState(cpu=world.kind == "cpu")
        told.process_index, told.local_process_index = world.rank, world.local_rank
        trainer.create_accelerator_and_postprocess()
    trainer.args.distributed_state = told


def _refuse(trainer: Any, ranks: int) -> None:
    """Raises UsageError for what is not the same on several devices."""
    args = trainer.args
    own = sorted({cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")} - OF_TRL)
    found = {
        "deepspeed": (args.deepspeed, "leave it out; a plan divides the model (meshwise plan, --plan)"),
        "fsdp": (args.fsdp, "leave it out; a plan with shard divides the model (meshwise plan, --plan)"),
        "parallelism_config": (getattr(args, "parallelism_config", None), "leave it out; use a plan (--plan)"),
        "a model that was divided where it was loaded": (
            getattr(trainer, "is_distributed_loading_by_transformers", False),
            "load it whole, or under mw.deferred(); a plan divides it (--plan)",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a rank that runs out of memory would begin anew alone. Leave it out; meshwise plan says what fits, and "
            "per_device_train_batch_size is of all devices",
        ),
        "torch_compile": (args.torch_compile, "leave it out; use a plan with compile"),
        f"optim={getattr(args.optim, 'value', args.optim)}": (
            any(name in str(args.optim).lower() for name in ("layerwise", "lomo")),
            "it steps inside the backward, before gradients are averaged. Use one that steps behind it",
        ),
        f"TRL's {own and own[0]}": (own, "it compares or generates rows over ranks. Write its loop with mw.distribute"),
        "a get_batch_samples of your own": (_is_own(trainer, "get_batch_samples"), "leave it to Trainer"),
    }
    for name, (given, instead) in found.items():
        if given:
            raise UsageError(REFUSED.format(ranks=ranks, what=name, instead=instead))


def _is_own(trainer: Any, name: str) -> bool:
    """Whether a method is not that of transformers itself."""
    return not str(getattr(type(trainer), name).__module__).startswith("transformers.")


OF_TRL = {"SFTTrainer", "DPOTrainer", "RewardTrainer", "_BaseTrainer", "BaseTrainer"}
"""Trainers of TRL whose losses are sums or means over rows."""


@dataclass(eq=False)
class _Ranks:
    """What a Trainer and its Accelerator share. share: `mw.distribute` of one thing.

    kinds: of the loss, by whether it was given `num_items_in_batch`: found once. weight: what the newest loss is a mean
    over. loss: that of all ranks, of the newest backward. parts: the shares of the batches whose items are counted.
    """

    engine: Engine
    plan: Plan | None
    share: Callable[[Any], Any]
    trainer: Any
    loss: Tensor | None = None
    weight: Tensor | None = None
    computed: bool = False
    items: bool = False

    def __post_init__(self) -> None:
        self.kinds: dict[bool, str] = {}

    @property
    def alone(self) -> bool:
        return self.engine.world.size == 1

    @property
    def kind(self) -> str:
        return self.kinds.get(self.items, MEAN)

    @property
    def samples(self) -> int:
        """Of this rank's part of the batch; 1 outside of loops."""
        part = self.engine.part
        return 1 if part is None else part.samples

    def backward(self, loss: Tensor) -> None:
        """`mw.backward` of a loss of this rank's part of the batch."""
        if self.kind == SUM:
            self.loss = steps.backward(self.engine, loss, None, "sum")
        else:
            self.loss = steps.backward(self.engine, loss, self.weight if self.kind == ITEMS else None, "mean")

    def whole_loss(self, loss: Tensor) -> Tensor:
        """That of the whole batch, of an evaluation's on this rank's part. Collective."""
        own = loss.detach().double().reshape(())
        weight = torch.as_tensor(1.0 if self.kind == SUM else self.samples if self.weight is None else self.weight)
        weight = weight.to(own) * (self.samples > 0)
        total = collectives.all_reduce(torch.stack([torch.where(weight != 0, own * weight, 0), weight]))
        return (total[0] if self.kind == SUM else total[0] / total[1]).to(loss)


# The Trainer.


class _Trainer:
    """In front of a Trainer's own class."""

    meshwise: _Ranks

    def train(self: Any, *args: Any, **options: Any) -> Any:
        module = import_module(TRAINER)
        with mock.patch.object(module, "skip_first_batches", functools.partial(_skip, module.skip_first_batches)):
            return super().train(*args, **options)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_eval_dataloader(*args, **options))  # type: ignore[misc]

    def get_test_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_test_dataloader(*args, **options))  # type: ignore[misc]

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        ahead = epoch_iterator.look(num_batches)
        batches, parts = [batch for batch, _ in ahead], [part for _, part in ahead]
        return _Window(epoch_iterator, len(ahead)), self._get_num_items_in_batch(batches, device, parts)

    def _get_num_items_in_batch(self: Any, batches: Any, device: Any, parts: Sequence[BatchSlice] = ()) -> Any:
        """Of all ranks, padding left out. Collective."""
        ranks, own = self.meshwise, super()._get_num_items_in_batch  # type: ignore[misc]
        items = own(batches, device)
        if items is None or ranks.alone:
            return items
        parts = parts or [ranks.engine.part]
        if padding := [batch for batch, part in zip(batches, parts, strict=True) if not part.samples]:
            items = items - own(padding, device)
        whole = collectives.all_reduce(torch.as_tensor(items, dtype=torch.float64, device=device))
        return whole.to(items.dtype) if isinstance(items, Tensor) else type(items)(whole.item())

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        ranks = self.meshwise
        compute = functools.partial(super().compute_loss, model, inputs)  # type: ignore[misc]
        if ranks.alone:
            return compute(*args, **options)
        items = options.get("num_items_in_batch")
        ranks.computed, ranks.items, ranks.weight = True, items is not None, None
        if ranks.items not in ranks.kinds:
            return _first_loss(ranks, compute, items, args, options)
        with torch.enable_grad() if ranks.kind == ITEMS else contextlib.nullcontext():
            result = compute(*args, **options)
        if ranks.kind == ITEMS:
            ranks.weight = _weight(ranks, _loss_of(result))
        return result

    def training_step(self: Any, *args: Any, **options: Any) -> Any:
        own = super().training_step(*args, **options)  # type: ignore[misc]
        whole = self.meshwise.loss
        return own if whole is None else whole.to(own)

    def prediction_step(self: Any, *args: Any, **options: Any) -> Any:
        ranks = self.meshwise
        ranks.computed = False
        loss, logits, labels = super().prediction_step(*args, **options)  # type: ignore[misc]
        if loss is None:
            return loss, logits, labels
        if not ranks.computed and not ranks.alone:  # Seq2SeqTrainer, which generates, asks the model itself
            ranks.items, inputs = False, args[1] if len(args) > 1 else options["inputs"]
            ranks.weight = super()._get_num_items_in_batch([inputs], self.args.device)  # type: ignore[misc]
        return joined(ranks.engine, loss if ranks.alone else ranks.whole_loss(loss)), logits, labels

    def hyperparameter_search(self: Any, *args: Any, **options: Any) -> Any:
        if self.meshwise.alone:
            return super().hyperparameter_search(*args, **options)  # type: ignore[misc]
        raise UsageError(
            REFUSED.format(ranks=self.meshwise.engine.world.size, what="hyperparameter_search", instead=SWEEP)
        )

    # Files, and what is logged.

    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if _internal_call:  # of a checkpoint: others look whether it is there
            collectives.barrier(collectives.everyone())

    def _save(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        if self.meshwise.engine.plan.parameters_divided and state_dict is None:
            state_dict = collected(self.model.state_dict())
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_checkpoint(self: Any, *args: Any, **options: Any) -> Any:
        result = super()._save_checkpoint(*args, **options)  # type: ignore[misc]
        collectives.barrier(collectives.everyone())
        return result

    def _save_optimizer_and_scheduler(self: Any, output_dir: Any) -> None:
        optimizer = self.optimizer
        if self.meshwise.engine.plan.state_divided:
            whole = collected(optimizer.state_dict())
            self.optimizer = SimpleNamespace(state_dict=lambda: whole)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self: Any, output_dir: Any) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def store_flos(self: Any) -> None:
        if not self.meshwise.alone:
            self.current_flos = collectives.all_reduce(torch.tensor(self.current_flos, dtype=torch.float64)).item()
        super().store_flos()  # type: ignore[misc]

    def log(self: Any, logs: dict[str, float], *args: Any, **options: Any) -> None:
        super().log(logs, *args, **options)  # type: ignore[misc]
        numbers = {n: value for n, value in logs.items() if isinstance(value, int | float) and not n.endswith(UNLIKE)}
        tracking.log(numbers, step=self.state.global_step)


def _first_loss(ranks: _Ranks, compute: Callable[..., Any], items: Any, args: Any, options: dict[str, Any]) -> Any:
    """The first loss of its kind; what it is a mean over is seen in its derivative and its graph. Collective."""
    if items is not None:
        items = torch.as_tensor(items).detach()
        items = (items if items.is_floating_point() else items.double()).clone().requires_grad_()
        options = {**options, "num_items_in_batch": items}
    with torch.enable_grad():
        result = compute(*args, **options)
    loss, kind = _loss_of(result), MEAN
    by = None
    if items is not None and loss.requires_grad:
        by = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)[0]
    if by is not None:
        added = -(by * items).detach().double()
        kind = SUM if torch.allclose(added, loss.detach().double(), rtol=1e-4, atol=1e-12) else MIXED
    elif _is_of_items(ranks, loss):
        kind = ITEMS
    kinds = collectives.gather_objects(kind)
    kind = next((each for each in (MIXED, SUM, ITEMS) if each in kinds), MEAN)
    if kind == MIXED:
        raise UsageError(
            f"Trainer: the loss of {type(ranks.trainer.model).__name__} is {SUM} and a term besides (such as that of a "
            "router, which is of the rows of one rank): several devices would not compute what one does. Leave that "
            "term out (router_aux_loss_coef=0), or give compute_loss_func a sum divided by num_items_in_batch."
        )
    ranks.kinds[ranks.items] = kind
    ranks.weight = _weight(ranks, loss) if kind == ITEMS else None
    return result


MIXED = "a sum over num_items_in_batch and more"


def _loss_of(result: Any) -> Tensor:
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def _is_of_items(ranks: _Ranks, loss: Tensor) -> bool:
    """Whether a cross entropy in it is a mean over other items than samples."""
    part = ranks.engine.part
    rows = 1 if part is None else len(part.indices)
    return any(targets != rows or weighed for _, targets, weighed in cross_entropy_means(loss))


def _weight(ranks: _Ranks, loss: Tensor) -> Tensor:
    """What the cross entropy in a loss is a mean over."""
    found = cross_entropy_means(loss)
    if len(found) != 1:
        raise UsageError(
            f"Trainer: the loss of {type(ranks.trainer.model).__name__} has {len(found)} cross entropies that are "
            "means over other items than samples, so it is not known how the parts of several devices add up. Give a "
            "compute_loss_func that divides a sum by num_items_in_batch."
        )
    return found[0][0]


class _Window:
    """The batches of an optimizer step, each read when it is worked on."""

    def __init__(self, epoch: Iterator[Any], count: int) -> None:
        self._epoch, self._count = epoch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            if (batch := next(self._epoch, None)) is None:
                return
            yield batch


# Its loaders.


class _Ahead:
    """What a distributed loader is read through: batches with their shares, which may be looked at before they come."""

    def __init__(self, pairs: Iterator[Share]) -> None:
        self._pairs, self._waiting = pairs, deque[Share]()

    def __iter__(self) -> Iterator[Share]:
        return self

    def __next__(self) -> Share:
        return self._waiting.popleft() if self._waiting else next(self._pairs)

    def look(self, count: int) -> list[Share]:
        while len(self._waiting) < count and (pair := next(self._pairs, None)) is not None:
            self._waiting.append(pair)
        return list(self._waiting)[:count]


class _Reader:
    """A `Wrapper` of a distributed loader that lets its Trainer look ahead."""

    def __init__(self) -> None:
        self.ahead = _Ahead(iter(()))

    def take(self) -> None:
        """The loop itself reads."""

    def pairs(self, inner: Iterator[Share]) -> Iterator[Share]:
        self.ahead = _Ahead(inner)
        return self.ahead


class _Loader:
    """A distributed loader as Trainer wants it: with an epoch that is set, and batches that are skipped."""

    end_of_dataloader, remainder = False, -1

    def __init__(self, loader: DistributedLoader, state: Any) -> None:
        """state: accelerate's, which knows the loop that is at its end."""
        self._loader, self._state, self.skipped = loader, state, 0
        self._reader = loader.wrapper = _Reader()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Of what draws the order."""
        for each in (self.batch_sampler, self.sampler, self.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        self._loader.go_to(epoch, self.skipped)
        self.skipped = 0

    def __iter__(self) -> _Epoch:
        return _Epoch(self, iter(self._loader), self._reader, self._state)


class _Epoch:
    """A loop over a loader."""

    def __init__(self, loader: _Loader, batches: Iterator[Any], reader: _Reader, state: Any) -> None:
        self._loader, self._batches, self._reader, self._state = loader, batches, reader, state
        loader.end_of_dataloader = False
        state._add_dataloader(loader)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._state._remove_dataloader(self._loader)
            raise StopIteration
        self._loader.end_of_dataloader = not self.look(1)
        return batch

    def look(self, count: int) -> list[Share]:
        return self._reader.ahead.look(count)


def _skip(skip: Callable[..., Any], loader: Any, num_batches: int = 0) -> Any:
    if not isinstance(loader, _Loader):
        return skip(loader, num_batches)
    loader.skipped = num_batches
    return loader


# Its Accelerator.


class _Accelerator:
    """In front of an Accelerator's own class."""

    meshwise: _Ranks

    def prepare_model(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if self.meshwise.plan is not None:
            self.meshwise.engine.add_models([model], self.meshwise.plan)
        return super().prepare_model(model, *args, **options)  # type: ignore[misc]

    def prepare_optimizer(self: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        self.meshwise.engine.add_optimizer(getattr(optimizer, "optimizer", optimizer))
        return super().prepare_optimizer(optimizer, *args, **options)  # type: ignore[misc]

    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(data_loader, DataLoader):
            return data_loader
        if self.use_seedable_sampler and type(data_loader.sampler) is RandomSampler:
            _seed(data_loader, self.dataloader_config.data_seed)
        return _Loader(self.meshwise.share(data_loader), self.gradient_state)

    def backward(self: Any, loss: Tensor, **options: Any) -> None:
        self.meshwise.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def no_sync(self: Any, model: Any = None) -> contextlib.AbstractContextManager[None]:
        return accumulate()

    def clip_grad_norm_(self: Any, *args: Any, **options: Any) -> Any:
        return self.meshwise.engine.program.plain(super().clip_grad_norm_(*args, **options))  # type: ignore[misc]

    def wait_for_everyone(self: Any) -> None:
        collectives.barrier(collectives.everyone())

    def gather(self: Any, tensor: Any) -> Any:
        return map_tensors(functools.partial(_rows, self.meshwise), tensor)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in all_leaves(input_data)):
            own = list(input_data) if self.meshwise.samples else []
            return [each for rank in collectives.gather_objects(own) for each in rank]
        return self.gather(input_data)

    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if self.meshwise.alone or reduction == "none":
            return tensor
        ranks = collectives.all_reduce(torch.tensor(int(self.meshwise.samples > 0))).item()
        by = 1 / ranks if reduction == "mean" else 1

        def reduced(own: Tensor) -> Tensor:
            total = collectives.all_reduce(own.clone() if self.meshwise.samples else torch.zeros_like(own))
            return total if by == 1 else total * by

        return map_tensors(reduced, tensor)

    def pad_across_processes(
        self: Any, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        if self.meshwise.alone:
            return tensor
        return map_tensors(lambda own: _padded(own, dim, pad_index, pad_first), tensor)


def _seed(loader: DataLoader[Any], seed: int | None) -> None:
    """The order of an epoch is that of (seed, epoch), as accelerate has it on one device."""
    sampler: Any = loader.sampler
    seeded = import_module("accelerate.data_loader").SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )
    object.__setattr__(loader, "sampler", seeded)  # which a DataLoader lets nobody set once it is made
    if type(loader.batch_sampler) is BatchSampler:
        loader.batch_sampler.sampler = seeded


def _cut(ranks: _Ranks, rows: Tensor) -> Tensor:
    """The rows of samples: Trainer repeats the loss of a batch as often as a whole batch has samples."""
    part = ranks.engine.part
    return rows if part is None or rows.ndim == 0 else rows[: part.samples]


def _rows(ranks: _Ranks, tensor: Tensor) -> Tensor:
    """The rows of all ranks, in the order of the loader; a number gives one for each rank. Collective."""
    mine = _cut(ranks, tensor.detach())
    if (loops := ranks.engine.events.find(UnsummedLoops)) is not None:
        loops.reduced()
    if ranks.alone:
        return mine
    mine = mine if mine.ndim else mine.reshape(1)[: ranks.samples]
    counts = [int(count) for count in collectives.all_gather(torch.tensor([len(mine)])).flatten()]
    filled = torch.cat([mine, mine.new_zeros((max(counts) - len(mine), *mine.shape[1:]))])
    gathered = collectives.all_gather(filled.contiguous())
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _padded(own: Tensor, dim: int, value: float, first: bool) -> Tensor:
    """As long in a dim as that of the rank that has most. Collective."""
    if dim >= own.ndim:
        return own
    most = int(collectives.all_reduce(torch.tensor(own.shape[dim]), "max"))
    if most == own.shape[dim]:
        return own
    shape = list(own.shape)
    shape[dim] = most - own.shape[dim]
    more = own.new_full(shape, value)
    return torch.cat([more, own] if first else [own, more], dim)
