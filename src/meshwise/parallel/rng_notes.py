"""Add notes on which random draws differ between ranks.

The notes name the draws for which each rank uses different numbers.
"""

from __future__ import annotations

from torch import nn

from meshwise.spec.user_code import is_users

DROPOUT_NOTE = "dropout: each rank draws its own masks, keyed by (seed, step, rank)."
DRAWS_NOTE = "random numbers in a forward: each rank draws its own, keyed by (seed, step, rank)."
OF_DRAWS = (DROPOUT_NOTE, DRAWS_NOTE)
"""Notes that do not apply under `--exact-random`, where random draws equal those of one device."""
_DRAWING = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"}
_DRAWING |= {"normal", "normal_", "uniform_", "bernoulli_", "exponential_", "rsample", "gumbel_softmax"}


def notes_of_draws(model: nn.Module) -> list[str]:
    """Return notes for the user if the forward of `model` draws random numbers, e.g. by dropout."""
    modules, notes = list(model.modules()), list[str]()
    if any("Dropout" in type(module).__name__ and getattr(module, "p", 1.0) != 0 for module in modules):
        notes.append(DROPOUT_NOTE)
    if any(map(_draws, {type(module) for module in modules})):
        notes.append(DRAWS_NOTE)
    return notes


def _draws(kind: type[nn.Module]) -> bool:
    """Return whether a class of the user's code has methods that call a random function by name."""
    codes = [code for each in vars(kind).values() if (code := getattr(each, "__code__", None)) is not None]
    late = [code for code in codes if not code.co_name.lstrip("_").startswith(("init", "reset"))]
    return any(is_users(code.co_filename) and not _DRAWING.isdisjoint(code.co_names) for code in late)
