"""Computes the losses of foreign_table.py, as training loops of those packages write them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwise as mw

Batch = dict[str, Tensor]


def predicts_noise(model: nn.Module, batch: Batch) -> Tensor:
    """A step of diffusion: noise at a random time, by the package's scheduler."""
    scheduler = importlib.import_module("diffusers").DDPMScheduler(100)
    x = batch["x"]
    noise, time = torch.randn_like(x), torch.randint(0, 100, (len(x),))
    more = {"class_labels": batch["y"]} if "y" in batch else {}
    more |= {"encoder_hidden_states": batch["said"]} if "said" in batch else {}
    return F.mse_loss(model(scheduler.add_noise(x, noise, time), time, **more).sample[:, : x.shape[1]], noise)


def flow_matching(model: nn.Module, batch: Batch) -> Tensor:
    """A step of flow matching: the speed between noise and image at a random time."""
    x = batch["x"]
    noise, time = torch.randn_like(x), torch.rand(len(x), dtype=x.dtype)
    mixed = torch.lerp(x, noise, time[:, None, None, None])
    found = model(mixed, encoder_hidden_states=batch["said"], pooled_projections=batch["pooled"], timestep=1000 * time)
    return F.mse_loss(found.sample, noise - x)


def kl_autoencoder(model: Any, batch: Batch) -> Tensor:
    """What is rebuilt from a draw of the posterior, and its divergence."""
    x = batch["x"]
    posterior = model.encode(x).latent_dist
    z = posterior.mean + posterior.std * torch.randn_like(posterior.mean)
    return F.mse_loss(model.decode(z).sample, x) + 1e-3 * posterior.kl().mean()


def variational(model: nn.Module, batch: Batch) -> Tensor:
    """The evidence lower bound."""
    found, mean, log_variance, _ = model(batch["x"])
    apart = F.mse_loss(found, batch["x"])
    return apart - 5e-4 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()


