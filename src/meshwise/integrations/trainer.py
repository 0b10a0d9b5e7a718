"""Run transformers' Trainer on all devices.

Write `trainer = mw.distribute(trainer)`, then `trainer.train()`.

The Trainer of each rank runs as if it were alone, without its code for several processes, and meshwise handles batches,
backwards, evaluations and files. The Trainer and its Accelerator get subclasses defined in this package:

    batches     `per_device_train_batch_size` counts the samples of all devices together; each rank reads its rows of
                every batch, in the order that the Trainer has on one device
    ahead       Trainer reads all batches of a step before the first forward, to count `num_items_in_batch`. These
                batches are previewed, then given to the loop one by one, so that each is computed with its own slice
    loss        a sum divided by `num_items_in_batch` of all ranks; otherwise a mean over samples, or over the items
                of a cross entropy
    evaluation  the loss covers the whole batch, and the rows of all ranks come in the order of the data
    files       rank 0 writes whole tensors, even if a plan divides them; any number of devices can resume from them

Based on the source of transformers 5.23 and accelerate 1.15. Neither is imported before a Trainer exists. Tested in
tests/training/script/test_trainer.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshwise.integrations.private_parts import be_alone
from meshwise.integrations.trainer_loader import Window, skip_batches
from meshwise.integrations.trainer_ranks import (
    ITEMS,
    DistributedAccelerator,
    Ranks,
    first_loss,
    loss_of,
    weight_of,
)
from meshwise.spec.errors import UsageError
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine
from meshwise.training.recovery.collect import collected
from meshwise.training.script.reductions import joined
from meshwise.training.script.trainers import REFUSED, SAVED, Add, Integration, Share, in_front
from meshwise.training.tracking import tracking
from meshwise.transfer import collectives
from meshwise.workers.join import rank_context, rejoin

TRAINER = "transformers.trainer"
UNLIKE = ("_runtime", "_per_second", "_time", "total_flos", "num_input_tokens_seen")
"""Endings of names of logged values that may differ between ranks: times, and counts with padding."""
SWEEP = {"what": "hyperparameter_search", "instead": "write a loop over the trials, with a new Trainer for each"}


def own_names(model: Any) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which the model saves its weights under the names of its own parameters."""
    save = getattr(model, "save_pretrained", None)
    if save is None or "save_original_format" not in inspect.signature(save).parameters:
        return contextlib.nullcontext()
    return mock.patch.object(model, "save_pretrained", functools.partial(save, save_original_format=False))


class DistributedTrainer:
    """Overrides methods of transformers' Trainer."""

    meshwise: Ranks

    def train(self: Any, *args: Any, **options: Any) -> Any:
        module = import_module(TRAINER)
        skips = functools.partial(skip_batches, module.skip_first_batches)
        engine, saves = self.meshwise.engine, self.args.save_strategy != "no"
        engine.gate.saves |= saves  # whether a stopped run saves its state
        with mock.patch.object(module, "skip_first_batches", skips):
            try:
                return super().train(*args, **options)  # type: ignore[misc]
            except (KeyboardInterrupt, SystemExit):
                if engine.stopped and saves:  # all ranks have stopped before the same batch, so they save together
                    self._save_checkpoint(self.model_wrapped, None)
                    folder = f"{self._get_output_dir(None)}/checkpoint-{self.state.global_step}"
                    engine.notify(SAVED.format(folder, "train(resume_from_checkpoint=True)"))
                raise

    def get_train_dataloader(self: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_eval_dataloader(*args, **options))  # type: ignore[misc]

    def get_test_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        return self.accelerator.prepare_data_loader(super().get_test_dataloader(*args, **options))  # type: ignore[misc]

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        ahead = epoch_iterator.look(num_batches)
        batches, parts = [batch for batch, _ in ahead], [part for _, part in ahead]
        return Window(epoch_iterator, len(ahead)), self._get_num_items_in_batch(batches, device, parts)

    def _get_num_items_in_batch(self: Any, batches: Any, device: Any, parts: Sequence[BatchSlice] = ()) -> Any:
        """Return the number of items in the batches of all ranks, without items of padding samples. Collective."""
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
            return first_loss(ranks, compute, items, args, options)
        with torch.enable_grad() if ranks.kind == ITEMS else contextlib.nullcontext():
            result = compute(*args, **options)
        if ranks.kind == ITEMS:
            ranks.weight = weight_of(ranks, loss_of(result))
        return result

    def training_step(self: Any, *args: Any, **options: Any) -> Any:
        own = super().training_step(*args, **options)  # type: ignore[misc]
        whole = self.meshwise.loss
        return own if whole is None else whole.to(own)

    def evaluation_loop(self: Any, *args: Any, **options: Any) -> Any:
        """Run the evaluation, and make Seq2SeqTrainer gather only the rows of real samples, as Trainer does."""
        by_object = self.args.eval_use_gather_object
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=by_object)
        return super().evaluation_loop(*args, **options)  # type: ignore[misc]

    def prediction_step(self: Any, *args: Any, **options: Any) -> Any:
        ranks = self.meshwise
        ranks.computed = False
        loss, logits, labels = super().prediction_step(*args, **options)  # type: ignore[misc]
        if loss is None:
            return loss, logits, labels
        if not ranks.computed and not ranks.alone:  # Seq2SeqTrainer does not call compute_loss when it generates
            ranks.items, inputs = False, args[1] if len(args) > 1 else options["inputs"]
            ranks.weight = super()._get_num_items_in_batch([inputs], self.args.device)  # type: ignore[misc]
        return joined(ranks.engine, loss if ranks.alone else ranks.whole_loss(loss)), logits, labels

    def hyperparameter_search(self: Any, *args: Any, **options: Any) -> Any:
        if self.meshwise.alone:
            return super().hyperparameter_search(*args, **options)  # type: ignore[misc]
        raise UsageError(REFUSED.format(ranks=self.meshwise.engine.world.size, **SWEEP))

    # Files and logged values.

    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
        with own_names(self.model) if _internal_call else contextlib.nullcontext():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if _internal_call:  # wait for the checkpoint: other ranks check that it exists
            collectives.barrier(collectives.everyone())

    def _issue_warnings_after_load(self: Any, load_result: Any) -> None:
        super()._issue_warnings_after_load(load_result)  # type: ignore[misc]
        if (missing := load_result.missing_keys) and (others := load_result.unexpected_keys):
            raise UsageError(
                f"Trainer: this checkpoint, saved without mw.distribute, has a value {others[0]} but no {missing[0]}, "
                "so it cannot be resumed. Load it with from_pretrained, and train without resuming."
            )

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


