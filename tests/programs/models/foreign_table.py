# ruff: noqa: E501
"""Names the models of `bench/breadth.py --packages`: constructor calls of packages, tiny, and losses for them.

`call` is `module:constructor(...)`, evaluated with `nn` and `transformers` beside the names of its module. Losses are
as a training loop of the package has them; a mean over less than samples says what it is a mean over.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import foreign_builders
import foreign_losses as losses
import torch
import torchvision_ops
from torch import Tensor, nn, optim

from meshwise.training.job.job import Job

SAMPLES, BATCH, CLASSES, WORDS, LENGTH = 24, 8, 5, 64, 16
torchvision_ops.complete()


@dataclass(frozen=True)
class Model:
    """package: of PyPI. data: the samples. plans: names of `PLANS`. join: of samples that are no tensors. apart: why no
    division of a batch computes what one device does, for programs that are not counted."""

    package: str
    call: str
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Any]
    plans: tuple[str, ...]
    join: Callable[[list[Any]], Any] | None = None
    apart: str = ""


def version_of(model: Model) -> str:
    """The version of its package, empty where that is not installed."""
    try:
        return metadata.version(model.package)
    except metadata.PackageNotFoundError:
        return ""


def model_of(name: str) -> nn.Module:
    """The model, with random weights of the current generator."""
    module, _, call = MODELS[name].call.partition(":")
    of_module = importlib.import_module(module)
    names = {"nn": nn, "transformers": importlib.import_module("transformers")} | vars(foreign_builders)
    names |= {name: getattr(of_module, name) for name in re.findall(r"[A-Za-z]\w*", call) if hasattr(of_module, name)}
    return eval(call, names)  # type: ignore[no-any-return]  # a line of the table below


def job_of(name: str) -> Job:
    """The job: AdamW; of batch norms SGD, for which tiny_models.py says why."""
    model, normed = MODELS[name], list[bool]()

    def made() -> nn.Module:
        found = model_of(name)
        normed[:] = [any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in found.modules())]
        return found

    def optimizer(parameters: Any) -> optim.Optimizer:
        return optim.SGD(parameters, 0.01, 0.9) if normed[0] else optim.AdamW(parameters, lr=1e-3)

    return Job(name, made, model.loss, optimizer, model.data, batch_size=BATCH, collate=model.join)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=_generator(seed))


def _whole(most: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, most, (SAMPLES, *shape), generator=_generator(seed))


def images(*shape: int) -> Callable[[], Any]:
    """Images of a shape."""
    return lambda: {"x": _floats(*shape)}


def labelled(*shape: int, classes: int = CLASSES) -> Callable[[], Any]:
    """Samples of a shape with a class each."""
    return lambda: {"x": _floats(*shape), "y": _whole(classes)}


def masked(*shape: int, classes: int = 2) -> Callable[[], Any]:
    """Images of a shape with a class for each pixel."""
    return lambda: {"x": _floats(*shape), "y": _whole(classes, *shape[1:])}


def texts(length: int = LENGTH) -> Callable[[], Any]:
    """Tokens, of which the tail is padding (0)."""

    def made() -> Any:
        lengths = _whole(length // 2, 1, seed=2) + length // 2
        tokens = 1 + _whole(WORDS - 1, length)
        return {"tokens": tokens.masked_fill(torch.arange(length) >= lengths, 0)}

    return made


def captioned(*shape: int) -> Callable[[], Any]:
    """Images with tokens."""
    return lambda: {"x": _floats(*shape)} | texts()()


def spoken(*shape: int) -> Callable[[], Any]:
    """Features of sounds with up to five letters each."""
    return lambda: {"x": _floats(*shape), "letters": 1 + _whole(9, 5), "sizes": 2 + _whole(4, seed=4)}


def boxed(size: int = 64) -> Callable[[], Any]:
    """Images with one to three boxes."""

    def made() -> Any:
        found = []
        for number, image in enumerate(_floats(3, size, size)):
            count = 1 + number % 3
            corners = torch.rand(count, 2, generator=_generator(number)) * size / 2
            sides = size / 8 + torch.rand(count, 2, generator=_generator(number + 99)) * size / 4
            boxes = torch.cat([corners, corners + sides], 1)
            marks = torch.zeros(count, size, size, dtype=torch.uint8)
            for mark, (left, top, right, bottom) in zip(marks, boxes.long().tolist(), strict=True):
                mark[top:bottom, left:right] = 1
            points = torch.cat([boxes.view(count, 2, 2), torch.ones(count, 2, 1)], 2)
            labels = 1 + torch.arange(count) % (CLASSES - 1)
            found.append((image, {"boxes": boxes, "labels": labels, "masks": marks, "keypoints": points}))
        return found

    return made


def separate(samples: list[Any]) -> Any:
    """Images and targets as lists, as torchvision's reference collates them."""
    return tuple(zip(*samples, strict=True))


