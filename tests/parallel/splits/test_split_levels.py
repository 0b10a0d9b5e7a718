"""Tensors that are split along two axes, one inside the other: operators and models give what one device computes.

Ranks are threads, so that no process starts.

Tests parallel/splits/tensor.py, parallel/splits/crossing.py, parallel/splits/attention.py, parallel/context.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.checker.upcast import upcast
from meshwise.parallel import context
from meshwise.parallel.layout import cuts_of
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather, gather_over
from meshwise.parallel.splits.tensor import parts_of, split
from meshwise.torch_compat.modules import parameters_in
from tests.parallel.test_split_context import Ranks, ThreadAxis, folded, heads, plain, same

Axes = tuple[ThreadAxis, ThreadAxis]
D = torch.float64


def on_grid(work: Callable[[Axes], Any], positions: int = 2, weights: int = 2, sequence: bool = False) -> list[Any]:
    """What `work` gives on each rank of context × tensor."""
    outer = [Ranks(positions) for _ in range(weights)]
    inner = [Ranks(weights) for _ in range(positions)]
    found = dict[tuple[int, int], Any]()

    def one(c: int, t: int) -> None:
        try:
            within = ThreadAxis(inner[c], t, name="tensor", sequence=sequence)
            found[c, t] = work((ThreadAxis(outer[t], c), within))
        except BaseException as error:
            found[c, t] = error
            for ranks in (*outer, *inner):
                ranks.barrier.abort()

    threads = [threading.Thread(target=one, args=(c, t)) for c in range(positions) for t in range(weights)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [e for e in found.values() if isinstance(e, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [found[key] for key in sorted(found)]


def cut(x: Tensor, dims: tuple[int | None, int | None], axes: Axes, part: Callable[..., SplitPart] = plain) -> Any:
    """This rank's part of `x`, a leaf, and the parts that it is."""
    outer = None if dims[0] is None else part(axes[0], dims[0], x.shape[dims[0]])
    x = x if outer is None else outer.slice_of(x)
    inner = None if dims[1] is None else SplitPart(axes[1], dims[1], x.shape[dims[1]])
    x = x if inner is None else inner.slice_of(x)
    return x.clone().requires_grad_(x.is_floating_point()), [p for p in (outer, inner) if p is not None]


X = torch.randn(2, 7, 6, dtype=D)
W, B = torch.randn(8, 6, dtype=D), torch.randn(8, dtype=D)
IDS = torch.randint(0, 8, (2, 7))
NO = (None, None)


def hooked(x: Tensor, w: Tensor) -> Tensor:
    made = F.linear(x, w)
    made.register_hook(lambda gradient: gradient * 2)
    made.register_hook(lambda gradient: gradient.sort(-1)[0].cumsum(1))
    return made * 1


C, T = (1, None), (None, 0)
Case = tuple[Callable[..., Any], Sequence[Tensor], Sequence[tuple[int | None, int | None]], list[Any]]
CASES: dict[str, Case] = {
    "column": (F.linear, [X, W, B], [C, T, T], [("context", 1), ("tensor", 2)]),
    "row": (F.linear, [X, W, B], [(1, 2), (None, 1), NO], [("context", 1)]),
    "column and row": (
        lambda x, w: F.linear(F.gelu(F.linear(x, w)), w.t()) + x,
        [X, W],
        [C, T],
        [("context", 1)],
    ),
    "one dim": (lambda x: x.view(-1, 6) * 2 + 1, [X], [(1, 1)], [("context", 0), ("tensor", 0)]),
    "embedding": (F.embedding, [IDS, W], [C, T], [("context", 1)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (6,), w), [X, B[:6]], [C, NO], [("context", 1)]),
    "vocabulary": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 8), y.view(-1), ignore_index=3),
        [X, W, IDS],
        [C, T, NO],
        [],
    ),
    "shifted": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, :-1].reshape(-1, 8), y[:, 1:].reshape(-1)),
        [X, W, IDS],
        [C, T, C],
        [],
    ),
    "a gather within": (lambda x, w: F.linear(x, w).sort(-1)[0], [X, W], [C, T], [("context", 1)]),
    "a gather around": (lambda x, w: F.linear(x, w).cumsum(1), [X, W], [C, T], [("tensor", 2)]),
    "written into": (lambda x: (x * 1).mul_(2).index_fill_(1, torch.tensor([1]), 0.0), [X], [(1, 2)], None),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [heads(4, 7), heads(2, 7), heads(2, 7)],
        [(2, 1)] * 3,
        [("context", 2), ("tensor", 1)],
    ),
    "attention of heads that do not divide": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [heads(3, 7), heads(1, 7), heads(1, 7)],
        [(2, 1)] * 3,
        [("context", 2)],
    ),
    "hooks": (hooked, [X, W], [C, T], [("context", 1), ("tensor", 2)]),
    "a mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m > 0),
        [heads(4, 7), torch.randn(2, 4, 7, 7, dtype=D)],
        [(2, 1), (2, 1)],
        [("context", 2), ("tensor", 1)],
    ),
    "a learned mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
        [heads(4, 7), torch.randn(4, 7, 7, dtype=D)],
        [(2, 1), NO],
        [("context", 2), ("tensor", 1)],
    ),
}