MASKS = " The data collator masks at random: its masks depend on the number of devices, in evaluation too."
SFT = "SFTTrainer"  # class of TRL 1.16 whose logged values are already sums over all ranks
WHOLE = (
    "Trainer: per_device_train_batch_size={0.per_device_train_batch_size} and "
    "per_device_eval_batch_size={0.per_device_eval_batch_size} are the batch sizes of all {1} devices together."
)


def _join() -> None:
    """Replace the process group that TrainingArguments has created with meshwise's own process group."""
    rank_context()
    rejoin()


def _models_of(trainer: Any) -> list[nn.Module]:
    """Return the Trainer's model in a list, which is empty if the Trainer makes its model later."""
    return [trainer.model] if trainer.model_init is None and isinstance(trainer.model, nn.Module) else []


def _distribute(trainer: Any, engine: Engine, add: Add, share: Share) -> Any:
    if isinstance(trainer, DistributedTrainer):
        return trainer
    world = rank_context().world
    masks = world.size > 1 and any(getattr(trainer.data_collator, name, False) for name in ("mlm", "plm_probability"))
    if world.size > 1:
        _refuse(trainer, world.size, masks and engine.draws is not None)
    ranks = Ranks(engine, trainer, add, share)
    if trainer.args.use_cpu:  # keep the device that the run has chosen, where the model already is
        vars(trainer.args)["_setup_devices"] = torch.device(world.device)
    trainer.args.distributed_state = be_alone(world, trainer.create_accelerator_and_postprocess)
    in_front(DistributedAccelerator, trainer.accelerator, ranks)
    in_front(DistributedTrainer, trainer, ranks)
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        engine.add_optimizer(trainer.optimizer)
    if world.size > 1:
        engine.notify(WHOLE.format(trainer.args, world.size) + masks * MASKS)
    return trainer


def _refuse(trainer: Any, ranks: int, masks: bool) -> None:
    """Raise UsageError if the Trainer uses a feature with which several devices would not compute the same as one
    device."""
    args = trainer.args
    own = sorted({c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")} - {"_BaseTrainer", SFT})
    reads = not str(type(trainer).get_batch_samples.__module__).startswith("transformers.")
    found = {
        "deepspeed": (args.deepspeed, "remove it; a plan divides the model (meshwise plan, --plan)"),
        "fsdp": (args.fsdp, "remove it; a plan with shard divides the model (meshwise plan, --plan)"),
        "parallelism_config": (getattr(args, "parallelism_config", None), "remove it; use a plan (--plan)"),
        "a model that was divided where it was loaded": (
            getattr(trainer, "is_distributed_loading_by_transformers", False),
            "load the whole model, or load it under mw.deferred(); a plan divides it (--plan)",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a rank that runs out of memory would restart alone. Remove it; meshwise plan says what fits, and "
            "per_device_train_batch_size counts the samples of all devices",
        ),
        "torch_compile": (args.torch_compile, "remove it; use a plan with compile"),
        f"optim={getattr(args.optim, 'value', args.optim)}": (
            any(name in str(args.optim).lower() for name in ("layerwise", "lomo")),
            "it steps inside the backward, before gradients are averaged. Use an optimizer that steps later",
        ),
        f"TRL's {own and own[0]}": (
            own,
            "only its SFTTrainer was compared with one device. Write its loop with mw.distribute",
        ),
        "--exact-random with a collator that masks at random": (
            masks,
            "remove the option, or mask in the data set",
        ),
        "your own get_batch_samples": (reads, "remove this method"),
    }
    for name, (given, instead) in found.items():
        if given:
            raise UsageError(REFUSED.format(ranks=ranks, what=name, instead=instead))


INTEGRATION = Integration("trainer", _distribute, _models_of, _join)