def graphs() -> Any:
    """Molecules of five to nine atoms, in a ring with some chords."""
    data = importlib.import_module("torch_geometric.data").Data
    found = []
    for number in range(SAMPLES):
        atoms, draw = 5 + number % 5, _generator(number)
        ring = torch.arange(atoms)
        pairs = torch.stack([ring, (ring + 1) % atoms])
        edges = torch.cat([pairs, pairs.flip(0)], 1)
        place, kinds = torch.randn(atoms, 3, generator=draw), torch.randint(1, 9, (atoms,), generator=draw)
        found.append(
            data(
                x=torch.randn(atoms, 8, generator=draw),
                edge_index=edges,
                edge_attr=torch.randn(edges.shape[1], 4, generator=draw),
                z=kinds,
                pos=place,
                y=torch.randn(1, 1, generator=draw),
            )
        )
    return found


def joined(samples: list[Any]) -> Any:
    """A batch of graphs, as torch_geometric's loader makes it."""
    return importlib.import_module("torch_geometric.data").Batch.from_data_list(samples)


def clicks() -> Any:
    """Six categories and four numbers, clicked or not."""
    return {"x": torch.cat([_whole(20, 6).float(), _floats(4)], 1), "y": _whole(2).float()}


def rows() -> Any:
    """Categories and numbers of a table."""
    return {"kinds": _whole(10, 4), "x": _floats(6), "y": _whole(2).float()}


def rays() -> Any:
    """Points along rays with the colour that is seen."""
    far = torch.linspace(0, 1, 12).expand(SAMPLES, 12)
    towards = nn.functional.normalize(_floats(3), dim=1)
    return {"x": towards[:, None] * far[..., None], "far": far, "y": torch.sigmoid(_floats(3, seed=5))}


def played() -> Any:
    """Steps of an agent: what it saw, did, how likely that was, and what came of it."""
    return {
        "seen": _floats(6),
        "acted": _floats(2, seed=2),
        "likely": -2 + 0.1 * _floats(seed=3),
        "better": _floats(seed=4),
        "worth": _floats(seed=5),
    }


def waves(length: int = 400) -> Callable[[], Any]:
    """A mixture of two sounds, and both."""

    def made() -> Any:
        both = _floats(length, 2)
        return {"x": both.sum(2), "y": both}

    return made


