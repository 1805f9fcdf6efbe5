"""Tiny models and a tiny tokenizer, made in memory without a network: for our tests and for users' tests.

    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen3")

Both are the same on every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of the tiny tokenizer: `<|im_start|>role`, a newline, the content, `<|im_end|>`."""

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # The usual 0.02 makes a model this narrow answer almost uniformly, which would hide mistakes in attention.
    "initializer_range": 0.2,
}
"""Of the models, in the words of a transformers configuration."""
_GEMMA: Mapping[str, Any] = {
    **SIZES,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"},
    "mistral": {**SIZES, "model_type": "mistral", "head_dim": 8, "sliding_window": 8},
    "qwen2": {**SIZES, "model_type": "qwen2"},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 8},
    "gemma2": {**_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 2.0},
    "gemma3": {**_GEMMA, "model_type": "gemma3_text"},
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
        "initializer_range": 0.2,
    },
}

KINDS = tuple(_KINDS)
"""Arguments of `tiny_model`. Windows are 8 tokens and soft caps low, so that they affect even short texts."""


def tiny_tokenizer(*, chat_template: str | None = CHATML, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per UTF-8 byte, four special tokens, `<|im_end|>` as the end of a turn.

    `chat_template=None` makes a base model's tokenizer. `pad_is_eos` shares one id between padding and end, as many
    real tokenizers do.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.decode(tokenizer("2+2=4")["input_ids"])
    '2+2=4'
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_tokenizer_json()),
        pad_token="<|im_end|>" if pad_is_eos else "<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@cache
def _byte_tokenizer_json() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer.to_str()


def tiny_model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A two-layer causal model of 32 units, on the CPU, in float32, random from `seed` alone.

    `kind` is one of `KINDS`; `overrides` go to its configuration. The vocabulary is that of `tiny_tokenizer()`.

    >>> tiny_model("llama", num_hidden_layers=1).config.num_hidden_layers
    1
    """
    tokenizer = tiny_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    settings = {"vocab_size": len(tokenizer), **ids, **_KINDS[kind], **overrides}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def save_tiny_model(folder: str | Path, kind: str = "llama", *, seed: int = 0, **overrides: Any) -> str:
    """Write a tiny model and its tokenizer in the Hugging Face layout; the folder, as a model's name."""
    tiny_model(kind, seed=seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
