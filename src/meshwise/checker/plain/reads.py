"""Choose what one rank of a plain script reads, and record it.

A loop that trains makes a few steps, and then reads its last batches. A loop that does not train reads three batches
and its last one. The script ends before a third training pass over a loader. Tested in
tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.checker.plain.record import Follow, Pass
from meshwise.checker.short_loops import EVALUATED, LATER, ScriptEnds
from meshwise.spec.user_code import user_place
from meshwise.torch_compat import loaders, program_calls
from meshwise.torch_compat.loaders import is_read_singly
from meshwise.training.data.generators import GLOBAL
from meshwise.training.engine.seeds import seed_all
from meshwise.transfer.splitmix import mixed

ADDRESS = re.compile(r"0x[0-9a-f]+")
MOST_BATCHES = 2_000
"""The maximum number of batches to read from a sampler without a length, which may never end."""
PASSES = 2
WHOLE = 8
"""Evaluations of up to this many batches are read whole, because a script may treat the last batch differently."""


@dataclass
class _Loop:
    """A running loop over a loader."""

    iterator: Any  # kept alive, so that its id stays unique
    read: Pass
    batches: list[list[list[int]]]
    made_before: int
    at: int = 0


class Reads:
    """Decides which batches a run of the script reads, and records them."""

    def __init__(self, steps: int, seed: int, follow: Follow | None, passes: list[Pass]) -> None:
        self.rows: dict[int, list[int]] = {}
        """The number of samples of each rank in a batch, by the size of the batch."""
        self.now: Pass | None = None
        self.has_cut = False
        """Whether some loop may have got fewer batches than its loader has."""
        self.is_last = False
        """Whether the newest batch is the last one of its loop."""
        self.size = 0
        """The number of samples in the newest batch, 0 if unknown."""
        self.at: tuple[int, int, int] | None = None
        """The number of the newest batch's loader, of its pass, and of the batch."""
        self._steps, self._seed, self._follow, self._passes = steps, seed, follow, passes
        self._loaders: dict[int, tuple[Any, int]] = {}  # sampler id -> the sampler, and the number of its loader
        self._lengths: dict[int, int] = {}  # sampler id -> a rank's number of batches, if ranks' loops are replayed
        self._made_at: dict[int, str] = {}
        self._loops: dict[int, _Loop] = {}  # iterator id -> its loop
        self._made = self._batches_of_step = self._batches_since = 0
        self._drawn: Any = None
        self._sees_accelerate = False
        self._ends = [
            loaders.without_workers(self._loader_made),
            loaders.choose_indices(self._choose),
            loaders.read_samples(self._read),
            loaders.count_batches(lambda sampler: self._lengths.get(id(sampler))),
        ]
        self._see_accelerate()

    def close(self) -> None:
        """Remove all hooks, so that loaders choose their own batches again."""
        for end in reversed(self._ends):
            end()

    def backward(self) -> bool:
        """Record a backward pass. Return True if random numbers were drawn since the last batch was read."""
        if self.now is not None:
            self.now.trained = True
        return self._drawn is not None and self._drawn != _generators()

    def step_made(self) -> None:
        """Record that an optimizer has made its step."""
        self._made += 1
        self._batches_of_step, self._batches_since = self._batches_since, 0

    def _loader_made(self, loader: Any) -> None:
        if loader.batch_sampler is not None:
            self._made_at[id(loader.batch_sampler)] = user_place()

    def _choose(self, iterator: Any) -> Any:
        """Return the sample indices of the next batch. Raise StopIteration if the loop ends."""
        loop = self._loops.get(id(iterator)) or self._begin(iterator)
        now = self.now = loop.read
        if now.samples is None and self._enough(loop):
            now.over = True
            raise StopIteration
        chosen = self._next(loop) if self._follow is None and now.samples is not None else loop.at
        if now.samples is not None and chosen >= len(loop.batches):
            now.over, self.has_cut = True, self.has_cut or self._follow is not None
            raise StopIteration
        loop.at = chosen + 1
        self.is_last = loop.at == len(loop.batches)
        now.given.append(chosen)
        self._batches_since += 1
        self._see_accelerate()
        self.size, self.at = 0, (now.loader, now.number, chosen)
        if now.samples is None:
            return loaders.plain_indices(iterator)
        indices = [index for part in loop.batches[chosen] for index in part]
        self.size = len(indices)
        self.rows[len(indices)] = [len(part) for part in loop.batches[chosen]]
        self._drawn = _generators()
        return indices

    def _begin(self, iterator: Any) -> _Loop:
        sampler = loaders.sampler_of(iterator)
        if id(sampler) not in self._loaders:
            self._loaders[id(sampler)] = sampler, len(self._loaders)
        number = self._loaders[id(sampler)][1]
        earlier = [p for p in self._passes if p.loader == number]
        trained = sum(p.trained for p in earlier)
        if trained >= PASSES and self._follow is None:
            raise ScriptEnds
        found, batches, samples, content = loaders.data_of(iterator), list[list[int]](), None, ""
        endless = False
        if found is not None:
            data, picked = found
            drawn, endless = loaders.rest_of(iterator, MOST_BATCHES)
            batches = [[picked[index] for index in batch] for batch in drawn]
            samples, content = frozenset(picked), self._content(data, picked)
        order = [index for batch in batches for index in batch]
        inner = getattr(sampler, "batch_sampler", None)  # accelerate's batch sampler wraps the original one
        made = (self._made_at.get(id(each), "") for each in (inner, sampler))
        places = tuple(dict.fromkeys(place for place in (user_place(), *made) if place))
        now = Pass(number, len(earlier), places, samples, batches, order != sorted(order), content, endless=endless)
        unions: list[list[list[int]]] | None = [[batch] for batch in batches]
        if self._follow is not None:
            unions = self._follow.unions(now)
        self._lengths[id(sampler)] = now.counted
        if unions is None:
            raise ScriptEnds
        self._batches_since = 0
        self._passes.append(now)
        loop = self._loops[id(iterator)] = _Loop(iterator, now, unions, self._made)
        return loop

    def _enough(self, loop: _Loop) -> bool:
        """Return True if the loop has read enough batches, and should skip to its last ones."""
        made, now = self._made - loop.made_before, loop.read
        wanted = self._steps if now.number == 0 else min(self._steps, LATER)
        return made >= wanted - 1 if now.trained else len(now.given) >= EVALUATED and len(loop.batches) > WHOLE

    def _next(self, loop: _Loop) -> int:
        """Return the index of the next batch to read."""
        step = max(self._batches_of_step, 1) if loop.read.trained else 1
        skipped = (len(loop.batches) - step - loop.at) // step * step  # whole steps, so that an accumulation goes on
        chosen = loop.at + max(skipped, 0) if self._enough(loop) else loop.at
        self.has_cut |= chosen > loop.at
        return chosen

    def _see_accelerate(self) -> None:
        """Record calls of accelerate's `gather_for_metrics`, which removes repeated samples."""
        accelerate: Any = sys.modules.get("accelerate")
        if accelerate is None or self._sees_accelerate:
            return
        self._sees_accelerate = True

        def gathering(plain: Any) -> Any:
            @functools.wraps(plain)
            def gather(*arguments: Any, **named: Any) -> Any:
                if self.now is not None:
                    self.now.padded_away = True
                if self._follow is not None:  # accelerate would cut the last replayed batch to a wrong size
                    return arguments[1] if len(arguments) > 1 else named["input_data"]
                return plain(*arguments, **named)

            return gather

        self._ends.append(program_calls.put([accelerate.Accelerator], "gather_for_metrics", gathering))

    def _content(self, data: Any, picked: Sequence[int]) -> str:
        """Return the first sample of a data set as text, without memory addresses."""
        readable = bool(picked) and is_read_singly(data)
        return ADDRESS.sub("", repr(self._drawn_alike(data.__getitem__, 0, 0))) if readable else ""

    def _read(self, get: Callable[[int], Any], index: int) -> Any:
        """Seed the random generators, and read a sample of a data set."""
        assert self.now is not None
        return self._drawn_alike(get, int(index), self.now.loader, self.now.number)

    def _drawn_alike(self, get: Callable[[int], Any], index: int, *key: int) -> Any:
        states = [handle.state() for handle in GLOBAL]
        seed_all(mixed(self._seed, index, *key) % 2**31)
        try:
            return get(index)
        finally:
            for handle, state in zip(GLOBAL, states, strict=True):
                handle.set_state(state)


def _generators() -> list[Any]:
    return [handle.state() for handle in GLOBAL]
