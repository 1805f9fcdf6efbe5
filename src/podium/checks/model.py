"""Rules about the model and its tokenizer, from their small files and the headers of the large ones."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from podium.checks.public import unasked_model
from podium.checks.setup import ModelFacts, at, line
from podium.data.prompts import PromptBuilder, apply_template
from podium.data.survey import RowSurvey
from podium.errors import Finding, PodiumError
from podium.errors.rule import Rule, raised
from podium.errors.texts import as_line, as_lines, listed
from podium.models.builtin import BUILTIN
from podium.models.loading import bits_of, rounding_errors
from podium.models.stored import misfits
from podium.models.trial import MEASURED, try_architecture
from podium.planning.memory import estimate_memory, gigabytes, meta_model
from podium.rewards.resolve import as_list
from podium.trainer.assembly import load_settings
from podium.trainer.config import GRPOConfig
from podium.trainer.planned import gpu_planned
from podium.trainer.setting_rules import no_router
from podium.trainer.teacher import checked_teacher

T = TypeVar("T")

CANNOT_BUILD = (ValueError, AttributeError, RuntimeError)
"""Raised for architectures that only their own code can build."""
LARGE_FOR_CPU = 1_000_000_000
"""Parameters from which training on a CPU is worth a warning."""


# ---- tokens ----


def _vocabulary(
    model: ModelFacts,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    train: RowSurvey | None,
) -> Finding | None:
    """Tokens without a row of the embedding."""
    shape = model.embedding
    rows = config.get_text_config().vocab_size if shape is None else shape[0]
    if len(tokenizer) <= rows:
        return None
    token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    is_used = max(_certain_ids(tokenizer, template, train), default=0) >= rows
    return Finding(
        code="M007",
        severity="error" if is_used else "warning",
        what=(
            f"{model.name}: the embedding has {rows:,} rows, but the tokenizer has {len(tokenizer):,} tokens; "
            f"token {len(tokenizer) - 1} (`{token}`) has no row"
        ),
        why=(
            "every prompt has such a token, and ends in `index out of range`"
            if is_used
            else "the first prompt with such a token ends in `index out of range`"
        ),
        fix=(
            "take the model's own tokenizer, or once: model.resize_token_embeddings(len(tokenizer)); "
            "model.save_pretrained(folder)"
        ),
    )


def _certain_ids(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], train: RowSurvey | None) -> list[int]:
    """Tokens that stand in every prompt: those of the chat template, or of the first plain prompt."""
    rows = train.examples if train is not None else ()
    text = next((row.get("prompt") for row in rows), None)
    if not isinstance(text, str):
        text = _render(tokenizer, template, [{"role": "user", "content": ""}], prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _end_tokens(
    model: ModelFacts,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    args: GRPOConfig | None,
) -> Finding | None:
    """The tokens that end a turn, as the tokenizer, the generation configuration and the chat template have them."""
    chosen = (args.generation_kwargs or {}).get("eos_token_id") if args is not None else None
    ends = set(as_list(chosen)) or model.end_ids | {tokenizer.eos_token_id} - {None}
    closing = _closing_token(tokenizer, template)
    names = ", ".join(f"`{tokenizer.convert_ids_to_tokens(i)}` ({i})" for i in sorted(ends) if 0 <= i < len(tokenizer))
    if closing is not None and closing not in ends:
        token = tokenizer.convert_ids_to_tokens(closing)
        return Finding(
            code="M018",
            severity="warning",
            what=(
                f"{model.name}: the chat template ends a turn with `{token}` ({closing}), but generation ends at "
                f"{names}"
            ),
            why="the model writes its end and goes on: completions run to max_completion_length",
            fix=f"generation_kwargs: {{eos_token_id: {sorted({closing, *ends})}}}",
        )
    if model.end_ids and tokenizer.eos_token_id not in model.end_ids:
        return Finding(
            code="M018",
            severity="note",
            what=(
                f"{model.name}: the tokenizer's end token {tokenizer.eos_token_id} is not among the end tokens of the "
                f"generation configuration, {sorted(model.end_ids)}; a completion ends at each of {names}"
            ),
        )
    return None


def _render(
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    messages: list[dict[str, str]],
    *,
    prompt: bool,
    **more: Any,
) -> str | None:
    """The text of messages. `template`: variables of the chat template, with `more` of them."""
    try:
        return apply_template(tokenizer, messages, settings={**template, **more, "add_generation_prompt": prompt})
    except Exception:  # noqa: BLE001 - a template can raise anything; its rows are tried one by one elsewhere
        return None


_USER = {"role": "user", "content": "2+2?"}
_ANSWER = "It is four."


def _closing_token(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> int | None:
    """The first special token behind an assistant's answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = _render(tokenizer, template, [_USER, {"role": "assistant", "content": _ANSWER}], prompt=False)
    if text is None or _ANSWER not in text:
        return None
    rest = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return next((i for i in rest if i in special), None)


