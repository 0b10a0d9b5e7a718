"""Note on a plan which random draws differ between ranks.

Each rank draws different numbers for them.

Tested in tests/parallel/test_draws_note.py.
"""

from __future__ import annotations

from torch import nn

from meshwise.spec.user_code import is_users

DROPOUT_NOTE = "dropout: each rank draws its own masks, keyed by (seed, step, rank)."
DRAWS_NOTE = "random numbers in a forward: each rank draws its own, keyed by (seed, step, rank)."
OF_DRAWS = (DROPOUT_NOTE, DRAWS_NOTE)
"""Notes that are untrue if random draws are exact (`--exact-random`)."""
_DRAWING = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"}
_DRAWING |= {"normal", "normal_", "uniform_", "bernoulli_", "exponential_", "rsample", "gumbel_softmax"}


def notes_of_draws(model: nn.Module) -> list[str]:
    """Return the notes of `OF_DRAWS` that apply to a model."""
    modules, notes = list(model.modules()), list[str]()
    if any("Dropout" in type(module).__name__ and getattr(module, "p", 1.0) != 0 for module in modules):
        notes.append(DROPOUT_NOTE)
    if any(map(_draws, {type(module) for module in modules})):
        notes.append(DRAWS_NOTE)
    return notes


def _draws(kind: type[nn.Module]) -> bool:
    """Return whether a user's class has methods, other than initialisation, that call a random function by name."""
    codes = [code for each in vars(kind).values() if (code := getattr(each, "__code__", None)) is not None]
    late = [code for code in codes if not code.co_name.lstrip("_").startswith(("init", "reset"))]
    return any(is_users(code.co_filename) and not _DRAWING.isdisjoint(code.co_names) for code in late)
