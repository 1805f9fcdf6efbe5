"""The card of a model: README.md with its origin, training and results.

All of it comes from the run's record. Names and values in it are data: they are escaped, and local paths left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml

from podium.runs.run import Run
from podium.runs.shipping.origin import HUB_ID, Base, publishable

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.jinja")

SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "weight_decay"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"),
    *("max_completion_length", "temperature", "top_p", "top_k", "loss_type", "scale_rewards", "beta"),
    *("epsilon", "epsilon_high", "seed", "bf16"),
)
"""Settings on the card, where they have a value."""

LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardContents:
    """A model and its origin, as its card describes it."""

    kind: Literal["adapter", "merged", "full"]
    base: Base
    title: str
    address: str
    """The argument of `from_pretrained`: a hub id, or the folder's name."""
    dtype: str | None = None
    checkpoint: int | None = None
    """Step of the checkpoint; None: the final model."""
    proof: str | None = None
    has_chat_template: bool = True
    lora: Mapping[str, Any] | None = None
    """The adapter's config."""
    opening: Sequence[Mapping[str, str]] = ()
    """Messages that every prompt of training began with."""


def card(model: CardContents, run: Run | None) -> str:
    """The text of README.md, with the metadata that the hub reads."""
    environment = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"text": text, "code": code, "fenced": fenced}
    recorded = _recorded(run)
    recorded["step"] = model.checkpoint or recorded["step"]
    recorded["settings"] |= _lora(model.lora or {})
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=model,
        metadata=_metadata(model, recorded["dataset"]),
        use=_use(model),
        has_run=run is not None,
        is_checkpoint=model.checkpoint is not None,
        results=_results(run) if run is not None and model.checkpoint is None else None,
        **recorded,
    )


def _recorded(run: Run | None) -> dict[str, Any]:
    """The run's data on the card; empty for a model without a run."""
    config, given = (publishable(run.config), publishable(run.given)) if run is not None else ({}, {})
    environment = run.environment if run is not None else {}
    versions = {name: environment[name] for name in ("podium", "python") if environment.get(name)}
    return {
        "step": run.history[-1].step if run is not None and run.history else None,
        "dataset": config.get("dataset"),
        "rows": environment.get("data", {}).get("rows"),
        "rewards": environment.get("reward_weights", {}),
        "settings": {name: config[name] for name in SETTINGS if config.get(name) is not None},
        "recipe": yaml.safe_dump(given, sort_keys=False, allow_unicode=True) if "dataset" in given else "",
        "versions": {**versions, **environment.get("libraries", {})},
    }


def _lora(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in LORA if config.get(name)}
    return {f"lora {name}": ", ".join(sorted(v)) if isinstance(v, list) else v for name, v in found.items()}


def _metadata(model: CardContents, dataset: str | None) -> str:
    from huggingface_hub import ModelCardData

    on_hub = dataset is not None and HUB_ID.fullmatch(dataset) and not Path(dataset).exists()
    relation = "adapter" if model.kind == "adapter" else "finetune"
    return ModelCardData(
        base_model=model.base.hub_id,
        datasets=[dataset] if dataset is not None and on_hub else None,
        library_name="peft" if model.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "podium", *(["lora"] if model.kind == "adapter" else [])],
        base_model_relation=relation if model.base.hub_id else None,
    ).to_yaml()


def _use(model: CardContents) -> str:
    """A program that prompts the model as in training."""
    messages = [*model.opening, {"role": "user", "content": "..."}]
    given = "[\n" + "".join(f"    {json.dumps(dict(each))},\n" for each in messages) + "]"
    asked = f"messages = {given}" if model.has_chat_template else 'messages = "..."'
    return (
        "from transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model={json.dumps(model.address)})\n{asked}\n'
        'print(generate(messages, max_new_tokens=256, return_full_text=False)[0]["generated_text"])'
    )


# ---- results ----


def _results(run: Run) -> dict[str, Any] | None:
    """Evaluations before and after, as a table; None unless both exist."""
    before, after = (run.evaluations.get(when) for when in ("before", "after"))
    if not before or not after:
        return None
    rows = [_row(name, before.get(name), after.get(name)) for name in ("accuracy", "reward") if after.get(name)]
    for part, label in (("pass_at", "pass@{}"), ("format", "format kept ({})"), ("means", "reward {}")):
        for name, value in after.get(part, {}).items():
            if (part, name) != ("pass_at", "1"):  # which is the accuracy
                rows.append(_row(label.format(name), before.get(part, {}).get(name), value))
    rows.append(_row("mean length, tokens", before.get("mean_tokens"), after.get("mean_tokens"), "{:.1f}"))
    rows.append(_row("cut off at the limit", before.get("truncated"), after.get("truncated"), "{:.1%}"))
    return {
        "rows": rows,
        "num_prompts": after.get("num_prompts"),
        "num_completions": after.get("num_completions"),
        "temperature": after.get("temperature"),
        "verdict": run.evaluations.get("comparison", {}).get("verdict"),
    }


def _row(name: str, before: Any, after: Any, form: str = "{:.3f}") -> dict[str, str]:
    return {"name": name, "before": _number(before, form), "after": _number(after, form)}


def _number(value: Any, form: str) -> str:
    """As text; an unknown interval (prompts too few or all equal) is left out.

    >>> _number({"value": 0.5, "low": None, "high": None}, ""), _number({"value": 0.5, "low": 0.4, "high": 0.6}, "")
    ('0.500', '0.500 [0.400, 0.600]')
    """
    if isinstance(value, Mapping):
        low, high, mean = value.get("low"), value.get("high"), _number(value.get("value"), "{:.3f}")
        return mean if low is None or high is None else f"{mean} [{low:.3f}, {high:.3f}]"
    return form.format(value) if isinstance(value, (int, float)) else ""


# ---- escaping ----


def text(value: object) -> str:
    r"""One line of Markdown that reads as `value` and does nothing.

    >>> print(text("<b>a|b\n[x](http://y)"))
    \<b\>a\|b \[x\]\(http://y\)
    """
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~])", r"\\\1", _line(value))


def code(value: object) -> str:
    r"""One line as inline code, also inside a table.

    >>> print(code("a`b|c\x1b[2J"))
    `a'b\|c[2J`
    """
    return f"`{_line(value).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def fenced(value: str, language: str) -> str:
    """A block of code whose fence is longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    printable = "".join(c for c in value if c.isprintable() or c == "\n")
    return f"{fence}{language}\n{printable.rstrip()}\n{fence}"


def _line(value: object) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c for c in " ".join(shown.split()) if c.isprintable())
