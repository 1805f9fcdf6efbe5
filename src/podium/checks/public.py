"""Public models and datasets that recipes of Podium name, for a check where the hub cannot be reached.

A name in here is right, whatever the connection: a finding tells that the hub was not asked, and the rest of the check
goes on. The configurations are those of the hub (config.json), as far as they decide sizes; the tokenizer is unknown,
so there are no findings about prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from podium.errors import Finding

_QWEN25: Mapping[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_window_layers")

_QWEN25_VL: Mapping[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151_655,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1_280,
        "intermediate_size": 3_420,
        "num_heads": 16,
        "out_hidden_size": 2_048,
        "patch_size": 14,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {**_QWEN25, **dict(zip(_SIZES, (896, 4_864, 24, 14, 28), strict=True))},
    "Qwen/Qwen2.5-1.5B-Instruct": {**_QWEN25, **dict(zip(_SIZES, (1_536, 8_960, 28, 12, 28), strict=True))},
    "Qwen/Qwen2.5-3B-Instruct": {**_QWEN25, **dict(zip(_SIZES, (2_048, 11_008, 36, 16, 36), strict=True))},
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        **_QWEN25_VL,
        "text_config": {
            **_QWEN25,
            **dict(zip(_SIZES, (2_048, 11_008, 36, 16, 70), strict=True)),
            "model_type": "qwen2_5_vl_text",
            "max_position_embeddings": 128_000,
        },
    },
}
"""Hub id and configuration. Sources: the models' config.json; the Qwen2.5 report, arXiv:2412.15115, table 1."""

DATASETS: Mapping[str, str] = {
    "openai/gsm8k": "7,473 rows to train on and 1,319 to test with",
    "lmms-lab/multimodal-open-r1-8k-verified": "problems with an image each",
}
"""Hub id, and contents."""

_NOT_HERE = "the recipe may be right, but training cannot start here"


def public_config(name: str) -> PretrainedConfig:
    """The configuration of a model in `MODELS`."""
    return AutoConfig.for_model(**MODELS[name])


def unasked_model(name: str) -> Finding:
    """The finding of a model of `MODELS` that is not here while the hub cannot be reached."""
    what = f"{name} is not on this machine and the hub cannot be reached: its tokenizer, its chat template and the "
    what += "length of the prompts were not checked; memory is estimated from the configuration that Podium knows"
    fix = f"with a connection, once: hf download {name}"
    return Finding(code="M023", severity="warning", what=what, why=_NOT_HERE, fix=fix)


def unasked_dataset(name: str) -> Finding:
    """The finding of a dataset of `DATASETS` that is not here while the hub cannot be reached."""
    what = f"{name} ({DATASETS[name]}) is not on this machine and the hub cannot be reached: its rows, and the "
    what += "rewards on them, were not checked"
    fix = "run `podium check` once with a connection: the rows stay on this machine"
    return Finding(code="D050", severity="warning", what=what, why=_NOT_HERE, fix=fix)
