"""Tiny random models of the architectures that people train, by the names of transformers' configurations.

`tiny("qwen3_next")` has two or four layers of 32 units. Windows and chunks are 8 tokens, so that they hide something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from podium.testing import tiny_tokenizer

_BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_FOUR = {**_BASE, "num_hidden_layers": 4}
_EXPERTS = {
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1},
}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": _BASE,
    "llama4_text": {
        **_FOUR,
        **{"num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
        **{"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    },
    "mistral": {**_BASE, "sliding_window": 8},
    "ministral": {**_BASE, **_WINDOWS},
    "ministral3": _BASE,
    "qwen2": _BASE,
    "qwen3": _BASE,
    "qwen3_moe": {**_BASE, **_EXPERTS},
    "qwen3_next": {**_FOUR, **_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_FOUR, **_DELTA},
    "qwen3_5_moe_text": {**_FOUR, **_DELTA, **_EXPERTS},
    "gemma2": {**_BASE, **_WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_BASE, **_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **_FOUR,
        **{"intermediate_size": [64] * 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
        **{"vocab_size_per_layer_input": 260, "altup_num_inputs": 2, "laurel_rank": 8, "sliding_window": 8},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_text": {
        **_FOUR,
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 2},
        **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 8},
    },
    "phi3": {**_BASE, "sliding_window": 8},
    "gpt_oss": {**_BASE, **_WINDOWS, **_EXPERTS},
    "glm4": _BASE,
    "glm4_moe": {**_BASE, **_EXPERTS, "first_k_dense_replace": 1},
    "deepseek_v3": {**_BASE, **_EXPERTS, **_LATENT, "first_k_dense_replace": 1, "head_dim": 4},
    "olmo2": _BASE,
    "olmo3": {**_BASE, **_WINDOWS},
    "olmo_hybrid": {**_FOUR, **_DELTA},
    "smollm3": _BASE,
    "lfm2": {
        **_FOUR,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        **_FOUR,
        **_MAMBA,
        **_EXPERTS,
        **{"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2},
    },
    "nemotron_h": {
        **_FOUR,
        **{"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
        **{"n_groups": 1, "conv_kernel": 4, "expand": 2, "chunk_size": 16},
    },
    "falcon_h1": {**_BASE, **_MAMBA, "mamba_d_ssm": 64},
    "kimi_linear": {
        **_FOUR,
        **_EXPERTS,
        **_LATENT,
        **{"linear_num_heads": 4, "linear_conv_kernel_dim": 4, "q_lora_rank": None},
        **{"layer_types": ["linear_attention", "full_attention"] * 2},
    },
    "minimax_m2": {**_BASE, **_EXPERTS},
    "exaone4": {**_BASE, **_WINDOWS},
    "hunyuan_v1_dense": _BASE,
    "ernie4_5": _BASE,
    "apertus": _BASE,
    "bamba": {**_BASE, **_MAMBA, "attn_layer_indices": [1]},
    "lfm2_moe": {
        **_FOUR,
        **_EXPERTS,
        **{"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    },
    "zamba2": {
        **_FOUR,
        **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_headdim": 8},
        **{"chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    },
    "jamba": {
        **_FOUR,
        **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2},
    },
}
"""Settings of each language model."""

VISION: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "text_config": {**ARCHITECTURES["gemma3_text"], "model_type": "gemma3_text"},
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        },
        **{"mm_tokens_per_image": 4, "image_token_index": 259, "boi_token_index": 257, "eoi_token_index": 258},
    },
    "qwen3_5": {
        "text_config": {**ARCHITECTURES["qwen3_5_text"], "model_type": "qwen3_5_text"},
        "vision_config": {
            **{"model_type": "qwen3_5", "hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2},
            **{"out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4},
        },
    },
    "qwen3_vl": {
        "text_config": {
            **_BASE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
            **{"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0]},
        },
    },
    "mistral3": {
        "text_config": {**_BASE, "model_type": "mistral"},
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        },
    },
}
"""Settings of checkpoints that hold an encoder of images as well."""


def tiny(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random model in float32, with weights that make it answer unevenly."""
    tokenizer = tiny_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    of_text = {"vocab_size": len(tokenizer), **ids}
    if name in VISION:
        settings = {**VISION[name], **overrides, "text_config": {**VISION[name]["text_config"], **of_text}}
        kind: Any = AutoModelForImageTextToText
    else:
        settings, kind = {**of_text, **ARCHITECTURES[name], **overrides}, AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(AutoConfig.for_model(name, **settings), dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.15)
    return model.eval()
