"""Objects given to `GRPOTrainer` in another form than its own: converted where nothing is lost, else named."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import trl
from peft import LoraConfig, PeftConfig, get_peft_config
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainingArguments

from podium.data.files import dataset_of_columns
from podium.data.sources import load_splits, rows_dataset
from podium.data.survey import CheckedRows
from podium.errors import ConfigError, DataError, ModelError
from podium.errors.texts import quoted
from podium.models.builtin import BUILTIN
from podium.models.check import not_causal, refuse_other_task
from podium.models.forward import base_model
from podium.rewards.resolve import as_list
from podium.trainer.config import GRPOConfig
from podium.trainer.run import Arguments

logger = logging.getLogger(__name__)

_DERIVED = {"output_dir", "generation_batch_size", "steps_per_generation", "use_cpu", "bf16", "fp16"}
"""Arguments whose values no longer tell whether they were given."""


def converted(given: Arguments) -> Arguments:
    """The arguments as the trainer takes them. Raises `ConfigError`, `DataError` or `ModelError` for what it cannot."""
    evaluation = given.eval_dataset
    if isinstance(evaluation, Mapping) and not _is_columns(evaluation):
        evaluation = {name: rows_of(rows, f"eval_dataset[{name!r}]", "test") for name, rows in evaluation.items()}
    elif evaluation is not None:
        evaluation = rows_of(evaluation, "eval_dataset", "test")
    model = _model(given.model)
    adapter = peft_config_of(given.peft_config)
    config = adapter or getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(config).__name__} is a prompt-learning adapter: its virtual tokens are not in training's forward.",
            code="M020",
            fix="peft_config=LoraConfig(r=16)",
            kind=type(config).__name__,
        )
    return replace(
        given,
        model=model,
        args=_arguments(given.args),
        train_dataset=None if given.train_dataset is None else rows_of(given.train_dataset, "train_dataset", "train"),
        eval_dataset=evaluation,
        peft_config=adapter,
        quantization_config=_quantization(given.quantization_config),
    )


def _described(value: Any) -> str:
    """The kind of an object, for a message.

    >>> _described(3), _described(dict)
    ('an object of type int', 'the class dict')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


# ---- settings ----


def _arguments(args: Any) -> GRPOConfig | None:
    """A `GRPOConfig`, or one of what was set in a dict, in TRL's `GRPOConfig` or in `TrainingArguments`.

    What is not set there has Podium's default. Fields of a subclass are attributes, as code that made them reads them.
    """
    if isinstance(args, GRPOConfig):
        args.settle_again()
    if args is None or isinstance(args, GRPOConfig):
        return args
    if isinstance(args, Mapping):
        return GRPOConfig(**args)
    is_trl = isinstance(args, trl.GRPOConfig)
    if not is_trl and type(args) is not TrainingArguments:
        raise ConfigError(
            f"args is {_described(args)}; it must be a GRPOConfig.",
            code="C003",
            fix='args=podium.GRPOConfig("runs/first", ...)',
            described=_described(args),
        )
    values = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
    plain = type(args)(args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16, fp16=args.fp16)
    given = {name: x for name, x in values.items() if name not in _DERIVED and x != getattr(plain, name)}
    given |= {name: True for name in ("use_cpu", "fp16") if values[name]}
    if values["bf16"] != (is_trl and not args.fp16):  # TRL sets it where it is not given
        given["bf16"] = values["bf16"]
    if is_trl and args.steps_per_generation != args.gradient_accumulation_steps:
        given["steps_per_generation"] = args.steps_per_generation
    known = GRPOConfig.__dataclass_fields__
    made = GRPOConfig(args.output_dir, **{name: x for name, x in given.items() if name in known})
    for name in values.keys() - known:
        setattr(made, name, values[name])
    if not is_trl:
        listed = ", ".join(sorted(given)) or "nothing"
        logger.warning("args is a TrainingArguments: what is set in it counts (%s), the rest is GRPOConfig's.", listed)
    return made


def peft_config_of(given: Any) -> PeftConfig | None:
    """Return the configuration of an adapter from PEFT's object or a dict. Raises `ConfigError`."""
    if given is None:
        return None
    if isinstance(given, PeftConfig):
        made = given
    elif not isinstance(given, Mapping):
        raise ConfigError(
            f"peft_config is {_described(given)}; it must be a PeftConfig, or a dict of its settings.",
            code="C003",
            fix="peft_config=LoraConfig(r=16), with from peft import LoraConfig",
            described=_described(given),
        )
    else:
        try:
            made = get_peft_config(dict(given)) if "peft_type" in given else LoraConfig(**given)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"peft_config is no adapter's settings: {quoted(error)}.",
                code="C003",
                fix="see peft.LoraConfig",
                error=error,
            ) from error
    refuse_other_task(made.task_type)
    return made


