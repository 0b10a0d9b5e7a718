"""Reach accelerate's private state: processes, seeded sampler, loop ends.

None of the three has a public interface.

Read in accelerate 1.15. Nothing of it is imported before a Trainer is there. Tested in tests/script/test_trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

from torch.utils.data import BatchSampler, DataLoader

from meshwise.spec.world import VARIABLES, World


def be_alone(world: World, make: Callable[[], object]) -> Any:
    """Call `make`, which creates an Accelerator, in such a way that accelerate sees a run of one process.

    Return accelerate's `PartialState`, which all Accelerators of this process share. Its rank and local rank are this
    process's real ones, so that only rank 0 writes files and logs."""
    states = import_module("accelerate.state")
    alone = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with mock.patch.dict(os.environ, alone | {"ACCELERATE_TORCH_DEVICE": world.device}, clear=True):
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
        told = states.PartialState(cpu=world.device == "cpu")
        told.process_index, told.local_process_index = world.rank, world.local_rank
        make()
    return told


def seed_order(loader: DataLoader[Any], seed: int | None) -> None:
    """Replace the random sampler of `loader` by accelerate's SeedableRandomSampler. The order of the samples in an
    epoch is then determined by `seed` and the epoch's number, as with accelerate on one device."""
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


def loop_begins(state: Any, loader: Any) -> None:
    """Tell accelerate that a loop over this loader begins, so that accelerate can tell when the loader is exhausted."""
    state._add_dataloader(loader)


def loop_ends(state: Any, loader: Any) -> None:
    """Tell accelerate that the loop over this loader has ended."""
    state._remove_dataloader(loader)
