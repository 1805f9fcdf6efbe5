"""The table of rules about the keys of a recipe that exclude each other, or need another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.data.rows import CONTRADICTIONS, DataSpec
from podium.errors.rule import Rule

FLAT_ADAPTER: Mapping[str, tuple[str, Any]] = {
    "lora_r": ("r", 16),
    "lora_alpha": ("lora_alpha", 32),
    "lora_dropout": ("lora_dropout", 0.05),
    "lora_target_modules": ("target_modules", None),
    "lora_target_parameters": ("target_parameters", None),
    "lora_modules_to_save": ("modules_to_save", None),
    "lora_task_type": ("task_type", "CAUSAL_LM"),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}
"""TRL's flat keys: the argument of `LoraConfig`, and TRL's default."""


def is_share(bounds: Any) -> bool:
    """Whether a `pass_rate` is two shares, the lower one first."""
    return len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1


def _without_use_peft(written: Mapping[str, Any]) -> dict[str, str] | None:
    """The first of TRL's keys of an adapter, where nothing asks for one."""
    flat = [key for key in FLAT_ADAPTER if key in written]
    return {"key": flat[0]} if flat and not {"lora", "use_peft"} & written.keys() else None


def _has_no_examples(written: Mapping[str, Any], data: DataSpec) -> bool:
    """Whether examples are to be taken from the rows of a mixture."""
    number = written.get("examples")
    return isinstance(number, int) and number > 0 and bool(data.parts or data.datasets)


RULES: tuple[Rule, ...] = (
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: (
            written.get("lora") is not None and (written.get("use_peft") or FLAT_ADAPTER.keys() & written.keys())
        ),
        says=lambda written: "`lora` and TRL's `use_peft`, `lora_*` keys say the same twice",
        cure="keep one way",
        about=("lora",),
    ),
    Rule(
        code="C017",
        needs=("written",),
        when=_without_use_peft,
        says=lambda written, *, key: f"`{key}` does nothing without `use_peft: true`",
        cure=lambda written, *, key: f"add it, or take `{key}` out",
        about=lambda written, *, key: (key,),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("load_in_4bit") and written.get("load_in_8bit"),
        says=lambda written: "`load_in_4bit` and `load_in_8bit` exclude each other",
        cure="keep one of them",
        about=("load_in_4bit",),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("load_in_4bit") and written.get("dtype") == "auto",
        says=lambda written: "`dtype: auto` does not say in which precision `load_in_4bit` is to compute",
        cure="dtype: bfloat16, or leave it out: bfloat16 where the GPU has it, else float32",
        about=("dtype",),
    ),
    Rule(
        code="C016",
        needs=("written",),
        when=lambda written: written.get("pass_rate") is not None and not is_share(written["pass_rate"]),
        says=lambda written: f"`pass_rate` must be two shares, the lower one first; got {written['pass_rate']}",
        cure="pass_rate: [0.05, 0.95]",
        about=("pass_rate",),
    ),
    *CONTRADICTIONS,
    Rule(
        code="C003",
        needs=("written", "data"),
        when=_has_no_examples,
        says=lambda written, data: "`examples` is a number, and a mixture has no one form of a row",
        cure="examples: [{...}], written by hand",
        about=("examples",),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("order") is not None and written.get("shuffle_dataset"),
        says=lambda written: "`order` and `shuffle_dataset: true` exclude each other.",
        cure="Leave one of them out.",
        about=("order",),
    ),
    Rule(
        code="C030",
        needs=("written", "rewards"),
        when=lambda written, rewards: "reward_weights" in written and any(each.weight is not None for each in rewards),
        says=lambda written, rewards: "`reward_weights` and `weight` in `rewards` say the same twice",
        cure="keep one",
        about=("reward_weights",),
    ),
    Rule(
        code="C030",
        needs=("written", "rewards"),
        when=lambda written, rewards: written.get("adaptive_rewards") and any(each.adaptive for each in rewards),
        says=lambda written, rewards: "`adaptive_rewards` and `adaptive` in `rewards` say the same twice",
        cure="keep one",
        about=("adaptive_rewards",),
    ),
)