def _quantization(given: Any) -> Any:
    if given is None or (hasattr(given, "to_dict") and not isinstance(given, type)):
        return given
    if isinstance(given, Mapping) and "quant_method" not in given:
        return BitsAndBytesConfig(**given)
    raise ConfigError(
        f"quantization_config is {_described(given)}; it must be a quantization config of transformers.",
        code="C003",
        fix="quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
        described=_described(given),
    )


def for_transformers(callbacks: Any, optimizers: Any) -> tuple[list[Any], tuple[Any, Any]]:
    """Callbacks and optimizers for transformers' Trainer.

    Raises `ConfigError` for a callback that is none, and for optimizers that are not a pair.
    """
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            f"optimizers is {_described(optimizers)}; it must be a pair: an optimizer and its schedule, or None.",
            code="C003",
            fix="optimizers=(optimizer, None)",
            described=_described(optimizers),
        )
    for callback in as_list(callbacks):
        if not hasattr(callback, "on_step_end"):  # of the events, one that every callback has
            raise ConfigError(
                f"A callback is {_described(callback)}; it must be a TrainerCallback, which transformers calls "
                "by the names of events.",
                code="C003",
                fix="class Mine(TrainerCallback): def on_step_end(self, args, state, control, **kwargs): ..., "
                "with from transformers import TrainerCallback; callbacks=[Mine()]",
                described=_described(callback),
            )
    return as_list(callbacks), (optimizers[0], optimizers[1])


# ---- the model ----


def _model(model: Any) -> Any:
    """A name or a model that writes text. Raises `ModelError` (M013)."""
    if isinstance(model, Path):
        return str(model)
    if isinstance(model, str):
        return model
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        kinds = "a name, a folder, a PreTrainedModel or a PeftModel"
        fix = f'model="{BUILTIN}", or another name or folder'
        if isinstance(model, (tuple, list)) and any(isinstance(part, nn.Module) for part in model):
            fix = "model=made[0], processing_class=made[1], of what from_pretrained has made"
        elif isinstance(getattr(model, "model", None), nn.Module):
            fix = "model=pipe.model, processing_class=pipe.tokenizer, where `pipe` is what was given"
        what = "model is None" if model is None else f"model is {_described(model)}"
        raise ModelError(f"{what}; it must be {kinds}.", code="M013", fix=fix, what=what, kinds=kinds)
    base = base_model(model)
    encodes = getattr(base.config, "is_encoder_decoder", False)
    if encodes or (isinstance(base, PreTrainedModel) and not base.can_generate()):
        fix = "model=AutoModelForCausalLM.from_pretrained(NAME), or the name itself"
        raise not_causal("model", [type(base).__name__], encodes=encodes, fix=fix)
    return model


# ---- rows ----


def _is_columns(given: Mapping[Any, Any]) -> bool:
    """Whether a mapping is rows by columns, as `dataset[:100]` is, and not datasets by name."""
    return "prompt" in given and isinstance(given["prompt"], (list, tuple))


def rows_of(given: Any, name: str, split: str) -> Any:
    """Rows as a dataset or a list: also of a table of pandas, a dict of columns, a function, or what `dataset:` names.

    `split`: the one that is taken where there are several. Raises `DataError`.
    """
    if isinstance(given, CheckedRows):
        return given
    pandas = sys.modules.get("pandas")  # without it nobody has a table of its kind
    if pandas is not None and isinstance(given, pandas.DataFrame):
        return rows_dataset(given.astype(object).where(given.notna(), None).to_dict("records"), name)
    if isinstance(given, Mapping) and _is_columns(given):
        return dataset_of_columns(given)
    if isinstance(given, (str, Path)) or inspect.isfunction(given):
        splits = load_splits(given)
        if len(splits) == 1 or split in splits:
            found = split if split in splits else next(iter(splits))
            logger.info("%s: the split `%s` of %s", name, found, given)
            return splits[found]
        given = splits
    if isinstance(given, Mapping):
        first = next((name for name in (split, *map(str, given)) if name in given), split)
        fix = f'{name}=data["{first}"], where `data` is what was given'
        what = (
            f"{name} is a {type(given).__name__} ({', '.join(map(str, given)) or 'empty'}); it takes one set of rows."
        )
        raise DataError(what, code="D056", fix=fix)
    if isinstance(given, type) or not (hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        raise DataError(
            f"{name} is {_described(given)}; it must be rows: a datasets.Dataset, a list of dicts, or a file's name.",
            code="D056",
            fix='a row is a dict: {"prompt": ...}',
            name=name,
            described=_described(given),
        )
    return given
