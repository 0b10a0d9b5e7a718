"""Tensors whose rows are divided: an operator gives what it gives of the whole, and so do its first two derivatives.

Ranks are threads, so that no process starts. Rows are divided as a batch is, or raggedly, with ranks that hold none.

Tests splits/picking.py, splits/reducing.py, splits/rows.py.
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

from meshwise.splits import rules
from meshwise.splits.axis import SplitPart
from meshwise.splits.crossing import gather
from meshwise.splits.tensor import SplitTensor, split
from tests.parallel.test_split_context import ThreadAxis, on_ranks, same

D, INF = torch.float64, float("inf")
SHAPES = {
    **dict.fromkeys("xyz", (4,)), "v": (), "u": (), "q": (3, 4), "p": (4, 4, 4), "g": (2, 2, 2), "a": (2, 3, 4), "s": (2, 2)
}  # fmt: skip
"""What an operator gets: lower letters have rows, k and j are numbers of classes (one, two a row), m is a mask."""
WHOLE = {"W": (4, 4), "B": (4,), "K": (4, 4, 2), "F": (2, 4, 4)}
LOCK = threading.Lock()
Case = tuple[int, str, Callable[..., Any]]


def order(x: Tensor) -> Tensor:
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x * 1
    x[index] = value
    return x


def drawn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a generator that is as on one device: threads share it."""

    def run(*inputs: Tensor) -> Any:
        with LOCK:
            torch.manual_seed(5)
            return function(*inputs)

    return run


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


