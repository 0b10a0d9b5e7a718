"""Save and restore the state of a user's loop: `mw.checkpoint`.

The state is saved while the loop runs, and restored when the loop starts.

A step is over when the loop asks for the next batch after a call of `optimizer.step`. Then the state is saved, with the
position in the loader's epoch, the random generators and the number of steps. After an epoch's last
step, the save waits for the next epoch: a validation or a scheduler in between belongs to the epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import is_initialized

from meshwise.records.checkpoints import Checkpoint
from meshwise.spec.errors import CheckpointError, LossError, SaveError, UsageError
from meshwise.spec.saves import Saves, read_saves
from meshwise.spec.words import ranks_text
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.training.process.session import default_engine, tell
from meshwise.training.recovery.clock import SaveClock
from meshwise.training.recovery.finite_state import not_finite_here, not_finite_in, not_finite_names
from meshwise.training.recovery.loading import has_checkpoint, load
from meshwise.training.recovery.saving import BACKGROUND, Saver
from meshwise.training.script import saved_loop
from meshwise.training.script.distributed_loader import DistributedLoader
from meshwise.training.script.saved_loop import Loaders, LoopParts, Things
from meshwise.training.script.state_folder import HeldFolder, hold, home_of
from meshwise.training.slips.in_a_run import says_unread
from meshwise.workers.environment import SAVES
from meshwise.workers.join import rank_context
from meshwise.workers.verb_log import log_verb

OPENED = "{folder}: the loop ended before its accumulated batches made a step. The saved state lacks their gradients."


def checkpoint(
    folder: str | Path,
    *,
    model: Things,
    optimizer: Things = None,
    scheduler: Things = None,
    loader: Loaders = None,
    extra: Any = None,
    every: int | str | None = None,
    keep: int | None = None,
) -> LoopState:
    """Restore the state saved in `folder`, if there is one, and from now on save the state there at the ends of steps.

        saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=loader)
        for epoch in range(saved.epoch, 10):
            for x, y in loader: ...

    Call it after `mw.distribute`, on every rank. A resumed loop continues in the middle of its epoch, under any plan
    and number of devices. Its results are the same as if the run had never stopped. They are bitwise the same on one or
    two devices, and on more devices if the loop resumes between two epochs.

    A loop without a loader of `mw.distribute` must call `saved.step_done()` after each step. After a resume, such a
    loop draws other dropout masks than a run that never stopped.

    model, optimizer, scheduler: one object, or a list or dict of objects.
    loader: the loader of the training loop, as `mw.distribute` returned it. If a step reads several loaders, such as
        `zip(loader, other)`, give a list of all of them, with the loader of the training loop first.
    extra: other values of the loop: a dict of plain values, tensors and objects (such as a GradScaler) with a
        state_dict, or one such object. A restored state updates the dict in place, so read its entries in the loop
        (`state["best"]`).
    every: how often to save: a number of steps, or a time such as "10min". The default is after each epoch of the
        loader, and in the background about every minute. `meshwise run --save-every` overrides this argument. A run
        that is asked to stop saves its state, too.
    keep: how many saved states to keep, by default 2. `meshwise run --keep` overrides this argument.

    Raises CheckpointError if the state was saved for another model, or if no saved state is complete. Raises UsageError
    if another program saves in `folder`."""
    log_verb("mw.checkpoint")
    engine = default_engine()
    asked = json.loads(os.environ.get(SAVES, "{}"))
    saves = read_saves(asked.get("every") or every, asked.get("keep") or keep)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = LoopState(saved_loop.parts_of(engine, things, loader, extra), home_of(Path(folder)), saves)
    if engine.watcher is None and not rehearsing():
        state.begin()
    return state


class LoopState:
    """The object that `mw.checkpoint` returns. It says at which epoch and step the loop resumes.

    restored: whether a saved state was found and restored."""

    def __init__(self, parts: LoopParts, folder: Path, saves: Saves) -> None:
        self.restored, self._epoch, self._step, self._read = False, 0, 0, False
        self._parts, self._engine, self._folder = parts, parts.engine, folder
        self._loader = parts.loaders[0] if parts.loaders else None
        self._saves, self._clock = saves, SaveClock(saves)
        self._saver: Saver | None = None
        self._looked_at = self._refused = False
        self._clean: bool | None = None  # whether a step has just ended; None before the first batch
        self._last = self._counted = 0  # the newest saved step, and how many steps of the program `_step` counts
        self._due = self._between = False  # whether a save is due, and whether the program is between two epochs
        self._held: HeldFolder | None = None
        self._never_finite: frozenset[str] = frozenset()
        self._drawn: tuple[Any, ...] | None = None  # generator states at the end of the last step

    @property
    def epoch(self) -> int:
        """How many epochs of the loader were finished in the restored state. 0 if no state was restored."""
        self._read = True
        return self._epoch

    @property
    def step(self) -> int:
        """How many optimizer steps have been made so far, over all restarts."""
        self._read = True
        return self._step

    def begin(self) -> None:
        """Restore the saved state, if any, and begin to save the loop's state. Collective."""
        world = rank_context().world
        self._never_finite = not_finite_names(self._parts.things["model"])
        held = self._held = hold(self._folder)
        try:
            resumed = self._find(held)
        except BaseException:
            held.close()
            raise
        self._saver = Saver(self._folder, world, tell, saves=self._saves, resumed=resumed, number=held.number)
        self._clock = SaveClock(self._saves, self._saver, self._tree, "every= of mw.checkpoint")
        self._counted = self._engine.phases.done if self._loader is not None else self._engine.program.backwards
        self._engine.given.loop_states.append(self)
        if (channel := rank_context().channel) is not None:
            channel.send("restores", folder=str(self._folder.resolve()))

    def _find(self, held: HeldFolder) -> Checkpoint | None:
        """Restore the newest saved state, and return it. Return None if there is none."""
        if not has_checkpoint(self._folder):
            return None
        found = load(self._folder, rank_context().world, tell)
        held.tell_origin(found.saved, self._engine.notify)
        self._step = self._last = saved_loop.restore(self._parts, self._folder, found.tree)
        self.restored, self._epoch = True, 0 if self._loader is None else self._loader.place[0]
        self._engine.phases.steps = self._step
        if wrong := self._not_finite()[0]:
            raise CheckpointError(
                f"{found.saved.path}: {wrong} is not finite in this saved state. Remove this folder to continue from "
                "the state that was saved before it, or use another folder."
            )
        return found.saved

    def _not_finite(self) -> tuple[str, str]:
        things = self._parts.things
        return not_finite_in(things["model"], things["optimizer"], self._never_finite)

    def step_done(self) -> None:
        """Report that a step has ended. Call it after each step of a loop that has no loader of `mw.distribute`.

        If the state is due to be saved, the call saves it, which is collective. Raises UsageError if the loop has a
        loader."""
        if self._loader is not None:
            raise UsageError("saved.step_done() is only for loops without a loader. Remove the call from this loop.")
        self._look_at_program(None)
        self._step, self._clean, self._drawn = self._step + 1, True, saved_loop.random_of(self._engine)
        self._counted = self._engine.program.backwards
        if self._clock.is_due(self._step):
            self.save(background=self._saves.in_background)

    def save(self, *, background: bool = False) -> None:
        """Save the state now, between two steps. Collective. Raise LossError, and save nothing, if the state is not
        finite."""
        if self._saver is None:
            return
        self._due, began = False, time.monotonic()
        self._check(self._saver, *self._not_finite())
        epoch, index = (0, 0) if self._loader is None else self._loader.place
        facts = {"step": self._step, "epoch": epoch, "index": index, "plan": str(self._engine.plan)}
        if self._saver.save(self._tree, facts | {BACKGROUND: background}, began=began):
            self._last = self._step
            self._engine.notify(saved_loop.says_beside(self._parts))
            self._engine.events.send("state_saved", self._saver, facts)

    def _tree(self) -> dict[str, Any]:
        return saved_loop.tree_of(self._parts, self._step, self._drawn or saved_loop.random_of(self._engine))

    def _check(self, saver: Saver, what: str, ranks: str) -> None:
        """Raise LossError if `what` names a value that is not finite on these ranks."""
        if what:
            saver.settle()
            self._clean, self._refused = False, True  # a state that is not finite is never saved
            newest = saver.saved if saver.saved >= 0 else self._last if self.restored else None
            before = "No state was saved before."
            if newest is not None:
                before = f"The newest saved state is of step {newest}, in {self._folder}. The same command resumes it."
            raise LossError(
                f"step {self._step}: {what} is not finite on {ranks}, so the state is not saved. {before} Skip updates "
                "whose loss is not finite, or lower the learning rate."
            )

    # The engine calls the methods below.

    def keeps(self) -> list[Any]:
        """Return the program's objects that are saved."""
        extra, things = self._parts.extra, self._parts.things.values()
        given = [each for of_kind in things for each in of_kind.values()]
        return [*given, extra, *(extra.values() if isinstance(extra, dict) else ())]

    def step_ends(self, loader: DistributedLoader) -> None:
        """Save the state, if it is due, when the program asks `loader` for its next batch.

        After the last batch of an epoch, nothing is saved until `epoch_begins`."""
        if loader is not self._loader:
            # The program is no longer between two epochs if it trains on the batches of another loader.
            self._between = self._between and not self._engine.phases.trained
            return
        self._due |= self._count() and self._clock.is_due(self._step)
        if self._due and self._clean and not loader.at_end:
            self.save(background=self._saves.in_background)

    def epoch_ends(self, loader: DistributedLoader, *, early: bool) -> None:
        """Record that `loader` has no further batch in this epoch. early: whether the program has left the loop before
        its last batch."""
        if loader is not self._loader:
            return
        if early:  # `step_ends` was not called for the last batch
            by_steps = self._saves.steps is not None  # time is checked by a collective, but a rank may have failed
            self._due |= self._count() and by_steps and self._clock.is_due(self._step)
        self._between, self._due = True, self._due or self._saves.in_background

    def _count(self) -> bool:
        """Increase `_step` by the optimizer steps since the last call. Return whether there were any."""
        phases = self._engine.phases
        ended = phases.done > self._counted
        self._step, self._counted = self._step + phases.done - self._counted, phases.done
        self._clean = ended or (self._clean and not phases.half)
        return ended

    def epoch_begins(self, loader: DistributedLoader) -> None:
        """Save the state, if it is due, when a loop over `loader` begins.

        A state saved here includes what the program did after the last epoch, so a resumed loop begins with the next
        epoch."""
        self._look_at_program(loader)
        if loader is self._loader and self._between:
            self._between = False
            self._count()  # also counts the steps that trained on batches of other loaders
            if self._due and self._clean:
                self.save()

    def _look_at_program(self, loader: DistributedLoader | None) -> None:
        """Warn of mistakes in the call of `mw.checkpoint`."""
        if self._looked_at or loader is not self._loader or self._saver is None:
            return
        self._looked_at, engine = True, self._engine
        kept = [each for state in engine.given.loop_states for each in state.keeps()]
        engine.notify(saved_loop.forgotten(engine, [*kept, *engine.given.earlier]))
        if self.restored and not self._read:
            engine.notify(says_unread(self._epoch, self._parts.extra))

    def finishes_epoch(self) -> bool:
        """Return whether a run that was asked to stop should go on until its next epoch begins or the program ends.

        This is the case between two epochs, and while another loop, such as a validation, runs inside the training
        loop. A state that is saved there would not record how much of the validation is done, or whether a scheduler
        has stepped."""
        finishes = self._between or (self._loader is not None and self._loader.in_batch)
        if finishes and (channel := rank_context().channel) is not None:
            channel.send("finishes_epoch")
        return finishes

    def stops(self) -> None:
        """Save the state if possible, as the run must stop. All ranks stop before the same batch."""
        if self._saver is None:
            return
        self._saver.settle()
        loader, engine = self._loader, self._engine
        # The current batch may have been read ahead, and not trained on yet.
        ahead = loader is not None and loader.place[1] > 0 and loader.given_at == engine.phases.done
        if not self._clean or ahead or (loader is None and self._counted != engine.program.backwards):
            where = "between the batches of one step"
            if loader is None and self._clean is None and engine.phases.done:
                where = "before saved.step_done(), which a loop without a loader calls after each step"
            newest = f"the newest saved state is that of step {self._last}" if self._last else "no state is saved"
            self._engine.notify(f"stopped {where}: {newest}.")
        elif self._saver.saved != self._step:
            self.save()
            self._saver.settle()

    def close(self) -> None:
        """Wait until all states are written, as the program ends.

        Raise SaveError if the last state could not be written, and LossError if a model or optimizer is not finite."""
        if self._saver is None:
            return
        saver, things = self._saver, self._parts.things
        failed = sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        opened = self._engine.phases.half and not self._refused  # whether a backward has run that no step has followed
        if failed:  # close without a long wait
            saver.close()
        elif self._due and self._between and (self._clean or opened):
            self._engine.notify(OPENED.format(folder=self._folder) if opened else "")
            self._save_at_end()
        self._saver = None
        if not failed:
            saver.settle()
        if self._held is not None:
            self._held.close()
        if failed:
            return
        if not self._refused:
            what = not_finite_here(things["model"], things["optimizer"], self._never_finite)
            self._check(saver, what, ranks_text([rank_context().world.rank]))
        if saver.wrong:
            raise SaveError(f"the last state, of step {self._step}, could not be saved: {saver.wrong}.")

    def _save_at_end(self) -> None:
        if rank_context().world.size == 1 or is_initialized():
            assert self._loader is not None
            self._loader.leave_epoch()
            self.save()
        else:
            tell(
                f"the state after the last epoch, of step {self._step}, is not saved, because the program ended "
                "its process group before. Remove destroy_process_group(): meshwise ends the group."
            )
