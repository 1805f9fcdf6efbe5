"""How an architecture will sample and train, from its configuration alone: a small random model of it is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from podium.models.builtin import quiet_transformers
from podium.models.forward import AttentionPath, choose_method
from podium.models.stored import auto_class, made_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED = frozenset(
    """
    apertus bamba bloom deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma2 gemma3 gemma3_text gemma3n_text gemma4 glm4
    glm4_moe gpt_oss granitemoehybrid hunyuan_v1_dense jamba kimi_linear lfm2 lfm2_moe llama llama4 llama4_text mamba
    mamba2 minimax_m2 ministral ministral3 mistral mistral3 nemotron_h olmo2 olmo3 olmo_hybrid phi3 qwen2 qwen2_5_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_text qwen3_moe qwen3_next qwen3_vl recurrent_gemma smollm3 smolvlm zamba2
    """.split()  # noqa: SIM905  a list of quoted names would be four times as long
)
"""Model types of docs/scale.md, which need no trial to be known."""

MOST_PARAMETERS = 200_000_000
"""Largest number of parameters of a model that is tried: a gigabyte, and about two seconds on two cores."""
PLAIN_LAYERS = 2
"""Layers of a small model whose configuration does not list kinds of layers."""
VOCABULARY = 512


class Trial(NamedTuple):
    """The result of a trial."""

    path: AttentionPath
    why_not: str
    """Why prefixes are not shared; empty where they are."""
    num_layers: int


def try_architecture(config: PretrainedConfig) -> Trial | None:
    """The path that a small random model of this architecture takes; None where none could be built and run.

    Its first layers, few enough to hold each kind once, are kept; widths are reduced where the class allows it.
    """
    with quiet_transformers(), made_whole():
        for small in _smaller(config):
            try:
                model = _random(small)
                with torch.no_grad():
                    model(input_ids=torch.arange(8)[None], use_cache=False)
            except Exception:  # noqa: BLE001  classes refuse sizes in their own ways: the next form is tried
                continue
            method = choose_method(model)
            return Trial(method.path, method.not_shared, small.get_text_config().num_hidden_layers)
    return None


def _smaller(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Smaller configurations, the smallest first: narrower, then of the same width with fewer layers."""
    for narrow in (True, False):
        try:
            yield type(config).from_dict(_reduced(config.to_dict(), narrow=narrow))
        except Exception:  # noqa: BLE001  as above
            continue


def _random(config: PretrainedConfig) -> PreTrainedModel:
    """A model in float32 whose answers are uneven, so that a difference shows. Raises `ValueError` for a large one.

    The class is one of transformers' own: code that a checkpoint brings along is not run.
    """
    kind = auto_class(config)._model_mapping[type(config)]
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind(config).float()
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.85 * module.weight.shape[1] ** -0.5)
    return model.eval()


_WIDE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FEW: Mapping[str, int] = {
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "depth": 1},
}
"""Largest values of settings that do not decide how a layer attends."""


def _reduced(settings: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Settings, and those of the parts in them, with fewer layers, experts and tokens; `narrow`: fewer heads, too."""
    small: dict[str, Any] = {}
    layers = settings.get("num_hidden_layers") or settings.get("n_layer") or settings.get("num_layers") or 0
    lists = [value for value in settings.values() if isinstance(value, list) and len(value) == layers]
    num_layers = min(layers, max([PLAIN_LAYERS, *map(_to_see_all, lists)]))
    for key, value in settings.items():
        if isinstance(value, dict) and any(name in value for name in ("hidden_size", "n_embd", "depth")):
            small[key] = _reduced(value, narrow=narrow)
        elif isinstance(value, list) and len(value) == layers:
            small[key] = value[:num_layers]
        elif not isinstance(value, int) or isinstance(value, bool):
            small[key] = value
        elif key in ("num_hidden_layers", "n_layer", "num_layers"):
            small[key] = num_layers
        elif key.endswith(("token_id", "token_index")):
            small[key] = min(value, VOCABULARY - 1)
        elif key in _EXPERTS:
            small[key] = min(value, 4)
        else:
            small[key] = min(value, _FEW.get(key, 64 if narrow and key.endswith(_WIDE) else value))
    heads = settings.get("num_attention_heads")
    groups = settings.get("num_key_value_heads")
    if narrow and heads and settings.get("hidden_size"):
        share = max(groups or heads // 4, 1)  # groups of heads become one
        if heads % share == settings["hidden_size"] % share == 0:
            small |= {"num_attention_heads": heads // share, "hidden_size": settings["hidden_size"] // share}
            small |= {"num_key_value_heads": 1} if groups else {}
    return small


def _to_see_all(kinds: list[Any]) -> int:
    """Entries at the beginning of a list in which each of its values stands once."""
    names = [repr(kind) for kind in kinds]
    return max(map(names.index, set(names)), default=-1) + 1
