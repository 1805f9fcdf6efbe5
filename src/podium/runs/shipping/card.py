"""The card of a model: README.md with its origin, training and results.

All of it comes from the run's record. Names and values in it are data: they are escaped, and local paths left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from podium.runs.checkpoint import PREFIX, model_step, step_of
from podium.runs.find_model import ADAPTER, ModelSource, run_of
from podium.runs.run import Run
from podium.runs.shipping.origin import HUB_ID, Base, base_named, opening, publishable

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.jinja")

SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "weight_decay"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"),
    *("max_completion_length", "temperature", "top_p", "top_k", "loss_type", "scale_rewards", "beta"),
    *("epsilon", "epsilon_high", "seed", "bf16"),
)
"""Settings on the card, where they have a value."""

WITH_IMAGES = "image-text-to-text"
"""The task of models that were trained on images."""

WITHOUT_RUN = Run(folder=Path(os.devnull))
"""The record of a model without a run: nothing is in it."""

LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")


def model_card(
    source: ModelSource,
    *,
    address: str,
    base: Base | None = None,
    dtype: str | None = None,
    proof: str | None = None,
    merged: bool = False,
    title: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """The text of README.md, with the metadata that the hub reads.

    Args:
        source: from `find_model`.
        address: the argument of `from_pretrained`: a hub id, or the folder's name.
        base: the model it was trained from; None: as recorded by the adapter or the run.
        dtype: of its weights, where that is known.
        proof: of its merge.
        merged: whether the adapter has been merged into the weights.
        title: None: `title_of` the source.
        metadata: of a trainer, keys that the hub reads (`huggingface_hub.ModelCardData`); `tags` are added.
    """
    run = run_of(source)
    record = run or WITHOUT_RUN
    kind = "full"
    if source.adapter is not None:
        kind = "merged" if merged else "adapter"
    base = base or base_named(source.base if source.adapter is not None else record.model or source.base)
    checkpoint = None if run is None or source.folder is None else checkpoint_step(source.folder)
    prefix = publishable({"opening": opening(source)})["opening"]
    config = publishable(record.config)
    longest = config.get("max_completion_length")
    trainers = publishable(metadata or {})
    datasets = [*_listed(trainers.pop("datasets", None) or config.get("dataset"))]
    environment = record.environment
    task = WITH_IMAGES if record.thumbnails else "text-generation"
    versions = {name: environment[name] for name in ("podium", "python") if environment.get(name)}
    settings = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    card = ModelCard.from_template(
        _metadata(kind, base, datasets, {"pipeline_tag": task, **trainers}),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        text=text,
        code=code,
        fenced=fenced,
        kind=kind,
        base=base,
        title=title or title_of(source),
        step=_last_step(record) if checkpoint is None else checkpoint,
        is_checkpoint=checkpoint is not None,
        has_run=run is not None or metadata is not None,
        dtype=dtype,
        proof=proof,
        use=_use(address, prefix, longest=longest, has_chat_template=_has_chat_template(source), task=task),
        opening=prefix,
        longest=longest,
        results=_results(record) if checkpoint is None else None,
        dataset=", ".join(datasets),
        rows=environment.get("data", {}).get("rows"),
        rewards=environment.get("reward_weights", {}),
        settings={**settings, **_lora(source)},
        recipe=_recipe(record),
        versions={**versions, **environment.get("libraries", {})},
    )
    return f"{card}\n"


def title_of(source: ModelSource) -> str:
    """The name of a model: of its run and checkpoint, else of its folder, else its hub id."""
    if source.folder is None:
        return source.base
    run = run_of(source)
    step = checkpoint_step(source.folder)
    if run is None:
        return source.folder.resolve().name
    return run.name if step is None else f"{run.name}, checkpoint {step}"


def checkpoint_step(folder: Path) -> int | None:
    """The step of a checkpoint's folder; None for any other."""
    folder = folder.resolve()
    return step_of(folder) if folder.name.startswith(PREFIX) else None