def dice_and_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Monai's DiceCELoss: Dice of each sample."""
    loss = importlib.import_module("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
    return loss(model(batch["x"]), batch["y"][:, None])  # type: ignore[no-any-return]


def focal(model: nn.Module, batch: Batch) -> Tensor:
    """The focal loss of segmentation-models-pytorch."""
    losses = importlib.import_module("segmentation_models_pytorch.losses")
    return losses.FocalLoss("multiclass")(model(batch["x"]), batch["y"])  # type: ignore[no-any-return]


def batch_dice(model: nn.Module, batch: Batch) -> Tensor:
    """Dice of the whole batch, a ratio of sums, as docs/rank-view.md says."""
    found, seen = model(batch["x"]).softmax(1), F.one_hot(batch["y"], 2).movedim(-1, 1).double()
    both, all_ = (found * seen).sum((0, 2, 3)), (found + seen).sum((0, 2, 3))
    return 1 - (2 * mw.sum(both, grad=True) / mw.sum(all_, grad=True)).mean()


def dense_classes(model: nn.Module, batch: Batch) -> Tensor:
    """Torchvision's reference: entropy of each pixel."""
    return F.cross_entropy(model(batch["x"])["out"], batch["y"])


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Each token from those before it; padding is left out."""
    tokens = batch["tokens"]
    wanted = tokens[:, 1:]
    found = model(tokens[:, :-1])
    return F.cross_entropy(found.transpose(1, 2), wanted, ignore_index=0), (wanted != 0).sum()


def hidden_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Every third token, hidden."""
    tokens = batch["tokens"]
    hidden = (torch.arange(tokens.shape[1]) % 3 == 1) & (tokens != 0)
    found = model(tokens.masked_fill(hidden, 1), mask=tokens != 0)
    return F.cross_entropy(found.transpose(1, 2), tokens.masked_fill(~hidden, -100)), hidden.sum()


def causal(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Transformers' own loss."""
    tokens = batch["tokens"]
    labels = tokens.masked_fill(tokens == 0, -100)
    found = model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels)
    return found.loss, (labels[:, 1:] != -100).sum()


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """The class of each sample."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def detected(model: nn.Module, batch: Any) -> Tensor:
    """The sum of the model's losses, as torchvision's reference takes it."""
    images, targets = batch
    return sum(model(list(images), list(targets)).values())  # type: ignore[no-any-return]


def detected_foreground(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum of the losses of FCOS, which are means over what its head has matched."""
    return detected(model, batch), model.head.foreground


def speaker(model: nn.Module, batch: Batch) -> Tensor:
    """Additive angular margins."""
    losses = importlib.import_module("speechbrain.nnet.losses")
    margin = losses.LogSoftmaxWrapper(losses.AdditiveAngularMargin(margin=0.2, scale=30))
    return margin(model(batch["x"]), batch["y"][:, None])  # type: ignore[no-any-return]


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    """Letters of a sound, at unknown times: a mean over samples."""
    found = F.log_softmax(model(batch["x"]), -1)
    times = torch.full((len(found),), found.shape[1])
    return F.ctc_loss(found.transpose(0, 1), batch["letters"], times, batch["sizes"], reduction="none").mean()


def si_snr(model: nn.Module, batch: Batch) -> Tensor:
    """How well two sounds are told apart, in whichever order: speechbrain's permutation invariant loss."""
    losses = importlib.import_module("speechbrain.nnet.losses")
    return losses.get_si_snr_with_pitwrapper(batch["y"], model(batch["x"])).mean()  # type: ignore[no-any-return]


def graph_energy(model: nn.Module, batch: Any) -> Tensor:
    """A number of each graph."""
    return F.mse_loss(model(batch), batch.y)


def molecule_energy(model: nn.Module, batch: Any) -> Tensor:
    """A number of each molecule, from places of its atoms."""
    return F.l1_loss(model(batch.z, batch.pos, batch.batch), batch.y)


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """CLIP's loss, which compares the samples of a batch."""
    image, text, scale = model(batch["x"], batch["tokens"])
    return importlib.import_module("open_clip").ClipLoss()(image, text, scale)  # type: ignore[no-any-return]


def triplets(model: nn.Module, batch: Batch) -> Tensor:
    """Triplets of a batch, which compare its samples."""
    losses = importlib.import_module("pytorch_metric_learning.losses")
    return losses.TripletMarginLoss()(model(batch["x"]), batch["y"])  # type: ignore[no-any-return]


def rebuilt(model: nn.Module, batch: Batch) -> Tensor:
    """What an autoencoder rebuilds, and what its codes cost."""
    found, cost = model(batch["x"])
    return F.mse_loss(found, batch["x"]) + cost


def clicked(model: nn.Module, batch: Batch) -> Tensor:
    """Clicked or not."""
    return F.binary_cross_entropy(model(batch["x"]).squeeze(1), batch["y"].to(batch["x"].dtype))


def operator(model: nn.Module, batch: Batch) -> Tensor:
    """The relative norm of neuraloperator, a mean over samples."""
    loss = importlib.import_module("neuralop.losses").LpLoss(d=2, p=2, reduction="mean")
    return loss(model(batch["x"]), batch["y"])  # type: ignore[no-any-return]


def tabular(model: nn.Module, batch: Batch) -> Tensor:
    """Categories and numbers."""
    found = model(batch["kinds"], batch["x"]).squeeze(1)
    return F.binary_cross_entropy_with_logits(found, batch["y"].to(found.dtype))


def tabular_numbers_first(model: nn.Module, batch: Batch) -> Tensor:
    """Numbers and categories."""
    found = model(batch["x"], batch["kinds"]).squeeze(1)
    return F.binary_cross_entropy_with_logits(found, batch["y"].to(found.dtype))


def tabnet(model: nn.Module, batch: Batch) -> Tensor:
    """Classes, and TabNet's sparsity of masks."""
    found, sparsity = model(batch["x"])
    return F.cross_entropy(found, batch["y"]) - 1e-3 * sparsity


def rendered(model: nn.Module, batch: Batch) -> Tensor:
    """Colours of rays: NeRF's integral over what the field says of their points."""
    found = model(batch["x"])
    gaps = F.pad(batch["far"].diff(dim=1), (0, 1), value=1e3)
    opaque = 1 - torch.exp(-F.softplus(found[..., 3]) * gaps)
    through = torch.cumprod(F.pad(1 - opaque + 1e-10, (1, 0), value=1.0), 1)[:, :-1]
    colour = ((opaque * through)[..., None] * torch.sigmoid(found[..., :3])).sum(1)
    return F.mse_loss(colour, batch["y"])


def ppo(model: Any, batch: Batch) -> Tensor:
    """The clipped surrogate of stable-baselines3, with value and entropy."""
    worth, likely, entropy = model.evaluate_actions(batch["seen"], batch["acted"])
    ratio, better = torch.exp(likely - batch["likely"]), batch["better"]
    surrogate = torch.min(better * ratio, better * ratio.clamp(0.8, 1.2)).mean()
    return -surrogate + 0.5 * F.mse_loss(worth.flatten(), batch["worth"]) - 0.01 * entropy.mean()


def moved(model: nn.Module, batch: Batch) -> Tensor:
    """Atoms pushed from their places, put back."""
    place = batch["place"]
    pushed = place + 0.1 * torch.randn_like(place)
    _, found = model(batch["kinds"], pushed)
    return F.mse_loss(found, place)
