"""With which weights gradients of ranks add up to one: of checker/rank_weights.py."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwise.checker.rank_weights import RankWeights, solve, weights_in
from meshwise.checker.sketches import pieces
from meshwise.checker.trace import StepTrace


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def steps(own: list[dict[str, Tensor]], one: list[float], plan: list[float]) -> RankWeights | None:
    """The weights that are found where both sides have added ranks' gradients up with these."""
    sides = [{n: sum(w * g[n] for w, g in zip(ws, own, strict=True)) for n in own[0]} for ws in (one, plan)]
    parts = {(rank, 0): {name: pieces(g) for name, g in named.items()} for rank, named in enumerate(own)}
    reference, actual = (StepTrace(gradients=side) for side in sides)  # type: ignore[arg-type]
    actual.own_gradients = parts
    return weights_in(reference, actual)


def test_the_weights_of_both_sides_are_those_that_they_have_added_up_with() -> None:
    own = [{"small": drawn(3), "large": drawn(70, 90)} for _ in range(4)]
    found = steps(own, [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0])
    assert found is not None and found.unique
    for solved, weights in ((found.one, [0.4, 0.3, 0.2, 0.1]), (found.plan, [0.5, 0.5, 0.0, 0.0])):
        torch.testing.assert_close(torch.tensor(solved), torch.tensor(weights), atol=1e-9, rtol=0)


def test_a_gradient_that_holds_anything_else_has_no_weights() -> None:
    own = torch.stack([drawn(50), drawn(50)], 1)
    assert solve(own, own @ torch.tensor([0.5, 0.5]).double() + 1e-5 * drawn(50)) is None
    assert solve(own[:2], drawn(2)) is None, "as many numbers as ranks: whatever is wanted has weights"


def test_of_ranks_that_have_the_same_only_the_sum_of_their_weights_is_known() -> None:
    same = {"w": drawn(20)}
    found = steps([same, same], [0.5, 0.5], [1.0, 1.0])
    assert found is not None and not found.unique and found.one is not None and found.plan is not None
    assert abs(sum(found.one) - 1) < 1e-12 and abs(sum(found.plan) - 2) < 1e-12


def test_parts_of_one_gradient_on_each_rank_weigh_one() -> None:
    whole, mask = drawn(8, 4), torch.arange(8)[:, None] < 4
    found = steps([{"w": whole * mask}, {"w": whole * ~mask}], [1.0, 1.0], [0.5, 0.5])
    assert found is not None and found.one is not None and found.plan is not None
    assert all(abs(v - 1) < 1e-12 for v in found.one) and all(abs(w - 0.5) < 1e-12 for w in found.plan)
