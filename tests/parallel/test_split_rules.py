"""Split tensors: an operator gives of parts what it gives of the whole, and so does its gradient, on 2 and 3 ranks.

Ranks are threads, so that no process starts. What has no rule is gathered, and right as well.

Tests parallel/split/axis.py, parallel/split/crossing.py, parallel/split/elementwise.py, parallel/split/layout.py,
parallel/split/losses.py, parallel/split/products.py, parallel/split/rule.py, parallel/split/rules.py,
parallel/split/shapes.py, parallel/split/tensor.py, compat/torch_function.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.parallel.split.layout import split_dims
from tests.parallel.test_split_context import hold

Case = tuple[Callable[..., Any], list[Tensor], list[int | None]]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


X, W, B = draw(2, 4, 6), draw(8, 6), draw(8)
Q, K1 = draw(2, 4, 5, 3), draw(2, 2, 5, 3)
WORDS = torch.tensor([0, 5, 3, 3, 1, 2, 4, 5])


def heads(x: Tensor) -> Tensor:
    h = x.view(2, 4, 2, 3).transpose(1, 2)
    return ((h @ h.transpose(-1, -2)).softmax(-1) @ h).transpose(1, 2).reshape(2, 4, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] != q.shape[1])


RULES: dict[str, Case] = {
    "add": (torch.add, [X, X], [2, 2]),
    "add whole": (torch.add, [X, X], [2, None]),
    "mul by a row": (torch.mul, [X, draw(6)], [2, None]),
    "mul by a column": (torch.mul, [X, draw(4, 1)], [2, None]),
    "mul, split elsewhere": (torch.mul, [X, X], [2, 1]),
    "add in place": (lambda x, y: (x * 1).add_(y), [X, X], [2, None]),
    "add a part in place to a whole": (lambda x, y: (x * 1).add_(y), [X, X], [None, 2]),
    "gelu": (F.gelu, [X], [1]),
    "where": (lambda x: torch.where(x > 0, x, 0.0), [X], [2]),
    "masked fill": (lambda x: x.masked_fill(x > 0, -1.0), [X], [2]),
    "casts": (lambda x: x.clone().to(torch.float64).type_as(x), [X], [1]),
    "column": (F.linear, [X, W, B], [None, 0, 0]),
    "column, whole bias": (F.linear, [X, W, B], [None, 0, None]),
    "row": (F.linear, [X, W, B], [2, 1, None]),
    "row of a whole input": (F.linear, [X, W, B], [None, 1, None]),
    "linear of other rows": (F.linear, [X, W, B], [1, None, None]),
    "column of split rows": (F.linear, [X, W, B], [1, 0, 0]),
    "addmm column": (torch.addmm, [B, X.reshape(8, 6), W.t().contiguous()], [None, None, 1]),
    "addmm row": (torch.addmm, [B, X.reshape(8, 6), W.t().contiguous()], [None, 1, 0]),
    "matmul of batches": (torch.matmul, [draw(2, 4, 3, 5), draw(2, 1, 5, 3)], [1, None]),
    "matmul over the split dim": (torch.matmul, [draw(2, 4, 3, 6), draw(6, 3)], [3, None]),
    "einsum": (lambda a, b: torch.einsum("bhij,bhjk->bhik", a, b), [draw(2, 4, 3, 6), draw(2, 4, 6, 3)], [1, None]),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [draw(2, 6, 5, 5), draw(6, 6, 3, 3), draw(6)],
        [None, 0, 0],
    ),
    "convolution row": (lambda x, w: F.conv2d(x, w, padding=1), [draw(2, 6, 5, 5), draw(6, 6, 3, 3)], [1, 1]),
    "embedding": (F.embedding, [WORDS, W], [None, 0]),
    "embedding with padding": (lambda i, w: F.embedding(i, w, padding_idx=5), [WORDS, W], [None, 0]),
    "embedding by width": (F.embedding, [WORDS, W], [None, 1]),
    "heads": (heads, [X], [2]),
    "attention": (attend, [Q, Q, Q], [1, 1, 1]),
    "attention with a mask": (attend, [Q, Q, Q, draw(2, 1, 5, 5)], [1, 1, 1, None]),
    "attention of whole keys": (attend, [Q, Q, Q], [1, None, None]),
    "grouped heads": (attend, [Q, K1, K1], [1, 1, None]),
    "fewer groups than ranks": (attend, [Q, draw(2, 1, 5, 3), draw(2, 1, 5, 3)], [1, None, None]),
    "view that fits": (lambda x: x.view(2, 4, 2, 3), [X], [2]),
    "view that does not": (lambda x: x.view(2, 4, 3, 2), [X], [2]),
    "merge": (lambda x: x.reshape(2, 24), [X], [1]),
    "repeat heads": (lambda x: x[:, :, None].expand(2, 4, 3, 6).reshape(2, 12, 6), [X], [1]),
    "sum": (torch.sum, [X], [1]),
    "sum over the split dim": (lambda x: x.sum(-1), [X], [2]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [X], [2]),
    "largest": (lambda x: x.max(1).values, [X], [2]),
    "largest over the split dim": (lambda x: x.max(2).values, [X], [2]),
    "deviation": (lambda x: x.std(1, True), [X], [2]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [X, draw(6), draw(6)], [1, None, None]),
    "layer norm over the split dim": (
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        [X, draw(6), draw(6)],
        [2, None, None],
    ),
    "softmax": (lambda x: F.softmax(x, -1), [X], [2]),
    "log softmax": (lambda x: F.log_softmax(x, -1), [X], [2]),
    "cross entropy": (
        lambda x, y: F.cross_entropy(x.view(-1, 6), y % 6, label_smoothing=0.1, ignore_index=3),
        [X, WORDS],
        [2, None],
    ),
    "cat": (lambda x, y: torch.cat([x, y], 1), [X, X], [2, None]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [X, X], [2, 2]),
    "chunk": (lambda x: x.chunk(2, 1), [X], [2]),
    "chunk of the split dim": (lambda x: x.chunk(3, 2), [X], [2]),
    "index": (lambda x: x[0, ..., None], [X], [2]),
    "index by a mask": (lambda x: x[x > 0], [X], [2]),
    "rotate": (lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1), [X], [1]),
    "no rule: cumsum over the split dim": (lambda x: x.cumsum(1), [X], [1]),
    "no rule: norm": (lambda x: x.norm(dim=-1), [X], [1]),
    "no rule: batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [X], [1]),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_gives_what_the_operator_gives(name: str, size: int) -> None:
    function, inputs, dims = RULES[name]
    hold(function, inputs, dims, size)


def test_a_pair_of_column_and_row_adds_up_once() -> None:
    """Megatron-LM's count: one all-reduce in the forward."""

    def mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, first)), second)

    _, sent = hold(mlp, [X, draw(8, 6), draw(6, 8)], [None, 0, 1])
    assert sent[0] == {"all-reduce": X.numel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "o")})
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


def test_the_last_layer_of_a_group_is_split_by_its_inputs() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 50))
    dims, names = split_dims(model, 2), {id(p): name for name, p in model.named_parameters()}
    rows = {names[key] for key, dim in dims.items() if dim == 1}
    assert rows == {f"1.{n}.{layer}.weight" for n in (0, 1) for layer in ("attention.o", "down")}
    split = sum(p.numel() for p in model.parameters() if id(p) in dims)
    assert split > 0.95 * sum(p.numel() for p in model.parameters())


def test_what_is_too_short_for_the_ranks_stays_whole() -> None:
    assert split_dims(nn.Linear(3, 5), 2) == {}