@pytest.mark.parametrize("part", [plain, folded])
@pytest.mark.parametrize("name", CASES)
def test_two_levels_give_what_the_whole_gives(name: str, part: Callable[..., SplitPart]) -> None:
    function, inputs, dims, kinds = CASES[name]

    def backward(out: Tensor) -> None:
        out.backward(torch.randn(out.shape, dtype=D, generator=torch.Generator().manual_seed(7)))

    whole = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = function(*(x * 1 if x.is_floating_point() else x for x in whole))
    backward(wanted)

    def work(axes: Axes) -> None:
        leaves, given = [], []
        for x, where in zip(inputs, dims, strict=True):
            leaf, parts = cut(x, where, axes, part)
            leaves.append((leaf, parts))
            twin = leaf * 1 if x.is_floating_point() else leaf.clone()
            for each in parts:
                twin = split(twin, each)
            given.append(twin)
        made = function(*given)
        assert made.shape == wanted.shape
        found = sorted((each.axis.name, each.dim) for each in parts_of(made))
        assert kinds is None or found == kinds
        full = gather(made)
        assert same(full, wanted)
        backward(full)
        for (leaf, parts), x in zip(leaves, whole, strict=True):
            if x.grad is not None:
                expected = x.grad
                for each in parts:
                    expected = each.slice_of(expected)
                assert same(leaf.grad, expected)

    on_grid(work)


def test_gathered_over_one_axis_a_tensor_stays_split_along_the_other() -> None:
    def work(axes: Axes) -> None:
        leaf, parts = cut(X, (1, 2), axes)
        made = gather_over("tensor", split(split(leaf * 1, parts[0]), parts[1]))
        assert parts_of(made) == (parts[0],) and made.shape == X.shape
        assert same(gather(made), X)

    on_grid(work)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, max_position_embeddings=16,
    )  # fmt: skip
    return BertForMaskedLM(config)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_a_model_whose_weights_and_positions_are_split(make: Callable[[], nn.Module], sequence: bool) -> None:
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([8]), 0)

    def built() -> nn.Module:
        torch.manual_seed(0)
        return make().double().train()

    one = built()
    with upcast():
        loss = one(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
    models = [built() for _ in range(4)]

    def work(axes: Axes) -> list[tuple[Tensor, SplitPart | None]]:
        model = models[2 * axes[0].rank + axes[1].rank]
        cuts, kept = cuts_of(model, 2), dict[int, tuple[Tensor, Tensor, SplitPart | None]]()
        for module in model.modules():
            for name, p in parameters_in(module).items():
                if p is not None:
                    if id(p) not in kept:
                        how = cuts.get(id(p))
                        part = None if how is None else SplitPart(axes[1], how.dim, p.shape[how.dim], how.sections)
                        leaf = (p if part is None else part.slice_of(p)).detach().clone().requires_grad_()
                        kept[id(p)] = (leaf, leaf if part is None else split(leaf.view_as(leaf), part), part)
                    parameters_in(module)[name] = kept[id(p)][1]
        with upcast():
            found = context._run(model, axes[0], model.forward, input_ids=ids, attention_mask=mask, labels=ids)
            assert same(gather(found.loss), loss.detach())
            found.loss.backward()
        return [(leaf, part) for leaf, _, part in kept.values()]

    with upcast():  # whose default dtype is of the process
        ranks = on_grid(work, sequence=sequence)
    for rank in ranks:
        for (name, p), (leaf, part) in zip(one.named_parameters(), rank, strict=True):
            wanted = p.grad if part is None else part.slice_of(p.grad)
            assert same(leaf.grad, wanted), name
