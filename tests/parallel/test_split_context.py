"""Tensors whose positions are divided: each rule gives what the operator gives of the whole, and so does its gradient.

Ranks are threads, so that no process starts.

Tests parallel/context.py, parallel/splits/attention.py, parallel/splits/rule.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwise.parallel import context
from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import SplitTensor, split
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan


@dataclass
class Ranks:
    """What the ranks of an axis share: each is a thread."""

    size: int
    box: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)


ALONE = threading.local()
"""`holds_lock` is true in a thread that the others cannot meet. What it gathers is alike on all of them."""


@dataclass(frozen=True)
class ThreadAxis:
    """A rank of an axis. sent: how many elements it has sent, by kind."""

    ranks: Ranks = field(compare=False)
    rank: int
    sent: Counter[str] = field(default_factory=Counter, compare=False)
    name: str = "context"
    sequence: bool = False
    gradient_scale: int = 1
    proves: bool = False

    def averages(self, whole: Tensor) -> bool:
        return False

    def divides(self, whole: Tensor, dim: int) -> None:
        pass

    @property
    def size(self) -> int:
        return self.ranks.size

    def _all(self, kind: str, tensor: Tensor) -> list[Tensor]:
        self.sent[kind] += tensor.numel()
        self.ranks.box[self.rank] = tensor.detach().clone()
        self.ranks.barrier.wait()
        found = [self.ranks.box[rank] for rank in range(self.size)]
        self.ranks.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        every = torch.stack(self._all("all-reduce", tensor))
        with torch.no_grad():
            return tensor.copy_(every.sum(0) if op == "sum" else every.amax(0))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all("reduce-scatter", tensor)).sum(0)[self.rank]

    def all_gather(self, tensor: Tensor) -> Tensor:
        if getattr(ALONE, "holds_lock", False):
            return torch.stack([tensor] * self.size)
        return torch.stack(self._all("all-gather", tensor))

    def pass_on(self, tensor: Tensor) -> Tensor:
        return self._all("pass on", tensor)[(self.rank - 1) % self.size]

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._all("all-to-all", tensor)])

    def meet(self, what: str) -> None:
        pass


def folded(axis: ThreadAxis, dim: int, length: int) -> SplitPart:
    return SplitPart(axis, dim, length).folded()


def plain(axis: ThreadAxis, dim: int, length: int) -> SplitPart:
    return SplitPart(axis, dim, length)


def on_ranks(size: int, work: Callable[[ThreadAxis], Any], **options: Any) -> list[Any]:
    ranks, found = Ranks(size), dict[int, Any]()

    def one(rank: int) -> None:
        try:
            found[rank] = work(ThreadAxis(ranks, rank, **options))
        except BaseException as error:
            found[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(
        (e for e in found.values() if isinstance(e, BaseException)),
        key=lambda e: isinstance(e, threading.BrokenBarrierError),
    ):
        raise error
    return [found[rank] for rank in range(size)]


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-11, rtol=1e-11, equal_nan=True)


def _asked(
    part: Callable[..., SplitPart], axis: ThreadAxis, x: Tensor, dim: int | tuple[int, int] | None
) -> SplitPart | None:
    if isinstance(dim, tuple):
        return SplitPart(axis, dim[0], x.shape[dim[0]], dim[1])
    return None if dim is None else part(axis, dim, x.shape[dim])


def hold(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    dims: Sequence[int | tuple[int, int] | None],
    size: int = 2,
    part: Callable[..., SplitPart] = plain,
    **options: Any,
) -> list[Any]:
    """Compare `function` of inputs that are split along `dims` with that of whole ones, values and gradients.

    dims: of each input, None where it is whole; with a second number, of how many sections a rank has a part.
    Returns of rank 0 what each result is split along (None: whole), and of each rank what it sent.
    """

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_(x.is_floating_point())

    def twin(x: Tensor) -> Tensor:
        return x * 1 if x.is_floating_point() else x.clone()

    def backward(outs: Sequence[Tensor]) -> None:
        outs = [o for o in outs if o.requires_grad]
        seeds = [torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(7)) for o in outs]
        if outs:
            torch.autograd.backward(outs, seeds)

    def several(made: Any) -> list[Tensor]:
        return list(made) if isinstance(made, tuple | list) else [made]

    whole = [leaf(x) for x in inputs]
    wanted = several(function(*map(twin, whole)))
    backward(wanted)

    def work(axis: ThreadAxis) -> Any:
        parts = [_asked(part, axis, x, dim) for x, dim in zip(inputs, dims, strict=True)]
        mine = [leaf(x if p is None else p.slice_of(x)) for x, p in zip(inputs, parts, strict=True)]
        given = [twin(x) if p is None else split(twin(x), p) for x, p in zip(mine, parts, strict=True)]
        made = several(function(*given))
        kinds = [each.part.dim if isinstance(each, SplitTensor) else None for each in made]
        shapes, sent = [each.shape for each in made], Counter(axis.sent)
        full = [gather(each) for each in made]
        backward(full)
        return kinds, shapes, full, [(x.grad, p) for x, p in zip(mine, parts, strict=True)], sent

    found = on_ranks(size, work, **options)
    for rank, (_, shapes, full, gradients, _) in enumerate(found):
        assert shapes == [each.shape for each in wanted]
        for got, expected in zip(full, wanted, strict=True):
            assert same(got, expected), f"rank {rank}"
        for (gradient, p), expected in zip(gradients, whole, strict=True):
            assert (gradient is None) == (expected.grad is None)
            if gradient is not None:
                assert same(gradient, expected.grad if p is None else p.slice_of(expected.grad)), f"gradient, {rank}"
    return [found[0][0], [each[-1] for each in found]]


torch.manual_seed(0)
D = torch.float64
X = torch.randn(2, 7, 6, dtype=D)
IDS = torch.randint(0, 6, (2, 7))
WEIGHT, BIAS = torch.randn(8, 6, dtype=D), torch.randn(8, dtype=D)


def _set(x: Tensor, y: Tensor) -> Tensor:
    x[:, 2] = y
    return x


CASES = {
    "samples merged with positions": (lambda x: x.view(-1, 6) * 2, [X], [1], 0),
    "and taken apart": (lambda x: x.reshape(14, 6).relu().view(2, 7, 6), [X], [1], 1),
    "heads of samples": (lambda x: x.view(2, 7, 2, 3).transpose(1, 2).reshape(4, 7, 3).exp(), [X], [1], 1),
    "addmm": (lambda x, w: torch.addmm(BIAS, x.view(-1, 6), w.t()).view(2, 7, 8), [X, WEIGHT], [1, None], 1),
    "linear": (F.linear, [X, WEIGHT, BIAS], [1, None, None], 1),
    "embedding": (F.embedding, [IDS, WEIGHT], [1, None], 1),
    "layer norm": (lambda x, w: F.layer_norm(x, (6,), w), [X, torch.randn(6, dtype=D)], [1, None], 1),
    "all but the last": (lambda x: x[..., :-1, :].exp(), [X], [1], 1),
    "all but the first": (lambda x: x[:, 1:] * 2, [X], [1], 1),
    "a shifted difference": (lambda x: x[:, 1:] - x[:, :-1], [X], [1], 1),
    "from nowhere on": (lambda x: x[:, slice(0, None), :], [X], [1], 1),
    "the first": (lambda x: x[:, 0] * 2, [X], [1], None),
    "the last": (lambda x: x[:, -1, 2:] * 2, [X], [1], None),
    "narrow": (lambda x: x.narrow(1, 2, 3), [X], [1], 1),
    "padded behind": (lambda x: F.pad(x, (0, 0, 0, 2), value=3.0)[:, 1:], [X], [1], 1),
    "padded before": (lambda x: F.pad(x, (1, 0, 3, 0)), [X], [1], 1),
    "one more in front": (lambda c, x: torch.cat([c, x], 1).exp(), [X[:, :1], X], [None, 1], 1),
    "joined": (lambda a, b: torch.cat([a, b], 1), [X, X + 1], [1, 1], 1),
    "mean over positions": (lambda x: x.mean(1), [X], [1], None),
    "softmax over positions": (lambda x: x.softmax(1), [X], [1], 1),
    "cumsum over positions": (lambda x: x.cumsum(1), [X], [1], None),
    "cross entropy": (
        lambda x, y: F.cross_entropy(x.view(-1, 6), y.view(-1), ignore_index=3),
        [X, IDS],
        [1, None],
        None,
    ),
    "of split targets": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
        [X, IDS],
        [1, 1],
        None,
    ),
    "with weights": (
        lambda x, y: F.cross_entropy(x.view(-1, 6), y.view(-1), BIAS[:6].abs(), ignore_index=2),
        [X, IDS],
        [1, None],
        None,
    ),
    "of each row": (lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"), [X, IDS], [1, None], 1),
    "of probabilities": (
        lambda x, y: F.cross_entropy(x.view(-1, 6), y.view(-1, 6).softmax(-1)),
        [X, X],
        [1, None],
        None,
    ),
    "shifted": (lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 6), y[:, 1:].reshape(-1)), [X, IDS], [1, 1], None),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, 6), y.view(-1)), [X, IDS], [1, None], None),
    "mse": (F.mse_loss, [X, X + 1], [1, None], None),
    "bce": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="sum"), [X, X], [1, None], None),
    "of positions": (lambda x, y: F.cross_entropy(x[..., 0], y[:, 0]), [X, IDS], [1, None], None),
    "written into": (
        lambda x, y: F.pad(x, (0, 0, 0, 0)).index_add_(1, torch.arange(3), y),
        [X, X[:, :3]],
        [1, None],
        1,
    ),
    "an entry set": (lambda x, y: _set(x * 1, y), [X, X[0, 2]], [1, None], 1),
    "baddbmm": (
        lambda q, k: torch.zeros(2, 1, 7, dtype=D).baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.5),
        [X, X],
        [1, 1],
        1,
    ),
    "eager attention": (
        lambda q, k, v: (q @ k.transpose(-1, -2) + torch.full((7, 7), -9e9, dtype=D).triu(1)).softmax(-1) @ v,
        [torch.randn(2, 3, 7, 4, dtype=D) for _ in range(3)],
        [2, 2, 2],
        2,
    ),
}


@pytest.mark.parametrize("part", [plain, folded])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_divided_positions_give_what_the_whole_gives(name: str, size: int, part: Callable[..., SplitPart]) -> None:
    function, inputs, dims, kind = CASES[name]
    assert hold(function, inputs, dims, size, part)[0] == [kind]


def attend(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def heads(count: int, length: int, width: int = 4) -> Tensor:
    return torch.randn(2, count, length, width, dtype=D)


SEEN = torch.rand(2, 1, 7, 7) < 0.6
SEEN[0, 0, 3] = False  # a query that sees nothing
ATTENTION = {
    "all": (attend(), [heads(4, 7) for _ in range(3)], "sss"),
    "causal": (attend(is_causal=True), [heads(4, 7) for _ in range(3)], "sss"),
    "scaled": (attend(is_causal=True, scale=0.3), [heads(4, 7), heads(4, 7), heads(4, 7, 5)], "sss"),
    "fewer positions than ranks": (attend(is_causal=True), [heads(4, 2) for _ in range(3)], "sss"),
    "grouped heads": (attend(is_causal=True, enable_gqa=True), [heads(4, 7), heads(2, 7), heads(2, 7)], "sss"),
    "a mask": (attend(), [*(heads(4, 7) for _ in range(3)), SEEN], "sssw"),
    "a mask of heads": (attend(), [*(heads(4, 7) for _ in range(3)), heads(4, 7, 7)[:1].detach()], "sssb"),
    "a padding mask": (
        attend(),
        [*(heads(4, 7) for _ in range(3)), torch.tensor([[1] * 5 + [0] * 2, [1] * 7])[:, None, None] > 0],
        "sssw",
    ),
    "a learned mask": (attend(), [*(heads(4, 7) for _ in range(3)), heads(4, 7, 7)], "sssw"),
    "of another sequence": (attend(), [heads(4, 7), heads(4, 5), heads(4, 5)], "sww"),
    "of another divided one": (attend(), [heads(4, 7), heads(4, 5), heads(4, 5)], "sss"),
    "without samples": (attend(is_causal=True), [heads(4, 7)[0] for _ in range(3)], "sss"),
}


@pytest.mark.parametrize("part", [plain, folded])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_divided_positions(name: str, size: int, part: Callable[..., SplitPart]) -> None:
    function, inputs, kinds = ATTENTION[name]
    if kinds[3:] == "b":
        bias, inputs = inputs[3], inputs[:3]
        plain_function = function
        function = lambda q, k, v: plain_function(q, k, v, bias)  # noqa: E731
    dims = [x.dim() - 2 if kind == "s" else None for x, kind in zip(inputs, kinds, strict=False)]
    assert hold(function, inputs, dims, size, part)[0] == [inputs[0].dim() - 2]


def test_the_ring_sends_what_theory_says() -> None:
    """Forward, keys and values of the other ranks; backward, those again, and the gradients of all back home."""
    size, length = 4, 8
    q, k, v = heads(4, length), heads(2, length), heads(2, length)
    own = (k.numel() + v.numel()) // size

    def work(axis: ThreadAxis) -> tuple[int, int]:
        given = [split(p.slice_of(x).clone().requires_grad_(), p) for x in (q, k, v) for p in [plain(axis, 2, length)]]
        made = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        forward = axis.sent["pass on"]
        made.sum().backward()
        return forward, axis.sent["pass on"] - forward

    for forward, backward in on_ranks(size, work):
        assert forward == (size - 1) * own
        assert backward == (size - 1) * own + size * own


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def test_an_autograd_function_of_the_user_finds_the_whole_and_is_named() -> None:
    rules.prepare()
    rules.gathered.clear()
    hold(lambda x: Cubed.apply(x) * x, [X], [1])
    assert rules.gathered["Cubed"]


def test_what_mixes_positions_is_gathered_and_named() -> None:
    rules.gathered.clear()
    weight = torch.randn(6, 1, 3, dtype=D)
    hold(lambda x: F.conv1d(x.transpose(1, 2), weight, padding=1, groups=6), [X], [1])
    assert rules.gathered["conv1d"]


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 4, dtype=D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, labels: Tensor | None = None) -> Any:
        return self.table(input_ids), input_ids, attention_mask, labels


def test_positions_are_divided_as_the_model_is_given_them_but_not_masks_and_labels() -> None:
    def work(axis: ThreadAxis) -> list[Any]:
        model = Tokens()
        return [type(each) for each in context._run(model, axis, model.forward, IDS, IDS > 0, labels=IDS)]

    assert on_ranks(2, work) == [[SplitTensor, SplitTensor, Tensor, Tensor]] * 2


def test_a_model_without_positions_is_refused_with_what_it_is_given() -> None:
    model = torch.nn.Linear(4, 2)
    with pytest.raises(
        PlanError, match=r"Linear was called with input \(2, 4\)\. Call it with token ids .* or use data or shard"
    ):
        context._run(model, ThreadAxis(Ranks(2), 0), model.forward, torch.ones(2, 4))


def test_context_is_refused_with_compile() -> None:
    with pytest.raises(PlanError, match="compile"):
        Plan(context=2, compile=True)
