"""Tiny random models of published architectures, as jobs: what bench/breadth.py holds against one device.

Architectures are those that the installed transformers lists for a task; timm's and torchvision's are named here. A
configuration is the default one with every size made small, by the name of its field (`SIZES`); what a family needs
beside that is in `FAMILIES`. Dropout and whatever else the family draws stay as published, but for two: the masks of
time that speech models draw from numpy's generator, and the dropout inside Switch's and NLLB's experts, whose shape
follows from the routing, are off: such draws cannot be keyed, and a check says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn, optim

from meshwise.training.job.job import Job

SAMPLES, BATCH, LENGTH, WORDS, CLASSES = 24, 8, 12, 128, 5
IMAGE, LARGEST = 32, 2_000_000
MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
}
"""Task -> where transformers lists its architectures."""
FIRST = ("llama", "gpt2", "bert", "qwen3", "mistral", "t5", "vit", "mixtral", "gemma2", "phi3", "roberta", "wav2vec2")
FIRST += ("opt", "bloom", "falcon", "gpt_neox", "bart", "distilbert", "deberta-v2", "resnet", "swin", "convnext")
FIRST += (
    "whisper",
    "qwen2",
    "gemma3_text",
    "olmo2",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_moe",
    "mamba",
    "albert",
    "electra",
)
"""Families that most readers look for."""

WIDTHS = "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim attention_hidden_size lru_width "
WIDTHS += "embed_dim decoder_hidden_size encoder_hidden_size rotary_emb_base_dim hidden_dim_ embedding_dim"
HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
HEADS += "num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads index_n_heads "
HEADS += "linear_num_heads swa_num_attention_heads num_query_groups_"
LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_blocks "
LAYERS += "num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers"
INNER = "intermediate_size ffn_dim ffn_hidden_size d_ff dff n_inner encoder_ffn_dim decoder_ffn_dim d_inner "
INNER += "hidden_dim shared_intermediate_size dense_intermediate_size feed_forward_size intermediate_size_mlp dim_ff"
EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts"
EIGHT = "head_dim d_kv d_head v_head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim "
EIGHT += "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size swa_head_dim kv_channels attention_head_size "
EIGHT += "attention_head_dim linear_head_dim mamba_headdim dim_head"
POSITIONS = "max_position_embeddings n_positions max_seq_len n_ctx max_encoder_position_embeddings "
POSITIONS += "max_decoder_position_embeddings max_source_positions max_target_positions context_length model_max_length"
SIZES: dict[str, Any] = (
    dict.fromkeys(WIDTHS.split(), 32)
    | dict.fromkeys(HEADS.split(), 4)
    | dict.fromkeys(LAYERS.split(), 2)
    | dict.fromkeys(INNER.split(), 64)
    | dict.fromkeys(EXPERTS.split(), 4)
    | dict.fromkeys(EIGHT.split(), 8)
    | dict.fromkeys(POSITIONS.split(), 64)
    | dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0)  # stages need every layer
    | dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"], 2)
    | dict.fromkeys(["num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "swa_num_key_value_heads"], 2)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32)
    | dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank"], 16)
    | dict.fromkeys(["n_group", "topk_group", "mamba_n_groups", "n_groups", "num_expert_group", "mamba_ngroups"], 1)
    | dict.fromkeys(["sliding_window", "window_size", "chunk_size", "mamba_chunk_size", "attention_chunk_size"], 4)
    | dict.fromkeys(["pad_token_id", "decoder_start_token_id"], 0)
    | {"vocab_size": WORDS, "n_words": WORDS, "bos_token_id": 1, "eos_token_id": 2, "state_size": 8, "rotary_dim": 4}
    | {"image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES, "first_k_dense_replace": 1, "expert_capacity": 256}
    | {"num_mel_bins": 16, "index_head_dim": 16, "index_topk": 4, "projection_dim": 32, "time_step_rank": 4}
    | {
        "shared_experts_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
        "mamba_n_heads": 8,
    }
    | {"mamba_d_ssm": 64}
    | {"query_pre_attn_scalar": 8, "mamba_dt_rank": 4, "qk_head_dim": 16, "cls_token_id": 1, "sep_token_id": 2}
    | {"num_dense_layers": 1, "max_window_layers": 1, "local_attention": 4, "local_radius": 4, "adapter_rank": 4}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS, "mask_token_id": 4, "type_vocab_size": 2}
)
"""Field -> its size. Fields that a configuration lacks, or has as None or a list, are left."""
WAVE = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8}
WAVE |= {"num_conv_pos_embedding_groups": 4, "mask_time_length": 2, "num_feat_extract_layers": 2}
WAVE |= {
    "classifier_proj_size": 16,
    "squeeze_factor": 1,
    "ctc_loss_reduction": "mean",
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}
STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
SWIN = {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
AXIAL = {"axial_pos_shape": (4, 3), "axial_pos_embds_dim": (16, 16), "local_attn_chunk_length": 4, "num_buckets": 2}
AXIAL |= {"lsh_attn_chunk_length": 4, "attn_layers": ["local", "lsh"], "hash_seed": 1, "max_position_embeddings": 12}
MAMBA = {"expand": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d"), WAVE),
    **{kind: WAVE | {"vocab_size": WORDS} for kind in ("data2vec-audio", "wav2vec2-conformer")},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SWIN),
    "convnext": STAGES | {"num_stages": 2},
    "convnextv2": STAGES | {"num_stages": 2},
    "resnet": STAGES | {"embedding_size": 16, "layer_type": "basic"},
    "regnet": STAGES | {"embedding_size": 16, "groups_width": 8},
    "bit": STAGES | {"embedding_size": 16, "num_groups": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "patch_size": 2},
    "poolformer": FOUR,
    "pvt": FOUR | {"num_attention_heads": [1, 2, 2, 4]},
    "pvt_v2": FOUR | {"num_attention_heads": [1, 2, 2, 4]},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25, "base_attn_unit_dims": [32, 48, 64]},
    "textnet": {"hidden_sizes": [8, 8, 16, 16, 16]},
    "cvt": {
        "drop_path_rate": [0.0, 0.0, 0.1],
        "patch_sizes": [7, 3, 3],
        "mlp_ratio": [2.0, 2.0, 2.0],
        "embed_dim": [8, 16, 32],
        "num_heads": [1, 2, 4],
        "depth": [1, 1, 1],
    },
    "focalnet": SWIN | {"focal_levels": [1, 1], "focal_windows": [3, 3], "hidden_sizes": [16, 32]},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "patch_stride": [4, 4], "num_query_pool": 1}
    | {
        "mlp_ratio": 2.0,
        "query_stride": [2, 2],
        "masked_unit_size": [4, 4],
        "patch_size": [7, 7],
        "image_size": [32, 32],
    },
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]},
    "levit": {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1]}
    | {
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    },
    "segformer": {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
    | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    "reformer": AXIAL,
    "mamba2": MAMBA,
    "mpt": {"expansion_ratio": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 4},
    "squeezebert": {"q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 2, "output_groups": 2},
    "convbert": {"head_ratio": 2},
    "yoso": {"use_expectation": True},
    "longformer": {"attention_window": [4, 4]},
    "led": {"attention_window": 4},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2}
    | {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32}
    | {"max_position_embeddings": LENGTH},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "xlstm": {"chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native"}
    | {"step_kernel": "native", "mode": "train"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"use_mamba_kernels": False},
    "zamba": {"use_mamba_kernels": False, "num_hidden_layers": 4, "n_mamba_heads": 2, "attn_layer_offset": 1}
    | {"attn_layer_period": 2, "layer_types": ["mamba", "hybrid"] * 2, "attention_head_dim": 16},
    "zamba2": {"use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8}
    | {"num_mem_blocks": 1, "attention_head_dim": 16, "attention_hidden_size": 64},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1, "attention_window_size": 8},
    "whisper": {"max_source_positions": 30, "max_target_positions": 32},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "videomae": {"num_frames": 4, "tubelet_size": 2},
    "timesformer": {"num_frames": 2},
    "imagegpt": {"vocab_size": WORDS + 1},
    "audio-spectrogram-transformer": {"frequency_stride": 8, "time_stride": 8, "max_length": 32},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "dropout": 0.0, "activation_dropout": 0.0}
    | {"attention_dropout": 0.0, "moe_token_dropout": 0.0, "router_jitter_noise": 0.0},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0}
    | {"router_jitter_noise": 0.0},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "hrm_text": {"num_layers_per_stack": 1, "use_cache": False},
    **{kind: {"head_dim": 8} for kind in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    **{kind: {"num_kv_shared_layers": 0} for kind in ("gemma3n", "gemma3n_text", "gemma4_unified_assistant")},
    "bamba": {"attn_layer_indices": [1]},
    "fsmt": {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS, "langs": ["de", "en"]},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "wav2vec2-bert": WAVE | {"feature_projection_input_dim": 16, "vocab_size": WORDS, "conv_depthwise_kernel_size": 3},
    "hgnet_v2": {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4}
    | {"stage_out_channels": [16, 16, 16, 32], "stage_num_blocks": [1] * 4, "hidden_sizes": [16, 16, 16, 32]}
    | {"depths": [1] * 4, "embedding_size": 8},
    "seamless_m4t": {"feature_projection_input_dim": 16, "t2u_vocab_size": WORDS, "unit_hifi_gan_vocab_size": WORDS},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "esm": {"vocab_size": WORDS, "mask_token_id": 4, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 8}
    | {"shape_embed_dim": 8},
    **{kind: {"use_cache": False} for kind in ("granitemoehybrid", "nemotron_h")},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}
"""Model type -> fields of its configuration beside `SIZES`."""
WITHOUT_MASK = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "fnet", "imagegpt", "xlnet"}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types", "hybrid_layer_ids")


@cache
def architectures() -> dict[str, tuple[str, str, str]]:
    """Name -> (task, model type, class), each class once: families that most look for first, then the tasks in turn."""
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, tuple[str, str, str]] = {}
    for task, mapping in MAPPINGS.items():
        for kind, classes in getattr(modeling_auto, mapping).items():
            if kind in NOT_TEXT:
                continue
            names = [classes] if isinstance(classes, str) else classes
            for name in (name for name in names if not name.endswith("WithTeacher")):
                found.setdefault(name, (task, kind, name))
    for name in TIMM:
        found[f"timm.{name}"] = ("timm", name, name)
    for name in TORCHVISION:
        found[f"torchvision.{name}"] = ("torchvision", name, name)
    first = {name: entry for name, entry in found.items() if entry[1] in FIRST}
    ranked = sorted(first, key=lambda name: FIRST.index(first[name][1]))
    by_task: dict[str, list[str]] = {}
    for name, (task, _, _) in found.items():
        by_task.setdefault(task, []).append(name)
    in_turn = (name for names in zip_longest(*by_task.values()) for name in names if name is not None)
    return {name: found[name] for name in [*ranked, *in_turn]}


def config_of(configs: Any, kind: str = "", **more: Any) -> Any:
    """The configuration of a class of them with every size made small. kind: the model type, of `FAMILIES`."""
    base = configs()
    kw = {name: value for name, value in SIZES.items() if _is_size(configs, base, name)}
    for name in LISTS:
        kinds = list(dict.fromkeys(_given(base, name) or ()))
        if kinds and isinstance(kinds[0], str) and _settable(configs, name):
            kw[name] = kinds
    layers = max([2, *(len(kw[name]) for name in LISTS if name in kw)])
    kw |= {name: (kw[name] * layers)[:layers] for name in LISTS if name in kw} | dict.fromkeys(
        [name for name in kw if name == "num_hidden_layers"], layers
    )
    if "kv_lora_rank" in kw:
        kw["num_key_value_heads"] = kw["num_attention_heads"]
    for name in getattr(configs, "sub_configs", {}):
        if (inner := _given(base, name)) is not None:
            kw[name] = config_of(type(inner), inner.model_type).to_dict()
    return configs(**kw | FAMILIES.get(kind, {}) | more)


def _settable(configs: Any, name: str) -> bool:
    name = getattr(configs, "attribute_map", {}).get(name, name)
    return not isinstance(getattr(configs, name, None), property)


def _given(base: Any, name: str) -> Any:
    """A field of a configuration; None where it has none, or one a layer."""
    try:
        return getattr(base, name, None)
    except Exception:  # transformers has an error of its own for it
        return None


def _is_size(configs: Any, base: Any, name: str) -> bool:
    """Whether the configuration has a number of this name that can be given."""
    old = _given(base, name)
    return isinstance(old, int | float) and not isinstance(old, bool) and _settable(configs, name)


def model_of(name: str) -> nn.Module:
    """A tiny model of the architecture, with random weights of the current generator."""
    task, kind, classes = architectures()[name]
    if task == "timm":
        given = TIMM[kind]
        if "." in kind:
            module, made = kind.split(".")
            return getattr(importlib.import_module(f"timm.models.{module}"), made)(num_classes=CLASSES, **given)  # type: ignore[no-any-return]
        return importlib.import_module("timm").create_model(kind, num_classes=CLASSES, **given)  # type: ignore[no-any-return]
    if task == "torchvision":
        return TORCHVISION[kind](importlib.import_module("torchvision.models"))
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, classes)
    more = {"decoder_start_token_id": 0, "pad_token_id": 0} if task in ("seq2seq", "speech") else {}
    if kind == "reformer":
        more = {"is_decoder": task == "causal"}
    if task in ("image", "audio", "video"):
        more = {"num_labels": CLASSES}
    config = config_of(made.config_class, kind, **more)
    with torch.device("meta"):
        if (size := sum(p.numel() for p in made._from_config(config).parameters())) > LARGEST:
            raise ValueError(f"{name} has {size:,} parameters with this configuration: name its sizes in FAMILIES")
    return made._from_config(config)  # type: ignore[no-any-return]


def job_of(name: str) -> Job:
    """The job: the model's own loss of random samples, AdamW; of batch norms SGD. They take constants away,
    whose gradient is zero but for rounding; Adam divides by its size, and running means of two sides part."""
    task, normed = architectures()[name][0], list[bool]()
    losses = {"image": _loss, "timm": _classified, "torchvision": _classified, "audio": _loss, "video": _loss}

    def model() -> nn.Module:
        made = model_of(name)
        normed[:] = [any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in made.modules())]
        return made

    return Job(
        name,
        model,
        losses.get(task, _loss if task == "ctc" else _tokens_loss),
        lambda parameters: optim.SGD(parameters, 0.01, 0.9) if normed[0] else optim.AdamW(parameters, lr=1e-3),
        lambda: data_of(name),
        batch_size=BATCH,
    )


def _tokens_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss, (batch["labels"] != -100).sum()


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss


def _classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    found = model(batch[0])
    return nn.functional.cross_entropy(found if isinstance(found, Tensor) else found[0], batch[1])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _text(length: int = LENGTH, seed: int = 0, masked: bool = False, with_mask: bool = True) -> dict[str, Tensor]:
    x = torch.randint(5, WORDS - 1, (SAMPLES, length), generator=_generator(seed))
    lengths = torch.randint(length // 2, length + 1, (SAMPLES, 1), generator=_generator(seed + 1))
    mask = (torch.arange(length) < lengths).long() if with_mask else torch.ones_like(x)
    y = x.masked_fill(mask == 0, -100)
    y[:, 0] = -100  # some shift the labels, some do not: either way the mean is over as many
    x = x.masked_fill(mask == 0, 0)
    if masked:
        hidden = (torch.arange(length) % 3 == 1) & (mask == 1)
        x, y = x.masked_fill(hidden, 4), y.masked_fill(~hidden, -100)
    return {"input_ids": x, "labels": y} | ({"attention_mask": mask} if with_mask else {})


def data_of(name: str) -> Any:
    """Random samples for it."""
    task, kind, classes = architectures()[name]
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=_generator(9))
    if task in ("timm", "torchvision"):
        return torch.randn(SAMPLES, 3, 64, 64, generator=_generator(3)), labels
    if task in ("causal", "masked", "seq2seq"):
        found = _text(masked=task == "masked", with_mask=kind not in WITHOUT_MASK)
        if task == "seq2seq":
            found["labels"] = _text(7, seed=5)["labels"]
        if kind == "perceiver":
            found["inputs"] = found.pop("input_ids")
        return found
    if task == "image":
        if kind == "imagegpt":
            return {"input_ids": _text(with_mask=False)["input_ids"], "labels": labels}
        size = 64 if kind in ("levit", "mobilevitv2") else IMAGE
        pixels = torch.randn(SAMPLES, 3, size, size, generator=_generator(3))
        return {"inputs" if kind == "perceiver" else "pixel_values": pixels, "labels": labels}
    if task == "video":
        frames = 2 if kind == "timesformer" else 4
        return {
            "pixel_values": torch.randn(SAMPLES, frames, 3, IMAGE, IMAGE, generator=_generator(3)),
            "labels": labels,
        }
    return _sound(task, kind, classes, labels)


def _sound(task: str, kind: str, classes: str, labels: Tensor) -> dict[str, Tensor]:
    transformers = importlib.import_module("transformers")
    field = getattr(transformers, classes).main_input_name
    if "input_features" in inspect.signature(getattr(transformers, classes).forward).parameters:
        field = "input_features"
    if field == "input_features":
        shape = (SAMPLES, 16, 60) if kind == "whisper" else (SAMPLES, 60, 16)
        sound = torch.randn(shape, generator=_generator(2))
    elif kind == "audio-spectrogram-transformer":
        sound = torch.randn(SAMPLES, 32, 16, generator=_generator(2))
    else:
        sound = torch.randn(SAMPLES, 4000 if kind.startswith("moonshine") else 400, generator=_generator(2))
    if task != "audio":
        labels = _text(5, with_mask=False)["input_ids"]
    mask = {"attention_mask": torch.ones(sound.shape[:2]).long()} if kind in ("lasr_ctc", "parakeet_ctc") else {}
    return {field: sound, "labels": labels} | mask


VIT = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
NOT_TEXT = {
    "git",
    "got_ocr2",
    "phi4_multimodal",
    "musicgen",
    "musicgen_melody",
    "audioflamingo3",
    "glmasr",
    "qwen3_asr",
}
NOT_TEXT |= {
    "musicflamingo",
    "nemo_speechlm",
    "qwen2_audio",
    "vibevoice_asr",
    "vibevoice",
    "voxtral",
    "voxtral_realtime",
}
NOT_TEXT |= {"granite_speech", "granite_speech_plus", "encoder-decoder", "speech-encoder-decoder", "shieldgemma2"}
NOT_TEXT |= {
    "timm_wrapper",
    "siglip2",
    "pp_lcnet",
    "dinat",
    "blt",
    "videoprism_vision_model",
    "moss_transcribe_diarize",
    "dia",
    "kyutai_speech_to_text",
    "pop2piano",
    "fun_asr_nano",
}
"""Model types that need more than one kind of input, or wrap another library."""
TIMM: dict[str, dict[str, Any]] = {
    "test_vit": {"img_size": 64},
    "test_vit2": {"img_size": 64},
    "test_resnet": {},
    "test_convnext": {},
    "test_convnext2": {},
    "test_efficientnet": {},
    "test_efficientnet_gn": {},
    "test_efficientnet_ln": {},
    "test_efficientnet_evos": {},
    "test_byobnet": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_vit3": {"img_size": 64},
    "test_convnext3": {},
    "deit_tiny_patch16_224": VIT,
    "vit_tiny_patch16_224": VIT | {"drop_path_rate": 0.1},
    "eva02_tiny_patch14_224": VIT,
    "beit_base_patch16_224": VIT,
    "cait_xxs24_224": VIT,
    "xcit_nano_12_p16_224": VIT,
    "mlp_mixer.MlpMixer": {"img_size": 64, "embed_dim": 32, "num_blocks": 2, "drop_path_rate": 0.1},
    "convmixer.ConvMixer": {"dim": 32, "depth": 2},
    "metaformer.MetaFormer": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)},
    "resnet10t": {"channels": (16, 16, 32, 32)},
    "mobilenetv3_small_050": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 1, 1, 1)}
    | {"num_heads": (1, 2, 4, 8)},
}
"""Models of timm, and what makes them tiny."""
TORCHVISION: dict[str, Callable[[Any], nn.Module]] = {
    "resnet": lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
    "resnext": lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=8, width_per_group=4),
    "vit": lambda m: m.VisionTransformer(64, 16, 2, 4, 32, 64, dropout=0.1, num_classes=CLASSES),
    "swin": lambda m: m.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=CLASSES),
    "swin_v2": lambda m: m.SwinTransformer(
        [4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=CLASSES, block=m.swin_transformer.SwinTransformerBlockV2
    ),
    "convnext": lambda m: m.ConvNeXt(
        [m.convnext.CNBlockConfig(16, 32, 1), m.convnext.CNBlockConfig(32, None, 1)], 0.1, num_classes=CLASSES
    ),
    "densenet": lambda m: m.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES),
    "squeezenet": lambda m: m.squeezenet1_1(num_classes=CLASSES),
    "shufflenet": lambda m: m.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 128], num_classes=CLASSES),
    "mobilenet_v2": lambda m: m.MobileNetV2(CLASSES, 0.25),
    "mobilenet_v3": lambda m: m.mobilenet_v3_small(num_classes=CLASSES, reduced_tail=True),
    "mnasnet": lambda m: m.MNASNet(0.25, CLASSES),
    "maxvit": lambda m: m.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=CLASSES),
    "regnet": lambda m: m.RegNet(m.regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2]), CLASSES),
}
"""Models of torchvision, made tiny."""