TOKENS: tuple[Rule, ...] = (
    Rule(
        code="M007",
        needs=("model", "config", "tokenizer", "template_variables"),
        wants=("train",),
        when=_vocabulary,
    ),
    Rule(
        code="M005",
        severity="note",
        needs=("tokenizer",),
        when=lambda tokenizer: (
            tokenizer.pad_token_id == tokenizer.eos_token_id
            and {"eos_token": tokenizer.eos_token, "eos_token_id": tokenizer.eos_token_id}
        ),
        says=lambda tokenizer, *, eos_token, eos_token_id: (
            f"pad and end token are the same (`{eos_token}`, id {eos_token_id})"
        ),
        why="harmless here: what is padding is known by position, never by id",
    ),
    Rule(
        code="M018",
        needs=("model", "tokenizer", "template_variables"),
        wants=("settings",),
        when=_end_tokens,
    ),
)
"""Tokens that the model lacks, or never writes."""


# ---- the chat template ----


def _unstable_prefix(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> Finding | None:
    """A prompt that is no prefix of the text with its answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    before = _render(tokenizer, template, [_USER], prompt=True)
    after = _render(tokenizer, template, [_USER, {"role": "assistant", "content": _ANSWER}], prompt=False)
    if before is None or after is None:
        return None
    if after.startswith(before):
        opening = after.removeprefix(before).partition(_ANSWER)[0].strip()
        # What stands behind a generation prompt, such as an empty block of thinking, is the model's to write.
        has_no_turn = before == _render(tokenizer, template, [_USER], prompt=False)
        if not opening or _ANSWER in before or not has_no_turn:
            return None
        return Finding(
            code="M025",
            severity="warning",
            what=(
                f"the chat template leaves out the assistant's turn: a prompt ends without {opening!r}, which stands "
                "in front of an answer"
            ),
            why="the model writes it first, as a part of every completion, and rewards see it",
            fix=(
                "use the template that came with the model, or end it with "
                f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
            ),
        )
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
    return Finding(
        code="M019",
        severity="note",
        what=(
            "the chat template is not prefix-stable: with the answer in place the text differs from the prompt at "
            f"character {same} ({before[same : same + 30]!r} became {after[same : same + 30]!r})"
        ),
        why=(
            "harmless for one answer, which is sampled from the prompt as it is; a conversation of several turns would "
            "not be seen as it was sampled"
        ),
        fix="give chat_template_kwargs that keep the prompt, such as {enable_thinking: false} for Qwen3",
    )


def _date(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> Finding | None:
    """A template that writes today's date into every prompt."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    formats: list[str] = []

    def clock(form: str) -> str:
        formats.append(form)
        return ""

    today = _render(tokenizer, template, [_USER], prompt=True)
    # A variable of a conversation comes before the function of that name that transformers gives to all templates.
    _render(tokenizer, template, [_USER], prompt=True, strftime_now=clock)
    dates = [datetime.datetime.now().strftime(form) for form in formats]
    if today is None or not any(date in today for date in dates):
        return None
    fix = (
        "to keep it, give a copy of the template in which the date is a text: "
        "chat_template_kwargs: {chat_template: TEXT}"
    )
    changes: dict[str, Any] = {}
    facts = {"date": dates[0]}
    if today != _render(tokenizer, template, [_USER], prompt=True, date_string="podium"):  # as in Llama 3
        changes = {"chat_template_kwargs": {**template, "date_string": dates[0]}}
        facts["line"] = as_lines(changes)
        fix = f"to keep it: {as_lines(changes)}"
    return Finding(
        code="M027",
        severity="note",
        what=f"the chat template writes the date of the day into every prompt (today '{dates[0]}')",
        why="a run that is repeated or resumed on another day has other prompts, and is not the same run",
        fix=fix,
        changes=changes,
        facts=facts,
    )


TEMPLATE: tuple[Rule, ...] = (
    Rule(code="M019", needs=("tokenizer", "template_variables"), when=_unstable_prefix),
    Rule(code="M027", needs=("tokenizer", "template_variables"), when=_date),
)
"""Rules about chat templates and the prompts that they render."""


# ---- files, and the numbers in them ----


def _pickles(model: ModelFacts) -> Finding | None:
    """Weights in Python's pickle format."""
    folder = model.folder
    if folder is None or any(folder.glob("*.safetensors")):
        return None
    file = min(folder.glob("pytorch_model*.bin"), default=None)
    if file is None:
        return None
    return Finding(
        code="M010",
        severity="warning",
        what=f"{folder} has its weights as a pickle ({file.name}) and not as safetensors",
        why="a pickle is a program; it is read without running it, but cannot be checked before",
        fix=(
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        ),
    )


def _rounded_weights(
    places: Mapping[str, str],
    config: PretrainedConfig | None,
    lora: Mapping[str, Any] | None,
    quantization: Mapping[str, Any] | None,
) -> dict[str, str] | None:
    """Rounded weights that are to be trained themselves."""
    of_model = getattr(config, "quantization_config", None)
    asked = bits_of(quantization or {})
    if lora is not None or (of_model is None and not asked):
        return None
    what = f"{asked} bits"
    if not asked:
        bits = bits_of(of_model) if isinstance(of_model, dict) else 0
        kind = f"{bits} bits" if bits else "quantized"
        what = f"{kind} (its config.json has a quantization_config)"
    return {"at": at(places, "model"), "what": what}


_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def _dtype(args: GRPOConfig) -> str:
    """The dtype that is asked for, or an empty text."""
    asked = args.model_init_kwargs or {}
    return str(asked.get("dtype") or asked.get("torch_dtype") or "").removeprefix("torch.")


def _on_gpu(args: GRPOConfig) -> bool:
    return args.device.type == "cuda"


def _lacks_attention(args: GRPOConfig, places: Mapping[str, str]) -> dict[str, Any] | None:
    """An attention that this machine lacks."""
    asked = (args.model_init_kwargs or {}).get("attn_implementation")
    package = _ATTENTION.get(str(asked))
    if package is None or (_on_gpu(args) and importlib.util.find_spec(package) is not None):
        return None
    return {
        "at": at(places, "attn_implementation"),
        "attn_implementation": asked,
        "missing": f"the package {package} is not installed" if _on_gpu(args) else "there is no GPU",
    }


NUMBERS: tuple[Rule, ...] = (
    Rule(code="M010", needs=("model",), when=_pickles),
    Rule(
        code="M014",
        needs=("places",),
        wants=("config", "lora", "quantization"),
        when=_rounded_weights,
        says=lambda *facts, at, what: f"{at}: its weights are {what}, and rounded weights cannot be trained themselves",
        why="a step is smaller than the distance between two values that they can have",
        cure="train an adapter: `lora: {r: 16}` (peft_config=LoraConfig(...) in Python)",
    ),
    Rule(
        code="M015",
        needs=("settings", "quantization"),
        when=lambda args, quantization: (
            bits_of(quantization) and list(rounding_errors(bits_of(quantization), args.device))
        ),
    ),
    Rule(
        code="M015",
        severity="warning",
        wants=("given",),
        when=lambda args, given: _dtype(args) == "float16" and not _on_gpu(args),
        says=lambda args, given: "dtype is float16, and there is no GPU",
        why="products in float16 are slow or missing on a CPU, and gradients below 6e-8 vanish",
        cure=lambda args, given: line(given, "dtype", "float32"),
        about=("dtype",),
    ),
    Rule(
        code="M015",
        wants=("given",),
        when=lambda args, given: (
            _dtype(args) == "bfloat16"
            and _on_gpu(args)
            and gpu_planned() is None
            and not torch.cuda.is_bf16_supported()
        ),
        says=lambda args, given: f"dtype is bfloat16, which {torch.cuda.get_device_name()} does not have",
        cure=lambda args, given: line(given, "dtype", "float32"),
        about=("dtype",),
    ),
    Rule(
        code="M015",
        needs=("settings", "places"),
        when=_lacks_attention,
        says=lambda args, places, *, at, attn_implementation, missing: f"{at} is {attn_implementation}, and {missing}",
        cure="leave it out: attention over shared prefixes is Podium's own",
    ),
)
"""Formats of weights and of numbers that this machine, or training, cannot use."""


# ---- parts of the model ----


def _adapter_targets(model: ModelFacts, lora: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[Finding]:
    """Layers that the adapter names and the model lacks."""
    targets = lora.get("target_modules")
    if isinstance(targets, str) or not targets:
        return
    if "lm_head" in targets:
        yield Finding(
            code="M020",
            severity="error",
            what=f"{at(places, 'lora')}: target_modules names lm_head; an adapter on the head is not supported",
            fix="take lm_head out of target_modules",
            facts={"at": at(places, "lora")},
        )
    modules = [name.removesuffix(".weight") for name in model.tensors if name.endswith(".weight")]
    missing = [name for name in sorted(targets) if not any(m == name or m.endswith(f".{name}") for m in modules)]
    if modules and missing:
        linear = [n for n, shape in model.tensors.items() if len(shape) == 2 and "embed" not in n]
        layers = sorted({name.split(".")[-2] for name in linear if name.count(".") > 1})
        yield Finding(
            code="M020",
            severity="error" if len(missing) == len(targets) else "warning",
            what=f"{at(places, 'lora')}: target_modules {listed(missing)} name no layer of {model.name}",
            why=f"its layers are {listed(layers)}",
            fix='target_modules: all-linear ("all-linear" takes them all but the head)',
            facts={"at": at(places, "lora"), "missing": missing, "model_name": model.name, "layers": layers},
        )


def _has_layers(model: ModelFacts, lora: Mapping[str, Any] | None) -> bool:
    """Whether the model has the layers that an adapter names."""
    return lora is None or not any(_adapter_targets(model, lora, {}))


def _frozen_parameters(
    args: GRPOConfig, model: ModelFacts, config: PretrainedConfig, lora: Mapping[str, Any] | None
) -> PodiumError | None:
    """Parameters to freeze that the model lacks, or that are all it has."""
    if args.frozen_parameters is None or not _has_layers(model, lora):
        return None
    try:
        return raised(meta_model, config, args, _adapter(lora))
    except CANNOT_BUILD:
        return None


def _teacher(
    args: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: RowSurvey | None,
    builder: PromptBuilder | None,
) -> PodiumError | None:
    """A teacher that is not there, has another tokenizer, says nothing, or cannot read what it is to judge."""
    if args.teacher_model is None:
        return None
    rows = None
    if train is not None and not train.source.is_stream:
        rows = (row for _, row in train.source.rows() if isinstance(row, Mapping))
    return raised(checked_teacher, args, tokenizer, load_settings(args, None, None), rows, builder)


def _architecture(model: ModelFacts, config: PretrainedConfig) -> Finding | None:
    """How an architecture that docs/scale.md does not list samples and trains, found out on a small random model."""
    kind = config.model_type
    if kind in MEASURED:
        return None
    unlisted = f"{model.name}: {kind} is not among the architectures of docs/scale.md"
    known: dict[str, Any] = {"name": model.name, "model_type": kind}
    tried = try_architecture(config)
    if tried is None:
        what = (
            f"{unlisted}, and no small model of its configuration could be built and run; training tries the model "
            "itself when it is loaded"
        )
        return Finding(code="M026", severity="note", what=what, facts=known)
    known["num_layers"] = tried.num_layers
    way = "live engine, shared prefixes"
    if tried.why_not:
        known["why_not"] = tried.why_not
        way = f"transformers' generate, and a padded row for each completion in training: {tried.why_not}"
    what = f"{unlisted}; a small random model of its configuration ({tried.num_layers} layers) was tried: {way}"
    return Finding(code="M026", severity="note", what=what, facts=known)


PARTS: tuple[Rule, ...] = (
    Rule(code="M020", needs=("model", "lora", "places"), when=_adapter_targets),
    Rule(code="M020", needs=("settings", "model", "config"), wants=("lora",), when=_frozen_parameters),
    Rule(code="M021", needs=("settings", "config"), when=no_router),
    Rule(code="M026", needs=("model", "config"), when=_architecture),
    Rule(
        code="C063",
        needs=("settings", "tokenizer"),
        wants=("train", "builder"),
        when=_teacher,
        about=("teacher_model",),
    ),
)
"""Parts that the settings name and the model lacks, and how it is trained."""


# ---- memory ----


_ADAPTER_SIZE = ("r", "target_modules", "modules_to_save", "use_dora", "lora_bias")
"""Settings that decide the size of an adapter."""


def _adapter(lora: Mapping[str, Any] | None) -> LoraConfig | None:
    """The adapter as far as its size goes."""
    if lora is None:
        return None
    given = {name: lora[name] for name in _ADAPTER_SIZE if lora.get(name) is not None}
    return LoraConfig(**{"task_type": "CAUSAL_LM", **given})


def of_config(
    compute: Callable[..., T],
    config: PretrainedConfig,
    args: GRPOConfig,
    train: RowSurvey | None,
    lora: Mapping[str, Any] | None,
    quantization: Mapping[str, Any] | None,
) -> T | None:
    """`compute(config, args, prompt_tokens=..., pixels=..., peft_config=..., bits=...)`; 0 where no prompt is known.

    None where the model cannot be built from its configuration alone.
    """
    longest = train.longest[0] if train is not None else 0
    pixels = train.most_pixels if train is not None else 0
    bits = 0 if lora is None else bits_of(quantization or {})
    try:
        return compute(config, args, prompt_tokens=longest, pixels=pixels, peft_config=_adapter(lora), bits=bits)
    except CANNOT_BUILD:
        return None


def _memory(
    args: GRPOConfig,
    model: ModelFacts,
    has_program: bool,
    given: Mapping[str, Any],
    places: Mapping[str, str],
    train: RowSurvey | None,
    lora: Mapping[str, Any] | None,
    quantization: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    """The peak, estimated from the configuration, against the free memory of the device; a plan says it itself."""
    if model.config is None or not _has_layers(model, lora) or gpu_planned() is not None:
        return
    estimate = of_config(estimate_memory, model.config, args, train, lora, quantization)
    if estimate is None:
        return
    if args.device.type == "cpu" and estimate.num_parameters >= LARGE_FOR_CPU:
        yield Finding(
            code="C038",
            severity="warning",
            what=(
                f"there is no GPU here, and {at(places, 'model')} has {estimate.num_parameters / 1e9:.1f} billion "
                "parameters: it would be trained on the CPU"
            ),
            why="a step takes minutes to hours",
            fix=f"run it on a machine with a GPU, or take a smaller model: {as_line('model', BUILTIN)}",
        )
    peak = gigabytes(estimate.peak_bytes)
    there = gigabytes(estimate.available_bytes or 0)
    who = "the run"
    for_each = ""
    on_each = ""
    if estimate.processes > 1:
        who = f"each of {estimate.processes} processes"
        for_each = " for each"
        on_each = f" on each of {estimate.processes} processes"
    if estimate.fits:
        longer = "; longer prompts, which the agent writes, take more" if has_program else ""
        yield Finding(
            code="C029",
            severity="note",
            what=(
                f"about {peak} at the peak{on_each}, estimated; {args.device.type} has {there} free{for_each}; "
                f"{estimate.num_trained:,} of {estimate.num_parameters:,} parameters are trained{longer}"
            ),
        )
    elif estimate.reference_bytes and estimate.peak_bytes - estimate.reference_bytes <= (estimate.available_bytes or 0):
        yield Finding(
            code="C015",
            severity="warning",
            what=(
                f"beta is {args.beta:g}: the reference model is a second copy of "
                f"{gigabytes(estimate.reference_bytes)}; with it {who} takes about {peak}, and {there} are "
                f"free{for_each}"
            ),
            why="by this estimate it would fit without the copy",
            fix=f"{line(given, 'beta', 0)}, or train an adapter, whose reference is the model without it",
            settings=("beta",),
        )
    else:
        most = estimate.largest_num_generations
        smaller = "`lora: {r: 16}`"
        if most and most < args.num_generations:
            smaller = line(given, "num_generations", most)
        yield Finding(
            code="C028",
            severity="warning",
            what=(
                f"{who} takes about {peak} at its peak, estimated, and {args.device.type} has {there} free{for_each}"
            ),
            why=", ".join(f"{part} {much}" for part, much in estimate.rows() if "GB" in much),
            fix=f"{smaller}, a shorter max_completion_length, or a smaller model",
        )


RULES: tuple[Rule, ...] = (
    Rule(code="M023", needs=("model",), when=lambda model: model.unasked and unasked_model(model.name)),
    Rule(
        needs=("model", "config"),
        when=lambda model, config: model.folder is not None and misfits(model.name, config, model.tensors),
    ),
    *TOKENS,
    *TEMPLATE,
    *NUMBERS,
    *PARTS,
    Rule(
        needs=("settings", "model", "has_program", "given", "places"),
        wants=("train", "lora", "quantization"),
        when=_memory,
    ),
)