def _has_chat_template(source: ModelSource) -> bool:
    if source.folder is None:
        return True
    folders = (source.folder, Path(source.base))
    return any((folder / "chat_template.jinja").is_file() for folder in folders) or any(
        "chat_template" in path.read_text(encoding="utf-8", errors="replace")
        for folder in folders
        if (path := folder / "tokenizer_config.json").is_file()
    )


def _last_step(run: Run) -> int | None:
    """The optimizer step of the final weights, as far as it is known."""
    if final := model_step(run.folder):
        return final[0]
    return run.history[-1].step if run.history else None


def _recipe(run: Run) -> str:
    """The recipe as YAML; empty for a run that a script started."""
    recipe = publishable(run.given)
    recipe.pop("resume_from_checkpoint", None)
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) if "dataset" in recipe else ""


def _lora(source: ModelSource) -> dict[str, Any]:
    if source.adapter is None or not (source.adapter / ADAPTER).is_file():  # it has not been saved yet
        return {}
    config = json.loads((source.adapter / ADAPTER).read_text(encoding="utf-8"))
    found = {name: config[name] for name in LORA if config.get(name)}
    return {f"lora {name}": ", ".join(sorted(v)) if isinstance(v, list) else v for name, v in found.items()}


def _listed(value: Any) -> Sequence[Any]:
    """One value, or several, as a sequence."""
    return [value] if isinstance(value, str) else value or ()


def _metadata(kind: str, base: Base, datasets: Sequence[str], trainers: Mapping[str, Any]) -> ModelCardData:
    on_hub = [name for name in datasets if HUB_ID.fullmatch(name) and not Path(name).exists()]
    relation = "adapter" if kind == "adapter" else "finetune"
    tags = ["grpo", "podium", *(["lora"] if kind == "adapter" else []), *_listed(trainers.get("tags"))]
    values = {
        "base_model": base.hub_id,
        "datasets": on_hub or None,
        "library_name": "peft" if kind == "adapter" else "transformers",
        "base_model_relation": relation if base.hub_id else None,
    }
    return ModelCardData(**{**values, **trainers, "tags": [*dict.fromkeys(tags)]})


def _use(
    address: str, prefix: Sequence[Mapping[str, str]], *, longest: int | None, has_chat_template: bool, task: str
) -> str:
    """A program that prompts the model as in training, for completions as long as those that were measured."""
    content: Any = "..."
    if task == WITH_IMAGES:
        content = [{"type": "image", "path": "photo.jpg"}, {"type": "text", "text": "..."}]
    messages = [*prefix, {"role": "user", "content": content}]
    listed = "[\n" + "".join(f"    {json.dumps(dict(message))},\n" for message in messages) + "]"
    asked = f"messages = {listed}" if has_chat_template else 'messages = "..."'
    given = "text=messages" if task == WITH_IMAGES else "messages"
    return (
        "from transformers import pipeline\n\n"
        f'generate = pipeline("{task}", model={json.dumps(address)})\n{asked}\n'
        f'print(generate({given}, max_new_tokens={longest or 256}, return_full_text=False)[0]["generated_text"])'
    )


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
        "verdict": run.verdict,
        "baselines": (after.get("baselines") or {}).get("line"),
    }


def _row(name: str, before: Any, after: Any, form: str = "{:.3f}") -> dict[str, str]:
    return {"name": name, "before": _number(before, form), "after": _number(after, form)}


def _number(value: Any, form: str) -> str:
    """As text; an unknown interval (prompts too few or all equal) is left out.

    >>> _number({"value": 0.5, "low": None, "high": None}, ""), _number({"value": 0.5, "low": 0.4, "high": 0.6}, "")
    ('0.500', '0.500 [0.400, 0.600]')
    """
    if isinstance(value, Mapping):
        low = value.get("low")
        high = value.get("high")
        mean = _number(value.get("value"), "{:.3f}")
        return mean if low is None or high is None else f"{mean} [{low:.3f}, {high:.3f}]"
    return form.format(value) if isinstance(value, (int, float)) else ""


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
