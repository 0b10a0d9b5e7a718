"""Errors: the exit codes that scripts rely on, and the hint at what was meant."""

import pytest

from meshwise.spec import errors
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed, nearest


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("mnist-mpl", " Did you mean 'mnist-mlp'?"),
        ("mnist_cnn", " Did you mean 'mnist-cnn'?"),
        ("gtp", " Did you mean 'gpt'?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_the_nearest_known_word_is_offered_and_nothing_far_off(word: str, hint: str) -> None:
    assert nearest(word, iter(["gpt", "mnist-cnn", "mnist-mlp"])) == hint


@pytest.mark.parametrize("kind", [UsageError, errors.PlanError, errors.DataError, errors.CheckpointError])
def test_what_cannot_be_exits_with_2(kind: type[UsageError]) -> None:
    assert issubclass(kind, UsageError)
    assert kind("no").exit_code == 2


def test_what_went_wrong_on_the_way_exits_with_1() -> None:
    assert errors.LossError("nan").exit_code == 1
    assert errors.TransferError("changed").exit_code == 1
    failed = WorkerFailed("rank 1 failed", rank=1)
    assert (failed.exit_code, failed.rank, str(failed)) == (1, 1, "rank 1 failed")
    assert WorkerFailed("stopped", exit_code=130).exit_code == 130
    assert not isinstance(failed, UsageError) and isinstance(failed, MeshwiseError)


def test_the_tree_at_the_top_names_every_error() -> None:
    kinds = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert kinds and errors.__doc__ is not None
    assert [name for name in kinds if name[0] != "_" and name not in errors.__doc__] == []
