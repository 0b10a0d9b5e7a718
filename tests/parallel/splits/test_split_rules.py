"""Split tensors: an operator gives of parts what it gives of the whole, and so does its gradient, on 2 and 3 ranks.

Ranks are threads, so that no process starts. What has no rule is gathered, and right as well.

Tests parallel/splits/along.py, parallel/splits/axis.py, parallel/splits/crossing.py, parallel/splits/elementwise.py,
parallel/layout.py, parallel/splits/losses.py, parallel/layout.py, parallel/splits/products.py,
parallel/splits/rule.py, parallel/splits/rules.py, parallel/splits/shapes.py, parallel/splits/tensor.py,
torch_compat/torch_function.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.parallel.layout import Cut, cuts_of
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import split
from meshwise.torch_compat.fake import FakeTensors
from tests.parallel.test_split_context import ThreadAxis, hold, on_ranks

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


def running(x: Tensor, w: Tensor, training: bool = True) -> tuple[Tensor, ...]:
    mean, var = draw(6) * 0 + 0.5, draw(6) * 0 + 2.0
    return F.batch_norm(x, mean, var, weight=w, training=training, momentum=0.3), mean, var


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
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), [X, draw(4)], [1, None]),
    "batch norm of split weights": (lambda x, w: running(x, w), [draw(4, 6, 5, 5), draw(6)], [1, 0]),
    "batch norm in evaluation": (lambda x, w: running(x, w, training=False), [draw(4, 6, 5), draw(6)], [1, None]),
    "no rule: batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [X], [2]),
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


def conv1d_attention(x: Tensor, w: Tensor, b: Tensor, out: Tensor, p: float = 0.0) -> Tensor:
    """As GPT-2 has it: its weights are transposed, and queries, keys and values packed."""
    made = torch.addmm(b, x.view(-1, 12), w).view(2, 5, 36)
    q, k, v = (each.view(2, 5, 6, 2).transpose(1, 2) for each in made.split(12, dim=2))
    attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
    return torch.addmm(OUT_BIAS, attended.transpose(1, 2).reshape(-1, 12), out).view(2, 5, 12)


def sliced_attention(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    made = F.linear(x, w)
    q, k, v = (made[..., n * 12 : (n + 1) * 12].view(2, 5, 6, 2).transpose(1, 2) for n in range(3))
    return F.linear((q @ k.transpose(-1, -2)).softmax(-1).matmul(v).transpose(1, 2).flatten(2), out)


def reshaped_attention(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    q, k, v = F.linear(x, w).reshape(2, 5, 3, 6, 2).permute(2, 0, 3, 1, 4).unbind(0)
    return F.linear(attend(q, k, v).transpose(1, 2).reshape(2, 5, 12), out)


def gated(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    up, gate = F.linear(x, w).chunk(2, dim=-1)
    return F.linear(up * F.silu(gate), out)


def multi_head(p: float = 0.0, same: bool = True, **options: Any) -> Callable[..., Any]:
    def attended(x: Tensor, w: Tensor, b: Tensor, out: Tensor) -> Any:
        y = x if same else x * 2
        made, weights = F.multi_head_attention_forward(
            x, y, y, 12, 6, w, b, None, None, False, p, out, OUT_BIAS, **options
        )
        return made if weights is None else (made, weights)

    return attended


SEQUENCE, PACKED_BIAS, OUT, OUT_BIAS = draw(2, 5, 12), draw(36), draw(12, 12), draw(12)
PADDING = torch.arange(5) > torch.tensor([[3], [4]])
HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1)
MULTI_HEAD = [SEQUENCE.transpose(0, 1), draw(36, 12), PACKED_BIAS, OUT], [None, (0, 3), (0, 3), 1]
PACKED: dict[str, Any] = {
    "split": (conv1d_attention, [SEQUENCE, draw(12, 36), PACKED_BIAS, OUT], [None, (1, 3), (0, 3), 0]),
    "slices": (sliced_attention, [SEQUENCE, draw(36, 12), OUT], [None, (0, 3), 1]),
    "reshape": (reshaped_attention, [SEQUENCE, draw(36, 12), OUT], [None, (0, 3), 1]),
    "chunk": (gated, [SEQUENCE, draw(24, 12), OUT], [None, (0, 2), 1]),
    "multi-head": (multi_head(need_weights=False), *MULTI_HEAD),
    "multi-head, masked": (multi_head(need_weights=False, attn_mask=HIDDEN, key_padding_mask=PADDING), *MULTI_HEAD),
    "multi-head of other keys": (multi_head(same=False, need_weights=False), *MULTI_HEAD),
    "multi-head with weights": (multi_head(attn_mask=HIDDEN), *MULTI_HEAD),
}
DROPPING: dict[str, Any] = {
    "attention": (functools.partial(conv1d_attention, p=0.3), *PACKED["split"][1:]),
    "multi-head": (multi_head(0.3, need_weights=False), *MULTI_HEAD),
    "multi-head with weights": (multi_head(0.3), *MULTI_HEAD),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PACKED)
def test_packed_projections_stay_split(name: str, size: int) -> None:
    function, inputs, dims = PACKED[name]
    _, sent = hold(function, inputs, dims, size)
    assert "all-gather" not in sent[0], sent[0]
    reduced = SEQUENCE.numel() + (2 * 5 * 5 if "weights" in name else 0)
    assert sent[0]["all-reduce"] == reduced


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DROPPING)
def test_attention_over_heads_drops_what_one_device_drops(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, dropout = threading.Lock(), F.dropout

    def seeded(*args: Any, **kwargs: Any) -> Tensor:  # threads share a generator
        with lock:
            torch.manual_seed(5)
            return dropout(*args, **kwargs)

    seeded.__name__ = "dropout"
    monkeypatch.setattr(F, "dropout", seeded)
    function, inputs, dims = DROPPING[name]
    torch.manual_seed(5)
    _, sent = hold(function, inputs, dims, size)
    assert "all-gather" not in sent[0], sent[0]


def between(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, after: Tensor, norm: Tensor) -> Tensor:
    """A pair of column and row beside the residual stream, a norm, and a column that follows."""
    x = x + F.linear(F.gelu(F.linear(x, up, bias)), down, after)
    return F.linear(F.layer_norm(x, (6,), norm), up).pow(2).mean(1)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_divided_along_positions(size: int) -> None:
    inputs = [X, draw(24, 6), draw(24), draw(6, 24), draw(6), draw(6)]
    dims = [None, 0, 0, 1, None, None]
    _, sent = hold(between, inputs, dims, size, sequence=True)
    rounded = -(-4 // size) * size  # positions, of equal number on the ranks
    assert sent[0] == {"reduce-scatter": X.numel() // 4 * rounded, "all-gather": X.numel() // 4 * rounded // size}
    _, sent = hold(
        lambda ids, table: F.embedding(ids, table) * 2, [WORDS.view(2, 4) % 6, W], [None, 0], size, sequence=True
    )
    assert set(sent[0]) == {"reduce-scatter"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "o")})
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


def test_the_last_layer_of_a_group_is_split_by_its_inputs() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 50))
    dims, names = cuts_of(model, 2), {id(p): name for name, p in model.named_parameters()}
    rows = {names[key] for key, cut in dims.items() if cut == Cut(1)}
    assert rows == {f"1.{n}.{layer}.weight" for n in (0, 1) for layer in ("attention.o", "down")}
    split = sum(p.numel() for p in model.parameters() if id(p) in dims)
    assert split > 0.95 * sum(p.numel() for p in model.parameters())


def test_what_is_too_short_for_the_ranks_stays_whole() -> None:
    assert cuts_of(nn.Linear(3, 5), 2) == {}


class Packed(nn.Module):
    """A layer of three sections, taken apart in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None, *rest: Any, scale: float = 1.0) -> Tensor:
        self.calls += 1
        made = self.qkv(x).contiguous()
        if self.way == "split":
            q, k, v = made.split(8, dim=2)
        elif self.way == "slices":
            q, k, v = made[..., :8], made[..., 8:16], made[..., 16:]
        elif self.way == "reshape":
            q, k, v = made.reshape(*x.shape[:2], 3, 4, 2).flatten(3).unbind(2)
        elif self.way == "heads":
            q, k, v = made.view(*x.shape[:2], 4, 3, 2).flatten(-2).view(*x.shape[:2], 12, 2).chunk(3, 2)
        else:
            q, k, v = made[..., :4], made[..., 4:8], made[..., 8:]
        return self.proj(q * k + v)


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize(("way", "sections"), [("split", 3), ("slices", 3), ("reshape", 3), ("heads", 1), ("odd", 1)])
def test_how_a_result_is_taken_apart_is_found_by_a_trial(
    way: str, sections: int, rehearsed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with FakeTensors(lambda f, args, kwargs, run: run(), stands_for_real=True) if rehearsed else nullcontext():
        model = nn.Sequential(*(Packed(way) for _ in range(2)))
        cuts = cuts_of(model, 2)
    assert capfd.readouterr().err == ""
    for block in model:
        assert isinstance(block, Packed)
        assert cuts[id(block.qkv.weight)] == cuts[id(block.qkv.bias)] == Cut(0, sections)
        assert cuts[id(block.proj.weight)] == Cut(1)
        assert block.calls == 0  # the trial is not the module's
    assert cuts_of(model, 2, packed=False)[id(model[0].qkv.weight)] == Cut(0)


def test_with_shard_sections_are_kept_together_along_a_dim_that_it_does_not_divide() -> None:
    from transformers import GPT2Config, GPT2Model

    for packed, bias in ((True, Cut(0, 3)), (False, Cut(0))):
        model = GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=4))
        layer = model.h[1].attn.c_attn
        cuts = cuts_of(model, 2, packed=packed)
        assert (cuts[id(layer.weight)], cuts[id(layer.bias)]) == (Cut(1, 3), bias)


