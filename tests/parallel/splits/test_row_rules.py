"""Tensors whose rows are divided: an operator gives what it gives of the whole, and so do its first two derivatives.

Ranks are threads, so that no process starts. Rows are divided as a batch is, or raggedly, with ranks that hold none.

Tests parallel/splits/picking.py, parallel/splits/reducing.py, parallel/splits/rows.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import SplitTensor, split
from tests.parallel.test_split_context import ALONE, ThreadAxis, on_ranks, same

D, INF = torch.float64, float("inf")
SHAPES: dict[str, tuple[int, ...]] = {"v": (), "u": (), "q": (3, 4), "p": (4, 4, 4), "g": (2, 2, 2), "a": (2, 3, 4)}
SHAPES |= {"x": (4,), "y": (4,), "z": (4,), "s": (2, 2)}
"""What an operator gets: small letters have rows, k and j are classes (one, two a row), m is a mask."""
WHOLE = {"W": (4, 4), "B": (4,), "K": (4, 4, 2), "T": (2, 4, 4)}
LOCK = threading.Lock()
Case = tuple[int, str, Callable[..., Any]]


def order(x: Tensor) -> Tensor:
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x * 1
    x[index] = value
    return x


def filled(x: Tensor) -> Tensor:
    x = x * 1
    x.diagonal().mul_(2)
    return x


def drawn(function: Callable[[], Any]) -> Any:
    """Call `function` with a generator that is as on one device: threads share it."""
    with LOCK:
        torch.manual_seed(5)
        ALONE.holds_lock = True
        try:
            return function()
        finally:
            ALONE.holds_lock = False


def recurrent(name: str, gates: int) -> Callable[..., Any]:
    def run(q: Tensor, w: Tensor) -> Any:
        flat = [w.repeat(gates, 1), w.repeat(gates, 1), w[0].repeat(gates), w[1].repeat(gates)]
        state = torch.zeros(1, len(q), 4, dtype=D)
        return getattr(torch, name)(q, (state, state) if gates == 4 else state, flat, True, 1, 0.0, True, False, True)

    return run


def normed(x: Tensor, b: Tensor) -> Any:
    mean, var = torch.zeros(4, dtype=D), torch.ones(4, dtype=D)
    return F.batch_norm(x, mean, var, b, b, True, 0.3), mean, var


def heads(q: Tensor, w: Tensor, **options: Any) -> Any:
    packed = (4, 2, w.repeat(3, 1), w[0].repeat(3), None, None, False, 0.0, w, w[1])
    return F.multi_head_attention_forward(*[q.transpose(0, 1)] * 3, *packed, **options)[0]


def ctc(q: Tensor, j: Tensor) -> Tensor:
    times = [torch.full((len(q),), length) for length in (3, 1)]
    return F.ctc_loss(q.transpose(0, 1).log_softmax(-1), j[:, :1] + 1, *times, zero_infinity=True)


def signs(k: Tensor) -> Tensor:
    return (k > 0) * 2 - 1


TABLE = """
40 x x.sum(axis=1) ; 40 x x.mean(axis=0) ; 20 x x.sum(axis=1, keepdims=True) ; 20 xy torch.cat([x, y], axis=1)
10 xy torch.stack([x, y], axis=1) ; 10 x x.chunk(2, axis=1) ; 5 x x.unsqueeze(axis=1)
1 x torch.softmax(input=x, dim=-1) ; 1 xy torch.cat(tensors=[x, y]) ; 1 x torch.sum(input=x, dim=1)
100 xy x + y ; 100 x x * 2 ; 100 xB x - B ; 60 xy x / (y.abs() + 1) ; 60 x x**2 ; 40 x x.exp() ; 40 x x.abs()
40 x x.clamp(-1, 1) ; 60 x x.relu() ; 60 k (k == 1).float() ; 90 x x.detach() ; 60 p p.flatten(1) ; 60 q q.view(-1, 4)
50 x x.unsqueeze(1) ; 40 p p.permute(0, 2, 3, 1) ; 15 x x[:, None].expand(-1, 3, -1) ; 20 x torch.zeros_like(x)
90 x x[order(x)] ; 40 x x[order(x)[: len(x) // 2]] ; 5 x x[[-1, 0, 0]] ; 10 xk x[k % len(x)] ; 20 kW W[k]
5 jW W[j[:, 0], j[:, 1]] ; 3 kW W[:, k] ; 60 xm x[m] ; 8 x x[order(x) % 2 == 0] ; 15 x x[x > 0] ; 5 xm x[m, 1]
25 xk x[torch.arange(len(x)), k] ; 3 xk x[order(x), k] ; 4 xj x[torch.arange(len(x))[:, None], j] ; 10 x x[:, [0, 2]]
80 x x[1:4] ; 10 x [x[::2], x[1::3]]
60 x x[-1] ; 90 x x[:, 0] ; 20 xm put(x, m, 0.5) ; 5 xmy put(x, m, y[m]) ; 8 x put(x, order(x)[:2], 0.5)
8 xkv put(x, (torch.arange(len(x)), k), v) ; 15 xv put(x, (slice(None), 1), v) ; 8 xB put(x, -1, B)
8 xB put(x, slice(1, 3), B) ; 2 xB put(x, x > 0, 0.5)
8 x x.index_select(0, order(x)) ; 6 x x.masked_select(x > 0) ; 10 m m.nonzero().squeeze(1) ; 6 xm x[torch.where(m)[0]]
40 xyB torch.where(x > y, x, B) ; 30 xk x.gather(1, k[:, None]) ; 4 xj torch.take_along_dim(x, j, dim=1)
8 xk x.scatter(1, k[:, None], 0.5) ; 12 xk torch.zeros_like(x).scatter_(1, k[:, None], 1)
4 xjy x.scatter_add(1, j, y[:, :2]) ; 4 kxT T[0].scatter_add(0, k[:, None].expand(-1, 4), x)
6 kxT T[0].index_add(0, k, x) ; 6 xyk x.index_add(0, k % len(x), y)
6 kx torch.zeros(3, 4, dtype=D).index_add_(0, k, x)
8 k torch.bincount(k, minlength=2) ; 30 k F.one_hot(k) ; 30 k F.one_hot(k, 5) ; 40 x x.chunk(2) ; 25 x x.split(2)
2 x x.tensor_split(3) ; 6 x x.unbind(1) ; 90 xyW torch.cat([x, y, W]) ; 60 xy torch.stack([x, y])
6 x x.repeat_interleave(2, 0) ; 8 x x.roll(1, 0) ; 8 x x.flip(0) ; 10 xy torch.diag(x @ y.T)
2 x torch.diag(x) ; 4 x filled(x)
30 xy (x @ y.T).masked_fill(torch.eye(len(x)) > 0, -9.0) ; 8 x x.sort(1) ; 4 v v.sort() ; 5 xv x[v.argsort()]
30 x x.topk(2) ; 8 v v.topk(2, largest=False) ; 90 x x.argmax(1) ; 5 x [x.argmax(0), x.argmax()] ; 50 x x.max(1)
30 x x.round().max() ; 8 x x.round().max(0) ; 10 xy torch.max(x, y) ; 20 x x.round().min() ; 5 x x.round().amax(0)
10 m m.any() ; 10 m [m.all(), m.any(0)] ; 3 x [x.prod(0), x.prod()] ; 3 x x.median(1) ; 3 x x.median(0)
3 v v.quantile(0.3) ; 8 k k.unique() ; 2 k torch.isin(k, torch.tensor([1, 2])) ; 2 k 2 in k ; 1 ku torch.equal(k, u)
10 x x.cumsum(1) ; 4 x x.cumsum(0) ; 100 x x.sum() ; 100 x x.mean() ; 40 x x.sum(0) ; 60 x x.mean(1)
15 x [x.std(), x.std(0, unbiased=False)] ; 10 x [x.var(0), torch.var(x, (0, 1), keepdim=True)]
2 x torch.var_mean(x, 0) ; 30 x [x.norm(), x.norm(dim=1)] ; 4 x torch.linalg.vector_norm(x, INF, dim=0)
40 x F.normalize(x) ; 8 x [x.logsumexp(0), x.logsumexp(1)] ; 80 x x.softmax(-1) ; 5 x x.softmax(0)
50 x F.log_softmax(x, 1) ; 70 xW x @ W ; 25 xy x @ y.T ; 8 xy x.T @ y ; 5 xB x @ B ; 3 uv u @ v
20 qa torch.bmm(q, a[:, 0].transpose(1, 2)) ; 3 uv torch.outer(u, v) ; 20 xy torch.einsum("nc,mc->nm", x, y)
6 xy torch.einsum("nc,nd", x, y) ; 6 xy torch.cdist(x, y) ; 15 xy F.cosine_similarity(x, y)
5 xy F.cosine_similarity(x[:, None], y[None], dim=-1) ; 8 xy F.pairwise_distance(x, y) ; 100 xWB F.linear(x, W, B)
1 xyT F.bilinear(x, y, T) ; 50 jW F.embedding(j, W) ; 2 jW F.embedding_bag(j, W)
80 pW F.conv2d(p, W[:, :, None, None]) ; 10 pK F.conv2d(p, K.transpose(1, 2)[..., None].contiguous(), groups=2)
15 qT F.conv1d(q.transpose(1, 2), T[..., :2].contiguous()) ; 8 pK F.conv_transpose2d(p, K[..., None])
40 p F.max_pool2d(p, 2) ; 2 p F.max_pool2d(p, 2, return_indices=True) ; 15 p F.avg_pool2d(p, 2)
25 p F.adaptive_avg_pool2d(p, 1) ; 5 q F.max_pool1d(q, 2) ; 30 p F.interpolate(p, scale_factor=2, mode="bilinear")
4 p F.pixel_shuffle(p, 2) ; 3 p F.unfold(p, 2) ; 1 p F.fold(p.flatten(2)[:, :, :1], (2, 2), 2)
6 pg F.grid_sample(p, g, align_corners=False) ; 50 xB F.layer_norm(x, (4,), B) ; 15 pB F.group_norm(p, 2, B)
6 p F.instance_norm(p) ; 2 p F.local_response_norm(p, 2) ; 60 xB normed(x, B) ; 60 pB normed(p, B)
20 pB F.batch_norm(p, B.detach(), B.detach().exp(), B) ; 3 xB F.prelu(x, B) ; 4 s s.tril()
20 q F.pad(q, (0, 0, 0, 2)) ; 20 qW recurrent("lstm", 4)(q, W) ; 10 qW recurrent("gru", 3)(q, W) ; 20 qW heads(q, W)
10 qmW heads(q, W, key_padding_mask=m[:, None] & (torch.arange(3) > 0), need_weights=False)
20 am F.scaled_dot_product_attention(a, a, a, m[:, None, None, None] | (torch.arange(3) < 2))
3 q F.scaled_dot_product_attention(q, q, q, is_causal=True) ; 60 x drawn(lambda: F.dropout(x, 0.5, True))
5 p drawn(lambda: [F.dropout2d(p), F.alpha_dropout(p, 0.5, True)])
15 x drawn(lambda: [torch.rand_like(x), torch.randint_like(x, 9)]) ; 40 x drawn(lambda: x + torch.randn_like(x))
6 x drawn(lambda: torch.bernoulli(x.sigmoid())) ; 6 xy drawn(lambda: torch.normal(x, y.exp()))
6 x drawn(lambda: torch.empty_like(x).normal_()) ; 10 x drawn(lambda: torch.multinomial(x.exp(), 2))
4 x drawn(lambda: F.gumbel_softmax(x, hard=True)) ; 100 xk F.cross_entropy(x, k) ; 60 xy F.mse_loss(x, y)
6 xyz F.triplet_margin_loss(x, y, z) ; 4 uvk F.margin_ranking_loss(u, v, signs(k))
4 xyk F.cosine_embedding_loss(x, y, signs(k)) ; 2 vk F.hinge_embedding_loss(v, signs(k))
1 xk F.multi_margin_loss(x, k, reduction="none") ; 2 xy F.multilabel_soft_margin_loss(x, y.sigmoid())
3 xyz F.gaussian_nll_loss(x, y, z.exp()) ; 1 xy F.poisson_nll_loss(x, y) ; 3 qj ctc(q, j)
2 s torch.linalg.inv(s + 9 * torch.eye(2, dtype=D)) ; 10 xk torch.distributions.Categorical(logits=x).log_prob(k)
"""
OPERATORS: dict[str, Case] = {}
"""Operators, of rows where nothing else is said: how often loops use them (a rough count, per thousand, from memory of
published training loops), the letters of what they get, and the call, which is also the name."""
for entry in TABLE.replace("\n", " ; ").strip("; ").split(" ; "):
    weight, letters, call = entry.split(" ", 2)
    OPERATORS[call] = int(weight), letters, eval(f"lambda {', '.join(letters)}: {call}")
ONCE = ("cdist", "ctc", "multi_margin")
"""Operators of which torch does not know the second derivative."""


def tensors(made: Any) -> list[Tensor]:
    if isinstance(made, tuple | list):
        return [one for each in made for one in tensors(each)]
    return [made] if isinstance(made, Tensor) else [torch.as_tensor(made)]


def derivatives(
    leaves: Sequence[Tensor], outs: Sequence[Tensor], whole: Callable[[int, Tensor], Tensor], twice: bool
) -> list[Any]:
    """Return the gradients of a random number made of `outs`, and the gradients of a random number made of those.

    whole: makes the whole of the gradient of leaf i. twice: whether torch knows the second derivative.
    """
    random = torch.Generator().manual_seed(7)

    def number(each: Sequence[Tensor]) -> Tensor:
        return sum(
            ((o * torch.randn(o.shape, dtype=D, generator=random)).sum() for o in each), torch.zeros((), dtype=D)
        )

    trained = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    outs = [o for o in outs if o.requires_grad]
    if not trained or not outs:
        return []
    mine, seeds = [leaves[n] for n in trained], number(outs)
    first = torch.autograd.grad(seeds, mine, create_graph=twice, materialize_grads=True)
    full = [whole(n, g) for n, g in zip(trained, first, strict=True)]
    again = number(full)
    second = (
        torch.autograd.grad(again, mine, materialize_grads=True) if again.requires_grad else map(torch.zeros_like, mine)
    )
    return [*full, *(whole(n, g) for n, g in zip(trained, second, strict=True))] if twice else full


@sdpa_kernel(SDPBackend.MATH)
def held(name: str, rows: int, size: int, ends: Sequence[Sequence[int]] | None = None) -> list[Any]:
    """Compare an operator on inputs whose rows are divided with that on whole ones. Returns what each result of rank 0
    is split along, what rank 0 sent, and which operators were gathered.

    ends: where the rows of each rank begin and end; None: as `torch.chunk` divides them.
    """
    _, letters, function = OPERATORS[name]
    random, twice = torch.Generator().manual_seed(rows), not any(once in name for once in ONCE)
    inputs = [made(letter, rows, random) for letter in letters]
    dims = [0 if letter.islower() else None for letter in letters]

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_(x.is_floating_point())

    def twin(x: Tensor) -> Tensor:
        return x * 1 if x.is_floating_point() else x.clone()

    leaves = [leaf(x) for x in inputs]
    try:
        wanted = tensors(function(*map(twin, leaves)))
        wanted_d = derivatives(leaves, wanted, lambda n, g: g, twice)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError, UserWarning):
        assert rows < 3
        return []  # torch refuses so few rows

    def work(axis: ThreadAxis) -> Any:
        def part_of(x: Tensor, dim: int | None) -> SplitPart | None:
            if dim is None:
                return None
            part = SplitPart(axis, dim, x.shape[dim])
            return part if ends is None else part.divided([[(b, e)] for b, e in ends], x.shape[dim])

        parts = [part_of(x, dim) for x, dim in zip(inputs, dims, strict=True)]
        mine = [leaf(x if p is None else p.slice_of(x)) for x, p in zip(inputs, parts, strict=True)]

        def whole(n: int, g: Tensor) -> Tensor:
            p = parts[n]
            return g if p is None else gather(split(g * 1, p)) / axis.size

        made = tensors(
            function(*(twin(x) if p is None else split(twin(x), p) for x, p in zip(mine, parts, strict=True)))
        )
        kinds = [each.part.dim if isinstance(each, SplitTensor) else None for each in made]
        shapes, sent = [each.shape for each in made], dict(axis.sent)
        full = [gather(each) for each in made]
        return kinds, shapes, full, derivatives(mine, full, whole, twice), sent

    rules.gathered.clear()
    found = on_ranks(size, work, name="data", gradient_scale=size)
    for rank, (_, shapes, full, found_d, _) in enumerate(found):
        assert shapes == [each.shape for each in wanted]
        for got, expected in zip(full, wanted, strict=True):
            assert got.dtype == expected.dtype and same(got, expected), f"rank {rank}: {got}, not {expected}"
        assert len(found_d) == len(wanted_d)
        for place, (got, expected) in enumerate(zip(found_d, wanted_d, strict=True)):
            assert same(got, expected), f"derivative {place}, rank {rank}: {got}, not {expected}"
    return [found[0][0], found[0][-1], dict(rules.gathered)]


def made(letter: str, rows: int, random: torch.Generator) -> Tensor:
    if letter in "kj":
        return torch.randint(0, 3, (rows, 2) if letter == "j" else (rows,), generator=random)
    if letter == "m":
        return torch.rand(rows, generator=random) < 0.6
    shape = (rows, *SHAPES[letter]) if letter in SHAPES else WHOLE[letter]
    return torch.randn(shape, dtype=D, generator=random)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]] | None]:
    """Draw a number of rows, a number of ranks, and where the rows of each rank begin and end."""
    rows, size = draw(st.sampled_from([5, 7, 0, 1, 2, 3, 4, 6])), draw(st.integers(2, 3))
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=size - 1, max_size=size - 1)))
    ends = list(itertools.pairwise([0, *cuts, rows]))
    return rows, size, ends if draw(st.booleans()) else None


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=max(3, settings.default.max_examples // 8))
@given(division=divisions())
def test_an_operator_gives_of_divided_rows_what_it_gives_of_all(name: str, division: Any) -> None:
    held(name, *division)


def test_few_operators_gather_the_whole_batch() -> None:
    found = []
    for name, (weight, letters, _) in OPERATORS.items():
        random = torch.Generator().manual_seed(6)
        of_rows = [made(letter, 6, random).numel() for letter in letters if letter.islower()]
        _, sent, gathered = held(name, 6, 2)
        if gathered or sent.get("all-gather", 0) * 2 >= max(of_rows):
            found.append((weight, name))
    share = sum(weight for weight, _ in found) / sum(weight for weight, *_ in OPERATORS.values())
    assert len(OPERATORS) >= 150
    assert len(found) <= 20 and share < 0.05, f"{len(found)} of {len(OPERATORS)}, {share:.1%} of uses: {sorted(found)}"
