"""Reward models before their weights are loaded: whether they are there, have one score, and can read the prompts.

check_reward_models(rewards, prompts=[row["prompt"] for row in rows], max_completion_length=256)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from podium.errors import ModelError
from podium.models.check import check_model_name, read_config
from podium.models.stored import stored_shapes
from podium.rewards.model import RewardModel
from podium.rewards.resolve import Reward


def check_reward_models(
    rewards: Iterable[Reward], prompts: Sequence[Any] = (), max_completion_length: int | None = None
) -> None:
    """Raises `ModelError` for a reward model, alone or in a combination, that cannot score these prompts."""
    for reward in rewards:
        model = reward.function
        if isinstance(model, RewardModel):
            if isinstance(model.model, str):
                _check_named(model.model, model)
            model.check_prompts(prompts, max_completion_length or 0)
        check_reward_models(getattr(model, "parts", ()), prompts, max_completion_length)


def _check_named(name: str, model: RewardModel) -> None:
    trust = bool(model.model_init_kwargs.get("trust_remote_code"))
    try:
        check_model_name(name, needs_tokenizer=model.tokenizer is None, trust_remote_code=trust, generates=False)
    except ModelError as error:
        own = "the name or folder of a sequence classifier with one label; a function is `file.py:function`"
        fix = own if error.code in ("M001", "M002") else error.fix  # the policy's is not a reward model's
        raise ModelError(f"reward model: {error.what}", code=error.code, fix=fix, what=error.what) from error
    revision = model.model_init_kwargs.get("revision")
    config = read_config(name, revision=revision, trust_remote_code=trust)
    shapes = stored_shapes(Path(name).expanduser())
    try:
        head = _head(config, trust=trust) if shapes else {}
    except ValueError as error:
        raise model.no_score(f"transformers has no sequence classifier of the kind `{config.model_type}`") from error
    missing = [tensor for tensor in head if tensor not in shapes]
    if missing:
        kind = ", ".join(config.architectures or [config.model_type])
        raise model.no_score(f"its weights ({kind}) have no `{missing[0]}`, which would be random")
    labels = [shapes[tensor][0] for tensor, shape in head.items() if shapes[tensor] != shape]
    if labels:
        raise model.no_score(f"it has {labels[0]} labels; a reward is one number")


def _head(config: PretrainedConfig, *, trust: bool) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of what stands on the trunk of a classifier with one label."""
    config = type(config).from_dict({**config.to_dict(), "num_labels": 1})
    with torch.device("meta"):
        made = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust)
    trunk = f"{made.base_model_prefix}."
    return {name: tuple(each.shape) for name, each in made.named_parameters() if not name.startswith(trunk)}
