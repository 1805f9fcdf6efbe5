"""TRL's public attributes, warnings and settings, and what becomes of each here: `python -m tests.parity.surface`.

Read from the installed TRL: what `GRPOTrainer.__init__` assigns to `self` and every warning by the syntax tree, the
settings from the config's fields. `--write` puts the tables into TRL.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import transformers
import trl
from trl.trainer import grpo_config, grpo_trainer

import podium
from podium.trainer.attributes import ATTRIBUTES, NOT_HERE
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import REFUSED, WITHOUT_EFFECT

PAGE = Path(__file__).parent / "TRL.md"
MARKS = ("<!-- surface -->\n", "\n<!-- /surface -->")

Row = tuple[str, str, str]
"""Name, `same`, `note`, `refused because` or `missing`, and what to know."""

SAME, NOTE, NOT, MISSING = "same", "note", "refused because", "missing"

NOTES: dict[str, str] = {
    "pad_to_multiple_of": "nothing is padded",
    "log_multimodal": "False leaves out the thumbnails of the report; tables of completions hold text alone",
    "use_transformers_continuous_batching": "the live engine lets rows enter and leave as they end, too",
    "reward_weights": "with `adaptive_rewards` the weights of the round to come",
    "environments": "the evaluation's are others than training's",
}
"""Differences from TRL of attributes that exist here."""

WARNINGS: dict[str, tuple[str, str]] = {
    "You passed `model_init_kwargs` to the": (SAME, "given where the model is loaded"),
    "You passed `quantization_config` to the": (SAME, "given where the model is loaded"),
    "PEFT<0.20.0 can't add a frozen reference adapter": (
        NOTE,
        "the reference is a second adapter",
    ),
    "You are using PEFT with DeepSpeed ZeRO-3": (NOTE, "`use_reentrant` stays as it is given"),
    "You are using 'rollout_func'": (SAME, "silenced by the same variable"),
    "You are using 'environment_factory'": (SAME, "silenced by the same variable"),
    "The tokenizer has a legacy `response_schema`": (SAME, "transformers parses with a `response_template` alone"),
    "Iterable datasets require `dataloader_num_workers=0`": (
        NOTE,
        "no worker reads rows",
    ),
    "When using `'luspo'` loss": (SAME, "C025"),
    "VESPO computes sequence-level importance weights": (SAME, "C025"),
    "When using `importance_sampling_level='sequence'`": (SAME, "C025"),
    "`use_liger_kernel=True` is deprecated": (NOTE, "a note says that it has no effect"),
    "The vLLM server runs with `--logprobs-mode": (
        NOTE,
        "an error, with the line to start it",
    ),
    "All reward functions returned None": (SAME, "with the arguments of the first such row"),
    "`use_transformers_paged` is deprecated": (SAME, "TRL's own"),
    "The `vllm_importance_sampling_cap` argument is deprecated": (SAME, "TRL's own"),
}
"""How a warning of TRL begins -> what becomes of it."""

SETTINGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "dataloader_drop_last",
            "dataloader_in_order",
            "dataloader_multiprocessing_context",
            "dataloader_num_workers",
            "dataloader_persistent_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
        ),
        "rows are looked up when a round is drawn: no workers, nothing fetched ahead",
    ),
    **dict.fromkeys(("train_sampling_strategy", "length_column_name"), "the order is that of `shuffle_dataset`"),
    **dict.fromkeys(
        ("label_names", "label_smoothing_factor", "prediction_loss_only", "include_for_metrics", "batch_eval_metrics",
         "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
        "there are no labels and no predictions to gather",
    ),
    "vllm_importance_sampling_cap": "TRL's config reads it into `vllm_importance_sampling_clip_max`",
    "average_tokens_across_devices": "sums of an optimizer step are of all processes in any case",
    "gradient_checkpointing": "another default: see above",
    "bf16": "another default: see above",
    "use_cpu": "another default: see above",
    "logging_nan_inf_filter": "another default: see above",
}  # fmt: skip
"""Settings that differ or do nothing, and are taken without a word."""


def attributes() -> Iterator[Row]:
    """Those without an underscore."""
    [init] = [
        each
        for node in ast.walk(ast.parse(inspect.getsource(grpo_trainer)))
        if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    ]
    names = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    for name in sorted(name for name in names if not name.startswith("_")):
        if name in NOT_HERE:
            yield name, NOT, NOT_HERE[name]
        elif name in ATTRIBUTES:
            yield name, NOTE if name in NOTES else SAME, NOTES.get(name, "")
        else:
            yield name, MISSING, ""


def warnings() -> Iterator[Row]:
    """By how they begin."""
    for module in (grpo_trainer, grpo_config):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("logger.warning", "warnings.warn"):
                text = "".join(str(part.value) for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
                start = next((start for start in WARNINGS if text.startswith(start)), "")
                yield f"{' '.join(text.split())[:60]} ...", *WARNINGS.get(start, (MISSING, ""))


def settings() -> Iterator[Row]:
    """TRL's own, then those of transformers that differ."""
    inherited = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    source = "".join(path.read_text(encoding="utf-8") for path in Path(podium.__file__).parent.rglob("*.py"))
    ours = {each.name for each in dataclasses.fields(GRPOConfig)}
    for each in dataclasses.fields(trl.GRPOConfig):
        name = each.name
        if name in REFUSED:
            yield name, NOT, REFUSED[name][1]
        elif name in WITHOUT_EFFECT:
            yield name, NOTE, WITHOUT_EFFECT[name][1]
        elif name in SETTINGS:
            yield name, NOTE, SETTINGS[name]
        elif name not in inherited:
            is_read = name in ours and re.search(rf"\b{name}\b", source)
            yield name, SAME if is_read else MISSING, ""


def table(rows: Iterator[Row], head: str) -> str:
    """A row each for what is not the same, and one for all that is."""
    listed = list(rows)
    same = ", ".join(f"`{name}`" for name, word, more in listed if (word, more) == (SAME, ""))
    same = textwrap.fill(f"Same: {same}.", 120, break_on_hyphens=False)
    lines = [
        f"| `{name.replace('`', '')}` | {word} | {more} |" for name, word, more in listed if (word, more) != (SAME, "")
    ]
    told = [same, ""] if len(same) > len("Same: .") else []
    return "\n".join([*told, f"| {head} | | |", "|---|---|---|", *lines])


def section() -> str:
    """What stands between the marks of TRL.md."""
    parts = (
        ("Attributes", table(attributes(), "attribute")),
        ("Warnings", table(warnings(), "warning")),
        ("Settings", table(settings(), "setting")),
    )
    return "\n\n".join(f"**{name}**\n\n{text}" for name, text in parts)


def main() -> int:
    """Print the section; with --write, put it into the page."""
    text = section()
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(before + MARKS[0] + text + MARKS[1] + after, encoding="utf-8")
    else:
        sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