def test_torch_s_attention_is_split_by_heads() -> None:
    layer = nn.MultiheadAttention(12, 6)
    cuts = cuts_of(layer, 2)
    assert cuts[id(layer.in_proj_weight)] == cuts[id(layer.in_proj_bias)] == Cut(0, 3)
    assert cuts[id(layer.out_proj.weight)] == Cut(1)
    assert id(layer.in_proj_weight) not in cuts_of(layer, 4)  # six heads


def test_what_the_blocks_add_to_is_gathered_once() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 2), nn.Sequential(Block(), Block()), nn.Linear(8, 8))
    cuts = cuts_of(model, 2)
    assert cuts[id(model[0].weight)] == Cut(0, gathered=True)
    assert not cuts[id(model[2].weight)].gathered


class Bert(nn.Module):
    """The layer that ends an attention stands in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"})
        self.attention = nn.ModuleDict({"self": inner, "output": nn.ModuleDict({"dense": nn.Linear(8, 8)})})
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


def test_a_row_may_stand_beside_the_module_of_its_columns() -> None:
    model = nn.Sequential(Bert(), Bert())
    cuts, names = cuts_of(model, 2), {id(p): name for name, p in model.named_parameters()}
    rows = {names[key] for key, cut in cuts.items() if cut == Cut(1)}
    assert rows == {f"{n}.{layer}.weight" for n in (0, 1) for layer in ("attention.output.dense", "down")}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_of_half_numbers_over_a_split_vocabulary_is_rounded_as_of_whole_ones(autocast: bool) -> None:
    logits, targets = draw(12, 16).bfloat16(), torch.arange(12) % 16

    def both(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [F.cross_entropy(x, targets), x.softmax(-1)]

    whole = both(logits)

    def work(axis: ThreadAxis) -> list[Tensor]:
        part = SplitPart(axis, 1, 16)
        return [gather(made) for made in both(split(part.slice_of(logits).clone(), part))]

    for found in on_ranks(2, work):
        for got, wanted in zip(found, whole, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.allclose(got.float(), wanted.float(), atol=1e-6, rtol=2 * torch.finfo(wanted.dtype).eps)
