"""Run transformers' Trainer on all devices.

Write `trainer = mw.distribute(trainer)`, then `trainer.train()`.

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

from typing import Any

import torch
from torch import nn

from meshwise.compat.trainers import be_alone
from meshwise.engine.engine import Engine
from meshwise.script.in_front import REFUSED, in_front
from meshwise.script.trainer_accelerator import AcceleratorOnRanks
from meshwise.script.trainer_front import OnRanks
from meshwise.script.trainer_loss import Ranks
from meshwise.script.trainers import Add, Integration, Share
from meshwise.spec.errors import UsageError
from meshwise.workers.join import rank_context, rejoin

MASKS = " The data collator masks at random: its masks depend on the number of devices, in evaluation too."
SFT = "SFTTrainer"  # of TRL 1.16: what it logs are sums over all ranks
WHOLE = (
    "Trainer: per_device_train_batch_size={0.per_device_train_batch_size} and "
    "per_device_eval_batch_size={0.per_device_eval_batch_size} are the batch sizes of all {1} devices together."
)


def _join() -> None:
    """Replace the process group that TrainingArguments has created by a process group of meshwise. The group of
    TrainingArguments may lack a backend for CPU tensors."""
    rank_context()
    rejoin()


def _models_of(trainer: Any) -> list[nn.Module]:
    """Return a list with the Trainer's model, so that the plan can be applied to it now. Return an empty list if the
    Trainer makes its model later, by `model_init`."""
    return [trainer.model] if trainer.model_init is None and isinstance(trainer.model, nn.Module) else []


def _distribute(trainer: Any, engine: Engine, add: Add, share: Share) -> Any:
    if isinstance(trainer, OnRanks):
        return trainer
    world = rank_context().world
    masks = world.size > 1 and any(getattr(trainer.data_collator, name, False) for name in ("mlm", "plm_probability"))
    if world.size > 1:
        _refuse(trainer, world.size, masks and engine.draws is not None)
    ranks = Ranks(engine, trainer, add, share)
    if trainer.args.use_cpu:  # the run says where, and the model is there
        vars(trainer.args)["_setup_devices"] = torch.device(world.device)
    trainer.args.distributed_state = be_alone(world, trainer.create_accelerator_and_postprocess)
    in_front(AcceleratorOnRanks, trainer.accelerator, ranks)
    in_front(OnRanks, trainer, ranks)
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        engine.add_optimizer(trainer.optimizer)
    if world.size > 1:
        engine.notify(WHOLE.format(trainer.args, world.size) + masks * MASKS)
    return trainer


def _refuse(trainer: Any, ranks: int, masks: bool) -> None:
    """Raise UsageError if the Trainer uses a feature with which several devices would not compute the same as one
    device.

    masks: whether the data collator masks tokens at random although the user has requested `--exact-random`."""
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
        "--exact-random with a collator that masks at random": (masks, "remove the option, or mask in the data set"),
        "your own get_batch_samples": (reads, "remove this method"),
    }
    for name, (given, instead) in found.items():
        if given:
            raise UsageError(REFUSED.format(ranks=ranks, what=name, instead=instead))


INTEGRATION = Integration("trainer", _distribute, _models_of, _join)
