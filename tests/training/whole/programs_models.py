"""Trains models that generate, teach each other, carry state, or are differentiated twice."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.training.whole.shared import Distribute, fit, mlp, rows, step, tokens, usual, weights


def rivals(distribute: Distribute, critic: nn.Module) -> Any:
    """A generator and a critic with an optimizer each, and real rows."""
    maker = mlp(6, 4)
    adam = [torch.optim.Adam(m.parameters(), 0.02, betas=(0.5, 0.9)) for m in (maker, critic)]
    return distribute(maker, critic, *adam, DataLoader(rows().tensors[0], batch_size=8, shuffle=True))


def gan(distribute: Distribute) -> Any:
    maker, critic, made, judged, loader = rivals(distribute, mlp(1))
    losses = []
    for real in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = maker(torch.randn(real.size(0), 4))
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        losses.append(step(loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros), judged))
        losses.append(step(F.binary_cross_entropy_with_logits(critic(fake), ones), made))
    return losses, weights(maker, critic)


def wgan_with_gradient_penalty(distribute: Distribute) -> Any:
    maker, critic, made, judged, loader = rivals(distribute, mlp(1))
    losses = []
    for real in loader:
        fake, share = maker(torch.randn(len(real), 4)), torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        losses.append(step(critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty, judged))
        losses.append(step(-critic(fake).mean(), made))
    return losses, weights(maker, critic)


def diffusion_with_moving_average(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, mlp(6, 7))
    average, kept = copy.deepcopy(model).eval(), torch.linspace(0.99, 0.05, 10).cumprod(0)
    losses = []
    for x, _ in loader:
        t, noise = torch.randint(0, 10, (x.shape[0],)), torch.randn_like(x)
        share = kept[t].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        losses.append(step(F.mse_loss(model(torch.cat([noisy, t[:, None] / 10], dim=1)), noise), optimizer))
        with torch.no_grad():
            for slow, p in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 0.2)
            losses.append(F.mse_loss(average(torch.cat([noisy, t[:, None] / 10], 1)), noise).item())
    return losses, weights(model, average)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6), mlp(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def vae(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        again, mean, log_variance = model(x)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return (F.mse_loss(again, x, reduction="sum") + divergence) / len(x)

    return fit(distribute, loss, Variational())


def masked_autoencoder(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        hidden = torch.rand(x.shape) < 0.4
        again = model(x.masked_fill(hidden, 0.0))
        return F.mse_loss(again[hidden], x[hidden]) + 0.1 * (again[~hidden] - x[~hidden]).abs().mean()

    return fit(distribute, loss, mlp(6))


def distillation(distribute: Distribute) -> Any:
    teacher = mlp().eval()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            told = (teacher(x) / 2).softmax(1)
        out = model(x)
        return 4 * F.kl_div((out / 2).log_softmax(1), told, reduction="batchmean") + F.cross_entropy(out, y)

    return fit(distribute, loss)


def meta_learning(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    losses = []
    for x, y in loader:
        half, fast = len(x) // 2, dict(model.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(functional_call(model, fast, (x[:half],)), y[:half])
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.3 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
        losses.append(step(F.cross_entropy(functional_call(model, fast, (x[half:],)), y[half:]), optimizer))
    return losses, weights(model)


def adversarial_rows(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    fooled = 0
    for x, y in loader:
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        worse = (x + 0.2 * x.grad.sign()).detach()
        fooled += (model(worse).argmax(1) != y).sum().item()
        step(F.cross_entropy(model(worse), y) + 0.1 * x.grad.norm(), optimizer)
    return fooled, weights(model)


def two_noisy_passes_agree(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        one, two = (model(x + 0.3 * torch.randn_like(x)) for _ in range(2))
        p, q = one.log_softmax(-1), two.log_softmax(-1)
        both = F.kl_div(p, q, log_target=True, reduction="none") + F.kl_div(q, p.exp(), reduction="none")
        return F.cross_entropy(torch.cat([one, two]), y.repeat(2)) + both.sum(-1).mean() / 2

    return fit(distribute, loss)


def penalty_on_hidden_gradients(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model[0](x)
        each = F.cross_entropy(model[2](model[1](hidden)), y, reduction="none")
        (slope,) = torch.autograd.grad(each.sum(), hidden, create_graph=True)
        return each.mean() + slope.pow(2).sum(1).mean() + slope.mean(0).norm()

    return fit(distribute, loss)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.out = nn.Embedding(11, 6), nn.LSTM(6, 8), nn.Linear(8, 11)

    def forward(self, words: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        z, state = self.body(self.words(words), state)
        return self.out(z), state


def carried_state_words_first(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, Speaker(), tokens(length=9), batch_size=4)
    losses = []
    for (words,) in loader:
        words, state = words.t(), None
        for start in range(0, 8, 4):
            out, state = model(words[start : start + 4], state)
            state = tuple(part.detach() for part in state)
            target = words[start + 1 : start + 5]
            losses.append(step(F.cross_entropy(out.reshape(-1, 11), target.reshape(-1)), optimizer))
        losses.append(state[0].norm().item())
    return losses, weights(model)


class Lm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(self.words(words[:, :-1]))[0] @ self.words.weight.T
        return F.cross_entropy(out.reshape(-1, out.size(-1)), words[:, 1:].reshape(-1)), out


def language_model_returns_its_loss(distribute: Distribute) -> Any:
    return fit(distribute, lambda model, words: model(words)[0] + model(words)[1].logsumexp(-1).mean(), Lm(), tokens())


def padded(samples: list[Any]) -> Any:
    """Sequences of unequal lengths with their lengths and labels."""
    labels = torch.stack([y for _, y in samples])
    return pad_sequence([torch.arange(1 + y) + n for n, y in enumerate(labels)], batch_first=True), labels + 1, labels


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.out = nn.Embedding(11, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        short = pack_padded_sequence(self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, (last, _) = self.body(short)
        whole, _ = pad_packed_sequence(states, batch_first=True)
        return self.out(last[-1] + whole.sum(1) / lengths.unsqueeze(1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        outside = torch.arange(words.shape[1])[None, :] >= lengths[:, None]
        z = self.body(self.words(words), src_key_padding_mask=outside).masked_fill(outside[..., None], 0)
        return self.out(z.sum(1) / lengths[:, None])


def of_lengths(distribute: Distribute, model: nn.Module) -> Any:
    """Two epochs on sequences of unequal lengths."""
    model, optimizer, loader = usual(distribute, model, collate=padded)
    losses = []
    for words, lengths, y in loader:
        losses.append(step(F.cross_entropy(model(words, lengths), y), optimizer))
        losses.append((int(lengths.max()), words.shape[1], lengths.sum().item()))
    return losses, weights(model)


def packed_sequences(distribute: Distribute) -> Any:
    return of_lengths(distribute, Packed())


def transformer_with_padding(distribute: Distribute) -> Any:
    return of_lengths(distribute, Attending())


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            z, (source, target) = layer(x), edges
            degree = torch.zeros(len(x)).index_add(0, target, torch.ones(edges.shape[1])).clamp(min=1)
            x = torch.tanh(z + torch.zeros_like(z).index_add(0, target, z[source]) / degree[:, None])
        return self.out(x)


def graph_of_a_batch(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        edges = (torch.cdist(x, x) < 3).nonzero().T
        out = model(x, edges)
        pooled = torch.zeros(2, 3).scatter_reduce(0, (y > 0).long()[:, None].expand(-1, 3), out, "mean")
        return F.cross_entropy(out, y) + pooled.square().mean()

    return fit(distribute, loss, Graphs())


def spectral_and_weight_norm(distribute: Distribute) -> Any:
    parts = nn.utils.parametrizations
    net = nn.Sequential(parts.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), parts.weight_norm(nn.Linear(8, 3)))
    return fit(distribute, lambda model, x, y: F.cross_entropy(model(x), y), net)


def gan_with_batch_norm(distribute: Distribute) -> Any:
    """Its last batch has two rows, and its noise is whole on every rank."""
    maker = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    adam = torch.optim.SGD(maker.parameters(), 0.05)
    loader = DataLoader(rows(10).tensors[0], batch_size=8)
    maker, adam, loader = distribute(maker, adam, loader)
    losses = [step((maker(torch.randn(5, 4)).mean(0) - real.mean(0)).square().sum(), adam) for real in loader]
    return losses, weights(maker), {k: v.clone() for k, v in maker.state_dict().items()}


class Asking(nn.Module):
    """Branches by questions about all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x if mask.all() else x * mask.unsqueeze(1)
        return self.body(x) if x.max() < 2.5 else self.body(x.tanh())


