"""Compare hashes of replicas every N steps and before a save.

Replicas must be bitwise equal.

A bit flipped by a device or its memory hardly changes the loss, and spreads to all replicas with the next gradients.
The check compares parameters, and the optimizer's state if each replica holds all of it. A hash is torch's XOR of all
elements (`torch.hash_tensor`), which changes with any single flipped bit. It reads 2.3 GB/s on one core of a Xeon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from meshwise.spec.errors import ReplicaError
from meshwise.spec.plan import Plan
from meshwise.spec.words import ranks_text, some
from meshwise.torch_compat.sharding import hashes_of, local_of
from meshwise.training.recovery.state import RunState
from meshwise.transfer import collectives

CHECK_EVERY = 500


class ReplicaCheck:
    """Compares the replicas of a run's model and optimizer state, which must be bitwise equal."""

    def __init__(self, plan: Plan) -> None:
        self.every: float = CHECK_EVERY if plan.data > 1 else math.inf
        """The number of steps between two comparisons. Without replicas, it is infinite."""
        self._apart = plan.devices // plan.data  # ranks per replica, consecutive because `data` is the outermost axis
        self._state_too = not plan.state_divided
        self._compared = -1

    def compare(self, state: RunState) -> None:
        """Check that all replicas of the current state are equal."""
        if self.every == math.inf or self._compared == state.step:
            return
        self._compared = state.step
        ranks: list[dict[str, int]] = collectives.gather_from_all(dict(self._hashes(state)))
        groups = [range(first, len(ranks), self._apart) for first in range(self._apart)]
        differ = [
            (name, group[place])
            for group in groups
            for name in ranks[group[0]]
            for place in minority([ranks[rank].get(name) for rank in group])
        ]
        if differ:
            wrong, what = sorted({rank for _, rank in differ}), some(sorted({name for name, _ in differ}))
            raise ReplicaError(
                f"step {state.step}: replicas differ in {what}, on {ranks_text(wrong)}: a bit was flipped there, or a "
                "device is faulty.",
                ranks=wrong,
            )

    def _hashes(self, state: RunState) -> Iterator[tuple[str, int]]:
        named: dict[str, Tensor] = {f"parameter {name}": p for name, p in state.model.named_parameters()}
        if self._state_too:
            names = {id(p): name for name, p in state.model.named_parameters()}
            named |= {
                f"{key} of {names.get(id(p), 'a parameter')}": value
                for p, entry in state.optimizer.state.items()
                for key, value in entry.items()
                if isinstance(value, Tensor)
            }
        some_bits = {name: tensor for name, tensor in named.items() if local_of(tensor).numel()}
        return zip(some_bits, hashes_of(some_bits.values()), strict=True)


def minority(values: Sequence[object]) -> list[int]:
    """Return the indices of the values that differ from the majority's value; all if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    most = count > len(values) / 2
    return [place for place, each in enumerate(values) if not most or each != value]
