"""Models with something odd about them, each a few lines: under a plan they are one device's, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

WIDE = 72  # a square of it is large enough to be gathered alone


def two(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(make(), nn.Tanh(), make(), nn.Tanh(), nn.Linear(WIDE, 3))


class Of(nn.Module):
    """Parameters by hand, and what is computed of them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def parameter(*shape: int, dtype: torch.dtype = torch.float64, trained: bool = True) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) / 10).to(dtype), requires_grad=trained)


def sparse() -> nn.Module:
    embed = nn.Embedding(16, WIDE, sparse=True)
    return Of(
        lambda m, x: m.head(m.embed(x[:, :6].abs().mul(10).long() % 16).mean(1)), embed=embed, head=nn.Linear(WIDE, 3)
    )


def shared() -> nn.Module:
    model = two(lambda: nn.Linear(WIDE, WIDE))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = two(lambda: nn.Linear(WIDE, WIDE))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDE, 4, bias=False), nn.Linear(4, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDE, 4, WIDE, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def run(model: Any, x: Tensor) -> Tensor:
        words = x[:, None] * torch.linspace(0.5, 1.5, 5, dtype=x.dtype)[:, None]
        hidden = torch.zeros(len(x), 5, dtype=torch.bool)
        hidden[:, 4] = True
        return model.head(model.stack(words, src_key_padding_mask=hidden)[:, 0])

    return Of(run, stack=stack, head=nn.Linear(WIDE, 3))


def quantised() -> nn.Module:
    model = Of(lambda m, x: m.head(x * m.scale * m.codes), head=nn.Linear(WIDE, 3))
    model.register_buffer("codes", torch.randint(-8, 8, (WIDE,), dtype=torch.int8))
    model.register_buffer("scale", torch.tensor(0.1, dtype=torch.float64))
    return model


def attention() -> nn.Module:
    return Of(
        lambda m, x: m.head(m.attend(*[x.view(-1, 2, WIDE // 2)] * 3)[0].flatten(1)),
        attend=nn.MultiheadAttention(WIDE // 2, 3, batch_first=True),
        head=nn.Linear(WIDE, 3),
    )


def spectral() -> nn.Module:
    return two(lambda: parametrizations.spectral_norm(nn.Linear(WIDE, WIDE)))


def listed() -> nn.Module:
    parts = nn.ParameterList(parameter(WIDE, WIDE) for _ in range(3))
    return Of(lambda m, x: (x @ m.parts[0] @ m.parts[2])[:, :3], parts=parts)


def named() -> nn.Module:
    parts = nn.ParameterDict({"a": parameter(WIDE, 3), "b": parameter(3)})
    return Of(lambda m, x: x @ m.parts["a"] + m.parts["b"], parts=parts)


def counted() -> nn.Module:
    whole = nn.Parameter(torch.arange(4), requires_grad=False)
    return Of(lambda m, x: m.head(x) * m.whole.sum(), whole=whole, head=nn.Linear(WIDE, 3))


ODD: dict[str, Callable[[], nn.Module]] = {
    "weight norm, old": lambda: two(lambda: weight_norm(nn.Linear(WIDE, WIDE))),
    "weight norm": lambda: two(lambda: parametrizations.weight_norm(nn.Linear(WIDE, WIDE))),
    "spectral norm": spectral,
    "orthogonal": lambda: two(lambda: parametrizations.orthogonal(nn.Linear(WIDE, WIDE))),
    "complex": lambda: Of(
        lambda m, x: (x.to(torch.complex128) @ m.w).abs(), w=parameter(WIDE, 3, dtype=torch.complex128)
    ),
    "whole numbers": counted,
    "sparse embedding": sparse,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(WIDE), nn.Tanh(), nn.LazyLinear(3)),
    "list of parameters": listed,
    "dictionary of parameters": named,
    "shared by two blocks": shared,
    "one block twice": lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(WIDE, 3)))(
        nn.Linear(WIDE, WIDE)
    ),
    "frozen in part": frozen,
    "frozen whole, but one": lambda: Of(
        lambda m, x: m.body(x) * m.gain,
        body=two(lambda: nn.Linear(WIDE, WIDE)).requires_grad_(False),
        gain=parameter(3),
    ),
    "adapted": lambda: two(Adapted),
    "attention": attention,
    "encoder": encoder,
    "quantised buffers": quantised,
    "no parameters": lambda: Of(lambda m, x: x[:, :3] * 2),
    "smaller than its ranks": lambda: Of(lambda m, x: x[:, :3] * m.w, w=parameter(1)),
    "one row": lambda: Of(lambda m, x: (x * m.w)[:, :3], w=parameter(1, WIDE)),
    "empty parameter": lambda: Of(lambda m, x: x[:, :3] * m.w + m.none.sum(), w=parameter(3), none=parameter(0, 4)),
    "single number": lambda: Of(lambda m, x: x[:, :3] * m.w, w=parameter()),
    "two dtypes": lambda: Of(
        lambda m, x: m.two(m.one(x.float()).double()),
        one=nn.Linear(WIDE, WIDE).float(),
        two=nn.Linear(WIDE, 3).double(),
    ),
    "not contiguous": lambda: Of(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(3, WIDE, dtype=torch.float64).t())),
    "channels last": lambda: Of(
        lambda m, x: m.conv(x.view(-1, 2, 6, 6)).mean((2, 3)),
        conv=nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ),
}


def build(name: str) -> nn.Module:
    """The model in float64, where it is not the dtypes that are odd."""
    torch.manual_seed(0)
    model = ODD[name]()
    return model if name == "two dtypes" else model.double()