OPERATORS: dict[str, Case] = {
    "__getitem__ index": (90, "x", lambda x: x[order(x)]),
    "__getitem__ some": (40, "x", lambda x: x[order(x)[: len(x) // 2]]),
    "__getitem__ list": (5, "x", lambda x: x[[-1, 0, 0]]),
    "__getitem__ split index": (10, "xk", lambda x, k: x[k % len(x)]),
    "__getitem__ table": (20, "kW", lambda k, w: w[k]),
    "__getitem__ tables": (5, "jW", lambda j, w: w[j[:, 0], j[:, 1]]),
    "__getitem__ column table": (3, "kW", lambda k, w: w[:, k]),
    "__getitem__ mask": (60, "xm", lambda x, m: x[m]),
    "__getitem__ whole mask": (8, "x", lambda x: x[order(x) % 2 == 0]),
    "__getitem__ own mask": (15, "x", lambda x: x[x > 0]),
    "__getitem__ masked column": (5, "xm", lambda x, m: x[m, 1]),
    "__getitem__ pairs": (25, "xk", lambda x, k: x[torch.arange(len(x)), k]),
    "__getitem__ pairs of others": (3, "xk", lambda x, k: x[order(x), k]),
    "__getitem__ pairs of two": (4, "xj", lambda x, j: x[torch.arange(len(x))[:, None], j]),
    "__getitem__ columns": (10, "x", lambda x: x[:, [0, 2]]),
    "__getitem__ slice": (80, "x", lambda x: x[1:4]),
    "__getitem__ row": (60, "x", lambda x: x[-1]),
    "__getitem__ column": (90, "x", lambda x: x[:, 0]),
    "__setitem__ mask": (20, "xm", lambda x, m: put(x, m, 0.5)),
    "__setitem__ rows of a mask": (5, "xmy", lambda x, m, y: put(x, m, y[m])),
    "__setitem__ index": (8, "x", lambda x: put(x, order(x)[:2], 0.5)),
    "__setitem__ pairs": (8, "xkv", lambda x, k, v: put(x, (torch.arange(len(x)), k), v)),
    "__setitem__ column": (15, "xv", lambda x, v: put(x, (slice(None), 1), v)),
    "__setitem__ row": (8, "xB", lambda x, b: put(x, -1, b)),
    "index_select": (8, "x", lambda x: x.index_select(0, order(x))),
    "masked_select": (6, "x", lambda x: x.masked_select(x > 0)),
    "nonzero": (10, "m", lambda m: m.nonzero().squeeze(1)),
    "where of one": (6, "xm", lambda x, m: x[torch.where(m)[0]]),
    "where": (40, "xyB", lambda x, y, b: torch.where(x > y, x, b)),
    "gather": (30, "xk", lambda x, k: x.gather(1, k[:, None])),
    "take_along_dim": (4, "xj", lambda x, j: torch.take_along_dim(x, j, dim=1)),
    "scatter": (8, "xk", lambda x, k: x.scatter(1, k[:, None], 0.5)),
    "scatter_": (12, "xk", lambda x, k: torch.zeros_like(x).scatter_(1, k[:, None], 1)),
    "scatter_add": (4, "xjy", lambda x, j, y: x.scatter_add(1, j, y[:, :2])),
    "scatter_add_ to classes": (4, "kxF", lambda k, x, f: f[0].scatter_add(0, k[:, None].expand(-1, 4), x)),
    "index_add": (6, "kxF", lambda k, x, f: f[0].index_add(0, k, x)),
    "index_add_": (6, "kx", lambda k, x: torch.zeros(3, 4, dtype=D).index_add_(0, k, x)),
    "bincount": (8, "k", lambda k: torch.bincount(k, minlength=2)),
    "one_hot": (30, "k", lambda k: F.one_hot(k)),
    "one_hot of classes": (30, "k", lambda k: F.one_hot(k, 5)),
    "chunk": (40, "x", lambda x: x.chunk(2)),
    "split": (25, "x", lambda x: x.split(2)),
    "tensor_split": (2, "x", lambda x: x.tensor_split(3)),
    "unbind": (6, "x", lambda x: x.unbind(1)),
    "cat": (90, "xyW", lambda x, y, w: torch.cat([x, y, w])),
    "stack": (60, "xy", lambda x, y: torch.stack([x, y])),
    "repeat_interleave": (6, "x", lambda x: x.repeat_interleave(2, 0)),
    "roll": (8, "x", lambda x: x.roll(1, 0)),
    "flip": (8, "x", lambda x: x.flip(0)),
    "diag": (10, "xy", lambda x, y: torch.diag(x @ y.T)),
    "masked_fill": (30, "xy", lambda x, y: (x @ y.T).masked_fill(torch.eye(len(x)) > 0, -9.0)),
    "sort": (8, "x", lambda x: x.sort(1)),
    "sort of rows": (4, "v", lambda v: v.sort()),
    "argsort of rows": (5, "xv", lambda x, v: x[v.argsort()]),
    "topk": (30, "x", lambda x: x.topk(2)),
    "topk of rows": (8, "v", lambda v: v.topk(2, largest=False)),
    "argmax": (90, "x", lambda x: x.argmax(1)),
    "argmax of rows": (5, "x", lambda x: [x.argmax(0), x.argmax()]),
    "max": (50, "x", lambda x: x.max(1)),
    "max of all": (30, "x", lambda x: x.round().max()),
    "max of rows": (8, "x", lambda x: x.round().max(0)),
    "max of two": (10, "xy", lambda x, y: torch.max(x, y)),
    "min of all": (20, "x", lambda x: x.round().min()),
    "amax of rows": (5, "x", lambda x: x.round().amax(0)),
    "any": (10, "m", lambda m: m.any()),
    "all": (10, "m", lambda m: [m.all(), m.any(0)]),
    "prod": (3, "x", lambda x: [x.prod(0), x.prod()]),
    "median": (3, "x", lambda x: x.median(1)),
    "median of rows": (3, "x", lambda x: x.median(0)),
    "quantile of rows": (3, "v", lambda v: v.quantile(0.3)),
    "unique": (8, "k", lambda k: k.unique()),
    "isin": (2, "k", lambda k: torch.isin(k, torch.tensor([1, 2]))),
    "__contains__": (2, "k", lambda k: 2 in k),
    "equal": (1, "ku", lambda k, u: torch.equal(k, u)),
    "cumsum": (10, "x", lambda x: x.cumsum(1)),
    "cumsum of rows": (4, "x", lambda x: x.cumsum(0)),
    "sum": (100, "x", lambda x: x.sum()),
    "mean": (100, "x", lambda x: x.mean()),
    "sum of rows": (40, "x", lambda x: x.sum(0)),
    "mean of columns": (60, "x", lambda x: x.mean(1)),
    "std": (15, "x", lambda x: [x.std(), x.std(0, unbiased=False)]),
    "var": (10, "x", lambda x: [x.var(0), torch.var(x, (0, 1), keepdim=True)]),
    "var_mean": (2, "x", lambda x: torch.var_mean(x, 0)),
    "norm": (30, "x", lambda x: [x.norm(), x.norm(dim=1)]),
    "vector_norm": (4, "x", lambda x: torch.linalg.vector_norm(x, INF, dim=0)),
    "normalize": (40, "x", lambda x: F.normalize(x)),
    "logsumexp": (8, "x", lambda x: [x.logsumexp(0), x.logsumexp(1)]),
    "softmax": (80, "x", lambda x: x.softmax(-1)),
    "softmax of rows": (5, "x", lambda x: x.softmax(0)),
    "log_softmax": (50, "x", lambda x: F.log_softmax(x, 1)),
    "matmul": (70, "xW", lambda x, w: x @ w),
    "matmul of pairs": (25, "xy", lambda x, y: x @ y.T),
    "matmul over rows": (8, "xy", lambda x, y: x.T @ y),
    "mv": (5, "xB", lambda x, b: x @ b),
    "dot": (3, "uv", lambda u, v: u @ v),
    "bmm": (20, "qa", lambda q, a: torch.bmm(q, a[:, 0].transpose(1, 2))),
    "outer": (3, "uv", lambda u, v: torch.outer(u, v)),
    "einsum": (20, "xy", lambda x, y: torch.einsum("nc,mc->nm", x, y)),
    "einsum over rows": (6, "xy", lambda x, y: torch.einsum("nc,nd", x, y)),
    "cdist": (6, "xy", lambda x, y: torch.cdist(x, y)),
    "cosine_similarity": (15, "xy", lambda x, y: F.cosine_similarity(x, y)),
    "cosine_similarity of pairs": (5, "xy", lambda x, y: F.cosine_similarity(x[:, None], y[None], dim=-1)),
    "pairwise_distance": (8, "xy", lambda x, y: F.pairwise_distance(x, y)),
    "linear": (100, "xWB", lambda x, w, b: F.linear(x, w, b)),
    "bilinear": (1, "xyF", lambda x, y, f: F.bilinear(x, y, f)),
    "embedding": (50, "jW", lambda j, w: F.embedding(j, w)),
    "embedding_bag": (2, "jW", lambda j, w: F.embedding_bag(j, w)),
    "conv2d": (80, "pW", lambda p, w: F.conv2d(p, w[:, :, None, None])),
    "conv2d of groups": (10, "pK", lambda p, k: F.conv2d(p, k.transpose(1, 2)[..., None].contiguous(), groups=2)),
    "conv1d": (15, "qF", lambda q, f: F.conv1d(q.transpose(1, 2), f[..., :2].contiguous())),
    "conv_transpose2d": (8, "pK", lambda p, k: F.conv_transpose2d(p, k[..., None])),
    "max_pool2d": (40, "p", lambda p: F.max_pool2d(p, 2)),
    "max_pool2d with indices": (2, "p", lambda p: F.max_pool2d(p, 2, return_indices=True)),
    "avg_pool2d": (15, "p", lambda p: F.avg_pool2d(p, 2)),
    "adaptive_avg_pool2d": (25, "p", lambda p: F.adaptive_avg_pool2d(p, 1)),
    "max_pool1d": (5, "q", lambda q: F.max_pool1d(q, 2)),
    "interpolate": (30, "p", lambda p: F.interpolate(p, scale_factor=2, mode="bilinear")),
    "pixel_shuffle": (4, "p", lambda p: F.pixel_shuffle(p, 2)),
    "unfold": (3, "p", lambda p: F.unfold(p, 2)),
    "fold": (1, "p", lambda p: F.fold(p.flatten(2)[:, :, :1], (2, 2), 2)),
    "grid_sample": (6, "pg", lambda p, g: F.grid_sample(p, g, align_corners=False)),
    "layer_norm": (50, "xB", lambda x, b: F.layer_norm(x, (4,), b)),
    "group_norm": (15, "pB", lambda p, b: F.group_norm(p, 2, b)),
    "instance_norm": (6, "p", lambda p: F.instance_norm(p)),
    "local_response_norm": (2, "p", lambda p: F.local_response_norm(p, 2)),
    "batch_norm": (60, "xB", normed),
    "batch_norm of images": (60, "pB", normed),
    "batch_norm in eval": (20, "pB", lambda p, b: F.batch_norm(p, b.detach(), b.detach().exp(), b)),
    "prelu": (3, "xB", lambda x, b: F.prelu(x, b)),
    "tril": (4, "s", lambda s: s.tril()),
    "pad": (20, "q", lambda q: F.pad(q, (0, 0, 0, 2))),
    "lstm": (20, "qW", recurrent("lstm", 4)),
    "gru": (10, "qW", recurrent("gru", 3)),
    "multi_head_attention_forward": (20, "qW", heads),
    "multi_head_attention_forward masked": (
        10,
        "qmW",
        lambda q, m, w: heads(q, w, key_padding_mask=m[:, None] & (torch.arange(3) > 0), need_weights=False),
    ),
    "scaled_dot_product_attention": (
        20,
        "am",
        lambda a, m: F.scaled_dot_product_attention(a, a, a, m[:, None, None, None] | (torch.arange(3) < 2)),
    ),
    "scaled_dot_product_attention without heads": (
        3,
        "q",
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    ),
    "dropout": (60, "x", drawn(lambda x: F.dropout(x, 0.5, True))),
    "dropout2d": (5, "p", drawn(lambda p: [F.dropout2d(p), F.alpha_dropout(p, 0.5, True)])),
    "rand_like": (15, "x", drawn(lambda x: [torch.rand_like(x), torch.randint_like(x, 9)])),
    "randn_like": (40, "x", drawn(lambda x: x + torch.randn_like(x))),
    "bernoulli": (6, "x", drawn(lambda x: torch.bernoulli(x.sigmoid()))),
    "normal": (6, "xy", drawn(lambda x, y: torch.normal(x, y.exp()))),
    "normal_": (6, "x", drawn(lambda x: torch.empty_like(x).normal_())),
    "multinomial": (10, "x", drawn(lambda x: torch.multinomial(x.exp(), 2))),
    "gumbel_softmax": (4, "x", drawn(lambda x: F.gumbel_softmax(x, hard=True))),
    "cross_entropy": (100, "xk", lambda x, k: F.cross_entropy(x, k)),
    "mse_loss": (60, "xy", lambda x, y: F.mse_loss(x, y)),
    "triplet_margin_loss": (6, "xyz", lambda x, y, z: F.triplet_margin_loss(x, y, z)),
    "margin_ranking_loss": (4, "uvk", lambda u, v, k: F.margin_ranking_loss(u, v, signs(k))),
    "cosine_embedding_loss": (4, "xyk", lambda x, y, k: F.cosine_embedding_loss(x, y, signs(k))),
    "hinge_embedding_loss": (2, "vk", lambda v, k: F.hinge_embedding_loss(v, signs(k))),
    "multi_margin_loss": (1, "xk", lambda x, k: F.multi_margin_loss(x, k, reduction="sum")),
    "multilabel_soft_margin_loss": (2, "xy", lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid())),
    "gaussian_nll_loss": (3, "xyz", lambda x, y, z: F.gaussian_nll_loss(x, y, z.exp())),
    "poisson_nll_loss": (1, "xy", lambda x, y: F.poisson_nll_loss(x, y)),
    "ctc_loss": (3, "qj", ctc),
    "inverse": (2, "s", lambda s: torch.linalg.inv(s + 9 * torch.eye(2, dtype=D))),
    "Categorical.log_prob": (10, "xk", lambda x, k: torch.distributions.Categorical(logits=x).log_prob(k)),
}
"""Operators, of rows where nothing else is said: how often loops use them (a rough count, per thousand, from memory of
published training loops), the letters of what they get, and the call."""
ONCE = {"cdist", "ctc_loss", "multi_margin_loss"}
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
    random, twice = torch.Generator().manual_seed(rows), name not in ONCE
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
