"""Tiny checkpoints of many families of models, made from configurations without a network, in under a second each.

    FAMILIES["qwen3_vl"](Path("folder"))          a model with random weights, its tokenizer and chat template
    python -m benchmarks.families OUT [NAME ...]  write some, or all

A folder is what a hub repository would be: `config.json`, weights in bfloat16, the byte tokenizer of `podium.testing`.
Scales, caps, multipliers, divisors and biases are not neutral: a class that leaves one out, or another that is computed
as if it were there, gives other numbers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from podium.testing import SIZES, tiny_tokenizer

IMAGE_TOKENS = ("<image>", "<image_start>", "<image_end>", "<video>")
"""Tokens that stand for images and videos in the configurations of `WITH_IMAGES`; the tokenizer gets them, too."""

_OF_TILES = (
    *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
MORE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "gemma4": ("<|video|>",),
    "idefics3": _OF_TILES,
    "smolvlm": _OF_TILES,
}
"""Other tokens that a family's processor puts around images, or adds to a tokenizer without them."""

_HEAD = {**SIZES, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {**_HEAD, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA: Mapping[str, Any] = {
    **_HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA3 = {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8}
_GEMMA4 = {
    **{**_HEAD, **_SLIDING, "global_head_dim": 8, "num_kv_shared_layers": 0},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264},
}

TEXT_ONLY: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES,
    "mistral": {**_HEAD, "sliding_window": 8},
    "ministral": {**_HEAD, **_SLIDING},
    "ministral3": _HEAD,
    "qwen2": SIZES,
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_EXPERTS, "num_experts": 4},
    "qwen3_next": {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "gemma": _HEAD,
    "gemma2": {**_GEMMA3, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA3,
    "phi": SIZES,
    "phi3": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2},
    "gpt_neo": {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": SIZES,
    "gpt_oss": {**_HEAD, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "falcon": {**SIZES, "num_kv_heads": 2},
    "stablelm": SIZES,
    "starcoder2": SIZES,
    "cohere": SIZES,
    "cohere2": {**_HEAD, **_SLIDING},
    "granite": SIZES,
    "granitemoe": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **{**SIZES, **_MAMBA2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        "layer_types": ["mamba", "attention"],
    },
    "olmo2": SIZES,
    "olmo3": {**SIZES, **_SLIDING},
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {**SIZES, "no_rope_layers": [1, 0]},
    "lfm2": {**SIZES, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        **SIZES,
        **_EXPERTS,
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "mixtral": {**SIZES, "num_local_experts": 4},
    "deepseek_v2": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "deepseek_v3": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1},
    "minimax": {
        **{**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax_m2": {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": _HEAD,
    "ernie4_5_moe": {
        **_HEAD,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32},
    "exaone4": {**_HEAD, **_SLIDING},
    "seed_oss": _HEAD,
    "nemotron": SIZES,
    "nemotron_h": {
        **{**_HEAD, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
        "layers_block_type": ["mamba", "attention"],
    },
    "falcon_h1": {**_HEAD, **_MAMBA2, "mamba_d_ssm": 64},
    "bamba": {**SIZES, **_MAMBA2, "attn_layer_indices": [1]},
    "zamba2": {
        **{**SIZES, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8},
        **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_hidden_size": 64},
    },
    "jamba": {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 8,
    },
    "recurrent_gemma": {
        **_HEAD,
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "llama4_text": {
        **{**_HEAD, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1},
        **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    },
    "gemma3n_text": {
        **{**_HEAD, "num_hidden_layers": 4, "intermediate_size": [64] * 4, "num_kv_shared_layers": 2},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264, "altup_num_inputs": 2},
        **{"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 8},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": _GEMMA4,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **{**_ROUTED, **_LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "num_local_experts": 4},
        **{"linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    },
    "apertus": SIZES,
    "hyperclovax": _HEAD,
    "nanochat": _HEAD,
    "vaultgemma": {**_GEMMA3, "attn_logit_softcapping": 2.0},
    "cohere2_moe": {**_HEAD, **_SLIDING, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "xlstm": {"hidden_size": 128, "num_blocks": 2, "num_heads": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 4},
}
"""Configurations of checkpoints that hold a language model alone, by model type."""

_VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP = {**_VIT, "image_size": 16, "patch_size": 8}
_QWEN_VIT = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
_QWEN3_VIT = {**_QWEN_VIT, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}

WITH_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"text_config": _GEMMA3, "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {**_GEMMA4, "vocab_size_per_layer_input": 265, "use_bidirectional_attention": "vision"},
        "vision_config": {
            **{**_VIT, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 128},
            **{"patch_size": 4, "pooling_kernel_size": 2},
        },
        "audio_config": None,
    },
    "qwen2_vl": {
        "text_config": {**SIZES, "rope_parameters": {**_ROPE, "mrope_interleaved": False}},
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
    },
    "qwen2_5_vl": {
        "text_config": {**SIZES, "rope_parameters": {**_ROPE, "mrope_interleaved": False}},
        "vision_config": {**_QWEN_VIT, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {"text_config": {**_HEAD, "rope_parameters": _ROPE}, "vision_config": _QWEN3_VIT},
    "qwen3_vl_moe": {
        "text_config": {**_HEAD, **_EXPERTS, "num_experts": 4, "rope_parameters": _ROPE},
        "vision_config": _QWEN3_VIT,
    },
    "qwen3_5": {"text_config": {**_DELTA, "rope_parameters": _ROPE}, "vision_config": _QWEN3_VIT},
    "qwen3_5_moe": {
        "text_config": {
            **{**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
            "rope_parameters": _ROPE,
        },
        "vision_config": _QWEN3_VIT,
    },
    "mistral3": {
        "text_config": {**_HEAD, "model_type": "mistral"},
        "vision_config": {**_SIGLIP, "image_size": 32, "model_type": "pixtral", "head_dim": 8},
    },
    "llava": {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {
            **{**_SIGLIP, "num_hidden_layers": 2},  # of which it takes the last but one
            **{"model_type": "clip_vision_model", "projection_dim": 16},
        },
    },
    "llava_next": {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {
            **{**_SIGLIP, "num_hidden_layers": 2},  # of which it takes the last but one
            **{"model_type": "clip_vision_model", "projection_dim": 16},
        },
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    },
    "idefics3": {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "image_size": 32},
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "image_size": 32},
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": {**SIZES, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "image_size": [32, 32], "patch_size": [8, 8]},
    },
    "paligemma": {
        "text_config": {**_HEAD, "model_type": "gemma"},
        "vision_config": {**_SIGLIP, "projection_dim": 32, "vision_use_head": False},
        "projection_dim": 32,
    },
    "lfm2_vl": {
        "text_config": {**TEXT_ONLY["lfm2"], "model_type": "lfm2"},
        "vision_config": {**_VIT, "patch_size": 4, "num_patches": 16},
        "projector_hidden_size": 32,
    },
    "glm4v": {
        "text_config": {**_HEAD, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        "vision_config": {**_QWEN_VIT, "out_hidden_size": 32, "image_size": 16},
    },
    "llama4": {
        "text_config": TEXT_ONLY["llama4_text"],
        "vision_config": {**_SIGLIP, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
}
"""The same for checkpoints that hold an encoder of images beside the language model."""


def _over(composite: str, text: str, **settings: Any) -> Mapping[str, Any]:
    """The composite class's configuration with another language model."""
    text_config = {**TEXT_ONLY[text], "model_type": text}
    return {"model_type": composite, **WITH_IMAGES.get(composite, {}), "text_config": text_config, **settings}


_CLIP = {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP_MODEL = {**_SIGLIP, "model_type": "siglip_vision_model"}

OVER_OTHERS: Mapping[str, Mapping[str, Any]] = {
    **{f"llava_{text}": _over("llava", text) for text in ("granite", "cohere", "gemma2", "falcon_h1", "hyperclovax")},
    **{f"llava_next_{text}": _over("llava_next", text) for text in ("granite", "cohere2", "gemma3_text")},
    **{f"idefics3_{text}": _over("idefics3", text) for text in ("granite", "gemma2")},
    **{f"smolvlm_{text}": _over("smolvlm", text) for text in ("granite", "cohere2")},
    **{f"internvl_{text}": _over("internvl", text) for text in ("granite", "gemma2")},
    **{f"mistral3_{text}": _over("mistral3", text) for text in ("granite", "gemma2")},
    "paligemma_gemma2": _over("paligemma", "gemma2"),
    "lfm2_vl_granite": _over("lfm2_vl", "granite"),
    "vipllava_granite": _over("vipllava", "granite", vision_config=_CLIP, vision_feature_layers=[-1]),
    "llava_onevision_granite": _over("llava_onevision", "granite", vision_config=_SIGLIP_MODEL),
    "aya_vision": _over("aya_vision", "cohere2", vision_config=_SIGLIP_MODEL),
    "cohere2_vision": _over("cohere2_vision", "cohere2", vision_config=_SIGLIP_MODEL),
    "muse_glimmer": {"text_config": _HEAD, "vision_config": _VIT},
}
"""Composite classes over language models whose own class scales or caps its logits, which these may not do."""

_IDS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")


SCALED = (
    *("gemma2", "gemma3_text", "cohere", "cohere2", "granite", "granitemoe", "granitemoehybrid", "falcon_h1"),
    *("recurrent_gemma", "gemma3n_text", "gemma4_text", "hyperclovax", "nanochat", "vaultgemma", "cohere2_moe"),
    *("granitemoeshared", "xlstm", "gptj", "gemma3", "gemma4", *OVER_OTHERS),
)
"""Families that scale, cap or shift their logits, and composite classes over language models that do."""


def write_family(name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Save a family's tiny model, random from `seed`, with its tokenizer."""
    tokenizer = tokenizer_of(name)
    _made(name, tokenizer, dtype, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A family's tiny model in float32, with weights large enough that it answers unevenly.

    `overrides` go to the configuration of a family without images.
    """
    model = _made(name, tokenizer_of(name), torch.float32, seed, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.15)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.15)
        for parameter in [] if name in TEXT_ONLY else model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a projection that would leave nothing of images
                nn.init.normal_(parameter, std=0.15)
    return model.eval()


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer, with tokens for images where a family has them."""
    tokenizer = tiny_tokenizer()
    if name not in TEXT_ONLY:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [*IMAGE_TOKENS, *MORE_TOKENS.get(name, ())]},
            replace_extra_special_tokens=False,
        )
    return tokenizer


def _made(
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    dtype: torch.dtype,
    seed: int,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedModel:
    images = name not in TEXT_ONLY
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text = {"vocab_size": len(tokenizer), **ids}
    settings = {**{**TEXT_ONLY, **WITH_IMAGES, **OVER_OTHERS}[name], **overrides}
    kind = settings.pop("model_type", name)
    if images:
        special = dict(zip(_IDS, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
        special["image_token_index"] = special["image_token_id"]
        config = AutoConfig.for_model(
            kind, **{**settings, **special, "text_config": {**text, **settings["text_config"]}}
        )
    else:
        config = AutoConfig.for_model(kind, **{**text, **settings})
    _set_scales(config, given=overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config(config, dtype=dtype)


SCALES = {
    r"lm_head_multiplier|logit_scale": 0.3,
    r"(?<!ffn_dim_)multiplier": 0.6,
    r"logits_scaling": 1.7,
    r"routed_scaling_factor|(alpha|beta)_factor": 0.8,
    r"final_logit_softcapping|logits_soft_cap|output_logit_soft_cap": 3.0,
}
"""Values that are not neutral, by the end of a setting's name. Factors of positions and of sizes are left alone."""


def _set_scales(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """Set what `SCALES` names in a configuration and in its parts, but for what is `given`."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _set_scales(value, given)
        for pattern, scale in SCALES.items():
            if name in given or not re.search(f"({pattern})s?$", name):
                continue
            setattr(config, name, [scale] * len(value) if isinstance(value, list) else scale)
            break


FAMILIES: Mapping[str, Callable[[Path], None]] = {
    name: partial(write_family, name) for name in (*TEXT_ONLY, *WITH_IMAGES, *OVER_OTHERS)
}
"""What writes a family's checkpoint into a folder, by model type."""


if __name__ == "__main__":
    for chosen in sys.argv[2:] or FAMILIES:
        FAMILIES[chosen](Path(sys.argv[1]) / chosen)