def questions_about_all_rows(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, Asking())
    losses = []
    for _ in range(3):
        for x, y in loader:
            out = model(x, x[:, 0] > (-9.0 if len(losses) % 2 else -1.0))
            losses.append(step(F.cross_entropy(out, y), optimizer))
    return losses, weights(model)


def batch_norm_of_rows_and_noise(distribute: Distribute) -> Any:
    """The noise has as many rows as a rank's part of the batch."""
    model, optimizer, loader = usual(distribute, nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) + model(torch.randn(len(x) // 2, 6)).square().mean()
        losses.append(step(loss, optimizer))
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


SEEN: list[int] = []
CALLS = 0


def note(held: dict[str, list[int]], value: int) -> None:
    held["noted"].append(value)


class Noting(nn.Module):
    """Counts its calls, and notes a number of each batch in a list of its script, in a dict and in its own list."""

    def __init__(self, number: Callable[[Tensor], int], held: dict[str, list[int]], own: list[int]) -> None:
        super().__init__()
        self.body, self.number, self.held, self.own = mlp(), number, held, own

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        SEEN.append(self.number(x))
        note(self.held, self.number(x))
        self.own.append(self.number(x))
        return self.body(x)


def numbers_noted_outside(distribute: Distribute) -> Any:
    global CALLS
    left = []
    for number in (len, lambda x: x.shape[1]):
        CALLS, own, held = 0, [], defaultdict(list)
        SEEN.clear()
        model = Noting(number, held, own)
        losses = fit(distribute, lambda model, x, y: F.cross_entropy(model(x), y), model)
        left.append((losses, CALLS, [*SEEN], dict(held), own, model.own is own))
    return left


def noise_beside_convolved_rows(distribute: Distribute) -> Any:
    """Noise follows the order of memory, which convolutions choose otherwise for a single row."""
    images = TensorDataset(torch.randn(14, 3, 8, 8), torch.randint(0, 3, (14,)))
    convolve = nn.Conv2d(3, 8, 3, padding=1)
    model, optimizer, loader = usual(distribute, nn.Sequential(convolve, nn.Tanh()), images, batch_size=7)
    left = []
    for x, _ in loader:
        rows = F.linear(x.flatten(2).transpose(1, 2), torch.ones(3, 3)).transpose(1, 2).reshape(x.shape)
        out = model(rows)
        left.append(step(((out - torch.randn_like(out)) ** 2).mean(), optimizer))
    return left, weights(model)