D, S, T, DT, ST, Z, P = "data", "shard", "tensor", "data × tensor", "shard × tensor", "zero1", "pipeline"
UNET = "block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8"
SMP = "encoder_name='mobilenet_v2', encoder_weights=None"
DETECT = "min_size=64, max_size=64"
LLAMA = "hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64"
GPT2 = "transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))"
MODELS: dict[str, Model] = {
    "UNet2D": Model(
        "diffusers",
        f"diffusers:UNet2DModel(16, 3, 3, {UNET}, down_block_types=('DownBlock2D', 'AttnDownBlock2D'), "
        "up_block_types=('AttnUpBlock2D', 'UpBlock2D'), attention_head_dim=8)",
        images(3, 16, 16),
        losses.predicts_noise,
        (D, S, T, DT),
    ),
    "UNet2DCondition": Model(
        "diffusers",
        f"diffusers:UNet2DConditionModel(16, 4, 4, {UNET}, cross_attention_dim=32, attention_head_dim=4, "
        "down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D'))",
        lambda: {"x": _floats(4, 16, 16), "said": _floats(6, 32, seed=3)},
        losses.predicts_noise,
        (S, T, DT),
    ),
    "DiT": Model(
        "diffusers",
        "diffusers:DiTTransformer2DModel(4, 8, 4, 4, 2, sample_size=8, patch_size=2, norm_num_groups=8, "
        "num_embeds_ada_norm=10)",
        lambda: {"x": _floats(4, 8, 8), "y": _whole(10)},
        losses.predicts_noise,
        (T, DT, ST),
    ),
    "SD3": Model(
        "diffusers",
        "diffusers:SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=2, "
        "attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, "
        "pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8)",
        lambda: {"x": _floats(4, 8, 8), "said": _floats(6, 32, seed=3), "pooled": _floats(16, seed=4)},
        losses.flow_matching,
        (S, T, DT),
    ),
    "AutoencoderKL": Model(
        "diffusers",
        f"diffusers:AutoencoderKL(3, 3, {UNET}, down_block_types=('DownEncoderBlock2D',) * 2, "
        "up_block_types=('UpDecoderBlock2D',) * 2, latent_channels=4)",
        images(3, 16, 16),
        losses.kl_autoencoder,
        (D, T, DT),
    ),
    "monai UNet": Model(
        "monai",
        "monai.networks.nets:UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1, dropout=0.1)",
        masked(1, 16, 16, 16),
        losses.dice_and_entropy,
        (D, S, T, DT),
    ),
    "SegResNet": Model(
        "monai",
        "monai.networks.nets:SegResNet(3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1))",
        masked(1, 16, 16, 16),
        losses.dice_and_entropy,
        (S, T),
    ),
    "UNETR": Model(
        "monai",
        "monai.networks.nets:UNETR(1, 2, (32, 32), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=4, "
        "spatial_dims=2, dropout_rate=0.1)",
        masked(1, 32, 32),
        losses.dice_and_entropy,
        (S, T, DT),
    ),
    "SwinUNETR": Model(
        "monai",
        "monai.networks.nets:SwinUNETR(1, 2, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4), feature_size=12, "
        "spatial_dims=2, drop_rate=0.1)",
        masked(1, 64, 64),
        losses.dice_and_entropy,
        (S, T, DT),
    ),
    "VarAutoEncoder": Model(
        "monai",
        "monai.networks.nets:VarAutoEncoder(2, (1, 16, 16), 1, 8, (8, 16), (2, 2))",
        lambda: {"x": torch.sigmoid(_floats(1, 16, 16))},
        losses.variational,
        (S, T),
    ),
    "smp Unet": Model(
        "segmentation-models-pytorch",
        f"segmentation_models_pytorch:Unet({SMP}, decoder_channels=(32, 16, 16, 8, 8), classes=2)",
        masked(3, 64, 64),
        losses.dice_and_entropy,
        (S, T, DT),
    ),
    "smp DeepLabV3Plus": Model(
        "segmentation-models-pytorch",
        f"segmentation_models_pytorch:DeepLabV3Plus({SMP}, decoder_channels=32, classes=2)",
        masked(3, 64, 64),
        losses.focal,
        (S, T),
    ),
    "smp FPN": Model(
        "segmentation-models-pytorch",
        f"segmentation_models_pytorch:FPN({SMP}, decoder_pyramid_channels=32, decoder_segmentation_channels=32, classes=2)",
        masked(3, 64, 64),
        losses.batch_dice,
        (D, T),
    ),
    "X-Decoder": Model(
        "x-transformers",
        f"x_transformers:TransformerWrapper(num_tokens={WORDS}, max_seq_len={LENGTH}, attn_layers=Decoder(dim=32, depth=2, "
        "heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, attn_dropout=0.1))",
        texts(),
        losses.next_token,
        (S, T, DT, P),
    ),
    "X-Encoder": Model(
        "x-transformers",
        f"x_transformers:TransformerWrapper(num_tokens={WORDS}, max_seq_len={LENGTH}, attn_layers=Encoder(dim=32, depth=2, "
        "heads=4, attn_dim_head=8, use_simple_rmsnorm=True, alibi_pos_bias=True, ff_relu_squared=True))",
        texts(),
        losses.hidden_token,
        (T, ST),
    ),
    "X-Seq2seq": Model(
        "x-transformers",
        f"x_transformers:XTransformer(dim=32, enc_num_tokens={WORDS}, enc_depth=2, enc_heads=4, enc_max_seq_len={LENGTH}, "
        f"dec_num_tokens={WORDS}, dec_depth=2, dec_heads=4, dec_max_seq_len={LENGTH}, enc_attn_dim_head=8, "
        "dec_attn_dim_head=8)",
        lambda: {"tokens": 1 + _whole(WORDS - 1, LENGTH), "said": 1 + _whole(WORDS - 1, 9, seed=5)},
        lambda model, batch: model(batch["tokens"], batch["said"]),
        (S, T),
    ),
    "SimpleViT": Model(
        "vit-pytorch",
        "vit_pytorch:SimpleViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8)",
        labelled(3, 32, 32),
        losses.classified,
        (T, DT, P),
    ),
    "DeepViT": Model(
        "vit-pytorch",
        "vit_pytorch.deepvit:DeepViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64, "
        "dim_head=8, dropout=0.1)",
        labelled(3, 32, 32),
        losses.classified,
        (S, T),
    ),
    "CCT": Model(
        "vit-pytorch",
        "vit_pytorch.cct:CCT(img_size=32, embedding_dim=32, n_conv_layers=2, num_layers=2, num_heads=4, mlp_ratio=2., "
        "num_classes=5)",
        labelled(3, 32, 32),
        losses.classified,
        (S, T, DT),
    ),
    "MaxViT": Model(
        "vit-pytorch",
        "vit_pytorch.max_vit:MaxViT(num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=4, dim_conv_stem=16)",
        labelled(3, 32, 32),
        losses.classified,
        (D, T),
    ),
    "RetinaNet": Model(
        "torchvision",
        "torchvision.models.detection:RetinaNet(torchvision_backbone(), 5, "
        f"{DETECT}, anchor_generator=rpn.AnchorGenerator(((16,),), ((0.5, 1., 2.),)))",
        boxed(),
        losses.detected,
        (S, T),
        separate,
    ),
    "FasterRCNN": Model(
        "torchvision",
        "torchvision.models.detection:FasterRCNN(torchvision_backbone(), 5, "
        f"{DETECT}, rpn_pre_nms_top_n_train=64, rpn_post_nms_top_n_train=32, box_batch_size_per_image=16, rpn_anchor_generator=rpn.AnchorGenerator(((16,),), ((0.5, 1., 2.),)))",
        boxed(),
        losses.detected,
        (D, T),
        separate,
    ),
    "FCOS": Model(
        "torchvision",
        f"torchvision.models.detection:counting_fcos({DETECT}, anchor_generator=rpn.AnchorGenerator(((8,),), ((1.,),)))",
        boxed(),
        losses.detected_foreground,
        (D,),
        separate,
    ),
    "LRASPP": Model(
        "torchvision",
        "torchvision.models.segmentation:lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)",
        masked(3, 64, 64),
        losses.dense_classes,
        (S, T),
    ),
    "LoRA": Model(
        "peft",
        f"peft:get_peft_model({GPT2}, LoraConfig(r=4, lora_alpha=8, target_modules=['c_attn', 'c_proj'], "
        "lora_dropout=0.1, fan_in_fan_out=True, task_type='CAUSAL_LM'))",
        texts(),
        losses.causal,
        (D, S, T, DT),
    ),
    "DoRA": Model(
        "peft",
        f"peft:get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig({LLAMA})), LoraConfig(r=4, "
        "use_dora=True, target_modules='all-linear', task_type='CAUSAL_LM'))",
        texts(),
        losses.causal,
        (S, T, DT),
    ),
    "IA3": Model(
        "peft",
        f"peft:get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig({LLAMA})), IA3Config("
        "target_modules=['k_proj', 'v_proj', 'down_proj'], feedforward_modules=['down_proj'], task_type='CAUSAL_LM'))",
        texts(),
        losses.causal,
        (D, T),
    ),
    "ECAPA-TDNN": Model(
        "speechbrain",
        "speechbrain.lobes.models.ECAPA_TDNN:ECAPA_TDNN(20, lin_neurons=16, channels=[32, 32, 32, 32, 64], "
        "attention_channels=16, se_channels=16, res2net_scale=4)",
        labelled(40, 20, classes=16),
        losses.speaker,
        (D, S, T),
    ),
    "CRDNN": Model(
        "speechbrain",
        "speechbrain.lobes.models.CRDNN:CRDNN(input_shape=(None, 24, 20), cnn_blocks=1, cnn_channels=(8,), rnn_layers=1, "
        "rnn_neurons=16, dnn_blocks=1, dnn_neurons=10, time_pooling=False, inter_layer_pooling_size=(2,), dropout=0.)",
        spoken(24, 20),
        losses.ctc,
        (S, T, DT),
    ),
    "CRDNN with dropout": Model(
        "speechbrain",
        "speechbrain.lobes.models.CRDNN:CRDNN(input_shape=(None, 24, 20), cnn_blocks=1, cnn_channels=(8,), rnn_layers=1, "
        "rnn_neurons=16, dnn_blocks=1, dnn_neurons=10, time_pooling=False, inter_layer_pooling_size=(2,))",
        spoken(24, 20),
        losses.ctc,
        (S, T, DT),
        apart="its masks are drawn in the constructor, and a sample takes that of its place in the rank's batch",
    ),
    "ConvTasNet": Model(
        "speechbrain",
        "foreign_builders:ConvTasNet()",
        waves(),
        losses.si_snr,
        (S, T),
    ),
    "Conformer CTC": Model(
        "conformer",
        "foreign_builders:ConformerCTC()",
        spoken(24, 20),
        losses.ctc,
        (S, T, DT),
    ),
    "GCN": Model(
        "torch-geometric",
        "foreign_builders:GraphModel('GCN')",
        graphs,
        losses.graph_energy,
        (D, S, T),
        joined,
    ),
    "GCN with dropout": Model(
        "torch-geometric",
        "foreign_builders:GraphModel('GCN', dropout=0.1)",
        graphs,
        losses.graph_energy,
        (D, S),
        joined,
        "one device draws for all atoms of a batch, which are no samples: a rank cannot draw its share of them",
    ),
    "GAT": Model(
        "torch-geometric",
        "foreign_builders:GraphModel('GAT', heads=4)",
        graphs,
        losses.graph_energy,
        (S, T, DT),
        joined,
    ),
    "GAT with dropout": Model(
        "torch-geometric",
        "foreign_builders:GraphModel('GAT', heads=4, dropout=0.1)",
        graphs,
        losses.graph_energy,
        (S, DT),
        joined,
        "as above, for edges",
    ),
    "SchNet": Model(
        "torch-geometric",
        "torch_geometric.nn:SchNet(hidden_channels=32, num_filters=32, num_interactions=2, num_gaussians=16, cutoff=4., "
        "interaction_graph=within)",
        graphs,
        losses.molecule_energy,
        (S, T),
        joined,
    ),
    "Neural spline flow": Model(
        "zuko",
        "zuko.flows:NSF(4, 3, transforms=2, hidden_features=(32, 32))",
        lambda: {"x": _floats(4), "y": _floats(3, seed=2)},
        lambda model, batch: -model(batch["y"]).log_prob(batch["x"]).mean(),
        (S, T, DT),
    ),
    "RealNVP": Model(
        "nflows",
        "foreign_builders:real_nvp()",
        images(4),
        lambda model, batch: -model.log_prob(batch["x"]).mean(),
        (S, T),
    ),
    "CLIP": Model(
        "open-clip-torch",
        "open_clip:CLIP(32, {'image_size': 32, 'patch_size': 8, 'width': 32, 'head_width': 8, 'layers': 2}, "
        f"{{'context_length': {LENGTH}, 'vocab_size': {WORDS}, 'width': 32, 'heads': 4, 'layers': 2}})",
        captioned(3, 32, 32),
        losses.contrastive,
        (D, T),
    ),
    "GaussianDiffusion": Model(
        "denoising-diffusion-pytorch",
        "denoising_diffusion_pytorch:GaussianDiffusion(Unet(16, dim_mults=(1, 2), flash_attn=False), image_size=16, "
        "timesteps=20)",
        lambda: {"x": torch.sigmoid(_floats(3, 16, 16))},
        lambda model, batch: model(batch["x"]),
        (D, S, T),
    ),
    "FSQ autoencoder": Model(
        "vector-quantize-pytorch",
        "foreign_builders:quantized('FSQ')",
        images(3, 16, 16),
        losses.rebuilt,
        (S, T, DT),
    ),
    "VQ-VAE": Model(
        "vector-quantize-pytorch",
        "foreign_builders:quantized('VectorQuantize')",
        images(3, 16, 16),
        losses.rebuilt,
        (D,),
    ),
    "VQ-VAE, no sum over ranks": Model(
        "vector-quantize-pytorch",
        "foreign_builders:quantized('VectorQuantize', sync_codebook=False)",
        images(3, 16, 16),
        losses.rebuilt,
        (T,),
    ),
    "VQ-VAE, its own sum over ranks": Model(
        "vector-quantize-pytorch",
        "foreign_builders:quantized('VectorQuantize')",
        images(3, 16, 16),
        losses.rebuilt,
        (T,),
        apart="as soon as there are ranks the package adds its codebook up over all of them, which under tensor have "
        "the same samples",
    ),
    "Perceiver": Model(
        "perceiver-pytorch",
        "perceiver_pytorch:Perceiver(input_channels=3, input_axis=2, num_freq_bands=4, max_freq=8., depth=2, "
        "num_latents=8, latent_dim=32, cross_heads=1, latent_heads=4, cross_dim_head=8, latent_dim_head=8, num_classes=5)",
        labelled(8, 8, 3),
        losses.classified,
        (S, T, DT),
    ),
    "DeepFM": Model(
        "deepctr-torch",
        "foreign_builders:click_model('DeepFM')",
        clicks,
        losses.clicked,
        (D, S, T),
    ),
    "xDeepFM": Model(
        "deepctr-torch",
        "foreign_builders:click_model('xDeepFM')",
        clicks,
        losses.clicked,
        (S, T, DT),
    ),
    "AutoInt": Model(
        "deepctr-torch",
        "foreign_builders:click_model('AutoInt')",
        clicks,
        losses.clicked,
        (T, DT),
    ),
    "Neural ODE": Model(
        "torchdiffeq",
        "foreign_builders:NeuralODE()",
        labelled(8),
        losses.classified,
        (D, S, T),
    ),
    "Triplet": Model(
        "pytorch-metric-learning",
        "torch.nn:Sequential(Linear(8, 32), ReLU(), Linear(32, 16))",
        labelled(8),
        losses.triplets,
        (D,),
    ),
    "FNO": Model(
        "neuraloperator",
        "neuralop.models:FNO((4, 4), 1, 1, 16, n_layers=2)",
        lambda: {"x": _floats(1, 16, 16), "y": _floats(1, 16, 16, seed=2)},
        losses.operator,
        (D, S, T),
    ),
    "TabTransformer": Model(
        "tab-transformer-pytorch",
        "tab_transformer_pytorch:TabTransformer(categories=(10,) * 4, num_continuous=6, dim=32, dim_out=1, depth=2, "
        "heads=4, dim_head=8, mlp_act=nn.ReLU())",
        rows,
        losses.tabular,
        (S, T, DT),
    ),
    "FT-Transformer": Model(
        "rtdl-revisiting-models",
        "rtdl_revisiting_models:FTTransformer(n_cont_features=6, cat_cardinalities=[10] * 4, d_out=1, n_blocks=2, "
        "d_block=32, attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.)",
        rows,
        losses.tabular_numbers_first,
        (S, T, DT),
    ),
    "TabNet": Model(
        "pytorch-tabnet",
        "pytorch_tabnet.tab_network:TabNetNoEmbeddings(6, 2, n_d=8, n_a=8)",
        lambda: {"x": _floats(6), "y": _whole(2)},
        losses.tabnet,
        (D, T),
    ),
    "TabNet, chunks of 4": Model(
        "pytorch-tabnet",
        "pytorch_tabnet.tab_network:TabNetNoEmbeddings(6, 2, n_d=8, n_a=8, virtual_batch_size=4)",
        lambda: {"x": _floats(6), "y": _whole(2)},
        losses.tabnet,
        (D,),
        apart="batch norms of chunks: which samples lie in one depends on how the batch is divided",
    ),
    "NeRF": Model(
        "siren-pytorch",
        "siren_pytorch:SirenNet(dim_in=3, dim_hidden=32, dim_out=4, num_layers=3, final_activation=nn.Identity())",
        rays,
        losses.rendered,
        (S, T, DT),
    ),
    "PPO": Model(
        "stable-baselines3",
        "foreign_builders:actor_critic()",
        played,
        losses.ppo,
        (D, S, T),
    ),
    "EGNN": Model(
        "egnn-pytorch",
        "egnn_pytorch:EGNN_Network(num_tokens=10, dim=16, depth=2, num_positions=8, num_nearest_neighbors=4)",
        lambda: {"kinds": _whole(10, 8), "place": _floats(8, 3)},
        losses.moved,
        (S, T),
    ),
    "Spiking": Model(
        "snntorch",
        "foreign_builders:Spiking()",
        labelled(8),
        losses.classified,
        (S, T),
    ),
    "Liquid CfC": Model(
        "ncps",
        "foreign_builders:Liquid()",
        lambda: {"x": _floats(10, 6), "y": _whole(CLASSES)},
        losses.classified,
        (D, T),
    ),
    "Performer": Model(
        "performer-pytorch",
        f"performer_pytorch:PerformerLM(num_tokens={WORDS}, max_seq_len={LENGTH}, dim=32, depth=2, heads=4, dim_head=8, "
        "causal=False, feature_redraw_interval=None)",
        texts(),
        losses.hidden_token,
        (S, T),
    ),
    "Mamba": Model(
        "mambapy",
        "mambapy.mamba:nn.Sequential(nn.Embedding(64, 32), Mamba(MambaConfig(d_model=32, n_layers=2)), nn.Linear(32, 64))",
        texts(),
        losses.next_token,
        (S, T, DT),
    ),
    "Soft MoE": Model(
        "soft-moe-pytorch",
        "foreign_builders:SoftMixture(is_distributed=False)",
        lambda: {"x": _floats(12, 32), "y": _whole(CLASSES)},
        losses.classified,
        (S, T),
    ),
    "Soft MoE, exchanging by itself": Model(
        "soft-moe-pytorch",
        "foreign_builders:SoftMixture()",
        lambda: {"x": _floats(12, 32), "y": _whole(CLASSES)},
        losses.classified,
        (S, T),
        apart="as soon as there are ranks the package exchanges samples itself, and takes all ranks for its own",
    ),
    "BYOL": Model(
        "byol-pytorch",
        "foreign_builders:byol()",
        images(3, 32, 32),
        lambda model, batch: model(batch["x"]),
        (D, T),
    ),
    "Bayesian MLP": Model(
        "torchbnn",
        "foreign_builders:bayesian()",
        labelled(8),
        losses.classified,
        (D, T),
    ),
}
"""Name -> a model."""
