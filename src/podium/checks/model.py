"""Rules about the model and its tokenizer, from their small files and the headers of the large ones."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig

from podium.checks.public import unasked_model
from podium.checks.setup import Setup, with_args
from podium.data.prompts import apply_template
from podium.errors import Finding, PodiumError
from podium.errors.texts import as_line, as_lines, listed
from podium.models.builtin import BUILTIN
from podium.models.loading import bits_of, rounding_errors
from podium.models.trial import MEASURED, try_architecture
from podium.models.weights import misfits
from podium.planning.estimates.memory import MemoryEstimate, estimate_memory, gigabytes, meta_model
from podium.rewards.resolve import as_list
from podium.trainer.assembly import load_settings
from podium.trainer.config import GRPOConfig
from podium.trainer.preflight import no_router
from podium.trainer.teacher import checked_teacher

CANNOT_BUILD = (ValueError, AttributeError, RuntimeError)
"""Raised for architectures that only their own code can build."""
LARGE_FOR_CPU = 1_000_000_000
"""Parameters from which training on a CPU is worth a warning."""


def unasked(setup: Setup) -> Iterator[Finding]:
    """A model whose configuration is known here and that the hub could not be asked for."""
    if setup.model is not None and setup.model.unasked:
        yield unasked_model(setup.model.name)


def weights(setup: Setup) -> Iterator[Finding]:
    """Names and shapes in the files against those that the configuration describes."""
    facts = setup.model
    if facts is not None and facts.config is not None and facts.folder is not None:
        yield from misfits(facts.name, facts.config, facts.tensors)


def vocabulary(setup: Setup) -> Iterator[Finding]:
    """Tokens without a row of the embedding."""
    facts, tokenizer = setup.model, setup.tokenizer
    if facts is None or facts.config is None:
        return
    shape = facts.embedding
    rows = facts.config.get_text_config().vocab_size if shape is None else shape[0]
    if tokenizer is not None and len(tokenizer) > rows:
        token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
        what = f"{facts.name}: the embedding has {rows:,} rows, but the tokenizer has {len(tokenizer):,} tokens; "
        what += f"token {len(tokenizer) - 1} (`{token}`) has no row"
        why = "the first prompt with such a token ends in `index out of range`"
        if is_used := max(_certain_ids(setup), default=0) >= rows:
            why = "every prompt has such a token, and ends in `index out of range`"
        fix = "take the model's own tokenizer, or once: model.resize_token_embeddings(len(tokenizer)); "
        fix += "model.save_pretrained(folder)"
        yield Finding(severity="error" if is_used else "warning", code="M007", what=what, why=why, fix=fix)


def _certain_ids(setup: Setup) -> Iterator[int]:
    """Tokens that stand in every prompt: those of the chat template, or of the first plain prompt."""
    rows = setup.train.examples if setup.train is not None else ()
    prompt = next((row.get("prompt") for row in rows), None)
    text = prompt if isinstance(prompt, str) else _render(setup, [{"role": "user", "content": ""}], prompt=True)
    if setup.tokenizer is not None and text:
        yield from setup.tokenizer(text, add_special_tokens=False)["input_ids"]


def special_tokens(setup: Setup) -> Iterator[Finding]:
    """Padding and end."""
    tokenizer = setup.tokenizer
    if tokenizer is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding(
            code="M005",
            severity="note",
            what=f"pad and end token are the same (`{tokenizer.eos_token}`, id {tokenizer.eos_token_id})",
            why="harmless here: what is padding is known by position, never by id",
            facts={"eos_token": tokenizer.eos_token, "eos_token_id": tokenizer.eos_token_id},
        )


def end_tokens(setup: Setup) -> Iterator[Finding]:
    """The tokens that end a turn, as the tokenizer, the generation configuration and the chat template have them."""
    facts, tokenizer = setup.model, setup.tokenizer
    if facts is None or tokenizer is None:
        return
    chosen = (setup.args.generation_kwargs or {}).get("eos_token_id") if setup.args is not None else None
    ends = set(as_list(chosen)) or facts.end_ids | {tokenizer.eos_token_id} - {None}
    closing = _closing_token(setup)
    names = ", ".join(f"`{tokenizer.convert_ids_to_tokens(i)}` ({i})" for i in sorted(ends) if 0 <= i < len(tokenizer))
    if closing is not None and closing not in ends:
        token = tokenizer.convert_ids_to_tokens(closing)
        what = f"{facts.name}: the chat template ends a turn with `{token}` ({closing}), but generation ends at {names}"
        why = "the model writes its end and goes on: completions run to max_completion_length"
        fix = f"generation_kwargs: {{eos_token_id: {sorted({closing, *ends})}}}"
        yield Finding(severity="warning", code="M018", what=what, why=why, fix=fix)
    elif facts.end_ids and tokenizer.eos_token_id not in facts.end_ids:
        what = f"{facts.name}: the tokenizer's end token {tokenizer.eos_token_id} is not among the end tokens of the "
        what += f"generation configuration, {sorted(facts.end_ids)}; a completion ends at each of {names}"
        yield Finding(severity="note", code="M018", what=what)


def _template_kwargs(setup: Setup) -> Mapping[str, Any]:
    if setup.builder is not None:
        return setup.builder.chat_template_kwargs
    return (setup.args.chat_template_kwargs if setup.args is not None else None) or {}


def _render(setup: Setup, messages: list[dict[str, str]], *, prompt: bool, **kwargs: Any) -> str | None:
    assert setup.tokenizer is not None
    settings = {**_template_kwargs(setup), **kwargs, "add_generation_prompt": prompt}
    try:
        return apply_template(setup.tokenizer, messages, settings=settings)
    except Exception:  # noqa: BLE001 - a template can raise anything; its rows are tried one by one elsewhere
        return None


_USER, _ANSWER = {"role": "user", "content": "2+2?"}, "It is four."


def _closing_token(setup: Setup) -> int | None:
    """The first special token behind an assistant's answer."""
    if setup.tokenizer is None or not getattr(setup.tokenizer, "chat_template", None):
        return None
    text = _render(setup, [_USER, {"role": "assistant", "content": _ANSWER}], prompt=False)
    if text is None or _ANSWER not in text:
        return None
    rest = setup.tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = set(setup.tokenizer.all_special_ids) | set(setup.tokenizer.added_tokens_decoder)
    return next((i for i in rest if i in special), None)


def template(setup: Setup) -> Iterator[Finding]:
    """A prompt that is no prefix of the text with its answer."""
    if setup.tokenizer is None or not getattr(setup.tokenizer, "chat_template", None):
        return
    before = _render(setup, [_USER], prompt=True)
    after = _render(setup, [_USER, {"role": "assistant", "content": _ANSWER}], prompt=False)
    if before is None or after is None:
        return
    opening = after.removeprefix(before).partition(_ANSWER)[0].strip()
    if after.startswith(before):
        # What stands behind a generation prompt, such as an empty block of thinking, is the model's to write.
        if opening and _ANSWER not in before and before == _render(setup, [_USER], prompt=False):
            what = f"the chat template leaves out the assistant's turn: a prompt ends without {opening!r}, which "
            what += "stands in front of an answer"
            why = "the model writes it first, as a part of every completion, and rewards see it"
            fix = "use the template that came with the model, or end it with "
            fix += f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
            yield Finding(severity="warning", code="M025", what=what, why=why, fix=fix)
        return
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
    what = "the chat template is not prefix-stable: with the answer in place the text differs from the prompt at "
    what += f"character {same} ({before[same : same + 30]!r} became {after[same : same + 30]!r})"
    why = "harmless for one answer, which is sampled from the prompt as it is; a conversation of several turns would "
    why += "not be seen as it was sampled"
    fix = "give chat_template_kwargs that keep the prompt, such as {enable_thinking: false} for Qwen3"
    yield Finding(severity="note", code="M019", what=what, why=why, fix=fix)


def date(setup: Setup) -> Iterator[Finding]:
    """A template that writes today's date into every prompt."""
    if setup.tokenizer is None or not getattr(setup.tokenizer, "chat_template", None):
        return
    formats: list[str] = []

    def clock(form: str) -> str:
        formats.append(form)
        return ""

    today = _render(setup, [_USER], prompt=True)
    # A variable of a conversation comes before the function of that name that transformers gives to all templates.
    _render(setup, [_USER], prompt=True, strftime_now=clock)
    dates = [datetime.datetime.now().strftime(form) for form in formats]
    if today is None or not any(each in today for each in dates):
        return
    fix = (
        "to keep it, give a copy of the template in which the date is a text: "
        "chat_template_kwargs: {chat_template: TEXT}"
    )
    changes: dict[str, Any] = {}
    facts = {"date": dates[0]}
    if today != _render(setup, [_USER], prompt=True, date_string="podium"):  # as in Llama 3
        changes = {"chat_template_kwargs": {**_template_kwargs(setup), "date_string": dates[0]}}
        facts["line"] = as_lines(changes)
        fix = f"to keep it: {as_lines(changes)}"
    yield Finding(
        code="M027",
        severity="note",
        what=f"the chat template writes the date of the day into every prompt (today '{dates[0]}')",
        why="a run that is repeated or resumed on another day has other prompts, and is not the same run",
        fix=fix,
        changes=changes,
        facts=facts,
    )


def pickles(setup: Setup) -> Iterator[Finding]:
    """Weights in Python's pickle format."""
    folder = setup.model.folder if setup.model is not None else None
    if folder is None or any(folder.glob("*.safetensors")):
        return
    for file in sorted(folder.glob("pytorch_model*.bin"))[:1]:
        what = f"{folder} has its weights as a pickle ({file.name}) and not as safetensors"
        why = "a pickle is a program; it is read without running it, but cannot be checked before"
        fix = 'python -c "from transformers import AutoModelForCausalLM as M; '
        fix += f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        yield Finding(severity="warning", code="M010", what=what, why=why, fix=fix)


def quantized(setup: Setup) -> Iterator[Finding]:
    """Rounded weights that are to be trained themselves, and the library that reads them."""
    of_model = getattr(setup.model.config, "quantization_config", None) if setup.model and setup.model.config else None
    asked = bits_of(setup.quantization or {})
    if (of_model is not None or asked) and setup.lora is None:
        kind = f"{bits} bits" if (bits := bits_of(of_model) if isinstance(of_model, dict) else 0) else "quantized"
        what = f"{asked} bits" if asked else f"{kind} (its config.json has a quantization_config)"
        yield Finding(
            code="M014",
            severity="error",
            what=f"{setup.at('model')}: its weights are {what}, and rounded weights cannot be trained themselves",
            why="a step is smaller than the distance between two values that they can have",
            fix="train an adapter: `lora: {r: 16}` (peft_config=LoraConfig(...) in Python)",
            facts={"at": setup.at("model"), "what": what},
        )
    if asked and setup.args is not None:
        for error in rounding_errors(asked, setup.args.device):
            yield setup.finding(error, f"load_in_{asked}bit")


_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


@with_args
def precision(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A dtype or an attention that this machine lacks."""
    asked = dict(args.model_init_kwargs or {})
    dtype = str(asked.get("dtype") or asked.get("torch_dtype") or "").removeprefix("torch.")
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    at, fix = setup.at("dtype"), setup.line("dtype", "float32")
    if dtype == "float16" and not on_gpu:
        why = "products in float16 are slow or missing on a CPU, and gradients below 6e-8 vanish"
        yield Finding(severity="warning", code="M015", what=f"{at} is float16, and there is no GPU", why=why, fix=fix)
    if dtype == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported():
        what = f"{at} is bfloat16, which {torch.cuda.get_device_name()} does not have"
        yield Finding(severity="error", code="M015", what=what, fix=fix)
    package = _ATTENTION.get(str(asked.get("attn_implementation")))
    if package is not None and (not on_gpu or importlib.util.find_spec(package) is None):
        missing = "there is no GPU" if not on_gpu else f"the package {package} is not installed"
        yield Finding(
            code="M015",
            severity="error",
            what=f"{setup.at('attn_implementation')} is {asked['attn_implementation']}, and {missing}",
            fix="leave it out: attention over shared prefixes is Podium's own",
            facts={
                "at": setup.at("attn_implementation"),
                "attn_implementation": asked["attn_implementation"],
                "missing": missing,
            },
        )


def architecture(setup: Setup) -> Iterator[Finding]:
    """How an architecture that docs/scale.md does not list samples and trains, found out on a small random model."""
    facts = setup.model
    if facts is None or facts.config is None or facts.config.model_type in MEASURED:
        return
    kind = facts.config.model_type
    unlisted = f"{facts.name}: {kind} is not among the architectures of docs/scale.md"
    known: dict[str, Any] = {"name": facts.name, "model_type": kind}
    tried = try_architecture(facts.config)
    if tried is None:
        what = (
            f"{unlisted}, and no small model of its configuration could be built and run; training tries the model "
            "itself when it is loaded"
        )
        yield Finding(code="M026", severity="note", what=what, facts=known)
        return
    known["num_layers"] = tried.num_layers
    way = "live engine, shared prefixes"
    if tried.why_not:
        known["why_not"] = tried.why_not
        way = f"transformers' generate, and a padded row for each completion in training: {tried.why_not}"
    what = f"{unlisted}; a small random model of its configuration ({tried.num_layers} layers) was tried: {way}"
    yield Finding(code="M026", severity="note", what=what, facts=known)


def adapter_targets(setup: Setup) -> Iterator[Finding]:
    """Layers that the adapter names and the model lacks."""
    targets = (setup.lora or {}).get("target_modules")
    if setup.model is None or isinstance(targets, str) or not targets:
        return
    if "lm_head" in targets:
        yield Finding(
            code="M020",
            severity="error",
            what=f"{setup.at('lora')}: target_modules names lm_head; an adapter on the head is not supported",
            fix="take lm_head out of target_modules",
            facts={"at": setup.at("lora")},
        )
    modules = [name.removesuffix(".weight") for name in setup.model.tensors if name.endswith(".weight")]
    missing = [name for name in sorted(targets) if not any(m == name or m.endswith(f".{name}") for m in modules)]
    if modules and missing:
        linear = [n for n, shape in setup.model.tensors.items() if len(shape) == 2 and "embed" not in n]
        layers = sorted({name.split(".")[-2] for name in linear if name.count(".") > 1})
        at = setup.at("lora")
        yield Finding(
            code="M020",
            severity="error" if len(missing) == len(targets) else "warning",
            what=f"{at}: target_modules {listed(missing)} name no layer of {setup.model.name}",
            why=f"its layers are {listed(layers)}",
            fix='target_modules: all-linear ("all-linear" takes them all but the head)',
            facts={"at": at, "missing": missing, "model_name": setup.model.name, "layers": layers},
        )


@with_args
def frozen_parameters(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """Parameters to freeze that the model lacks, or that are all it has."""
    config = setup.model.config if setup.model is not None else None
    if config is None or args.frozen_parameters is None or any(adapter_targets(setup)):
        return
    try:
        meta_model(config, args, _adapter(setup))
    except PodiumError as error:
        yield setup.finding(error, "frozen_parameters")
    except CANNOT_BUILD:
        return


@with_args
def router(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A load-balancing loss for a model without a router."""
    config = setup.model.config if setup.model is not None else None
    if config is not None and (error := no_router(args, config)):
        yield setup.finding(error, "router_aux_loss_coef")


@with_args
def teacher(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A teacher that is not there, has another tokenizer, says nothing, or cannot read what it is to judge."""
    if args.teacher_model is None or setup.tokenizer is None:
        return
    source = None if setup.train is None else setup.train.source
    rows = None if source is None or source.is_stream else (x for _, x in source.rows() if isinstance(x, Mapping))
    try:
        checked_teacher(args, setup.tokenizer, load_settings(args, None, None), rows, setup.builder)
    except PodiumError as error:
        yield setup.finding(error, "teacher_model")


@with_args
def memory(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """The peak, estimated from the configuration, against the free memory of the device."""
    estimate = _estimate(setup, args)
    if estimate is None or setup.model is None:
        return
    if args.device.type == "cpu" and estimate.num_parameters >= LARGE_FOR_CPU:
        what = f"there is no GPU here, and {setup.at('model')} has {estimate.num_parameters / 1e9:.1f} billion "
        what += "parameters: it would be trained on the CPU"
        fix = "run it on a machine with a GPU, or take a smaller model: " + as_line("model", BUILTIN)
        yield Finding(severity="warning", code="C038", what=what, why="a step takes minutes to hours", fix=fix)
    peak, there = gigabytes(estimate.peak_bytes), gigabytes(estimate.available_bytes or 0)
    who, for_each = "the run", ""
    if estimate.processes > 1:
        who, for_each = f"each of {estimate.processes} processes", " for each"
    if estimate.fits:
        on_each = "" if estimate.processes == 1 else f" on each of {estimate.processes} processes"
        what = f"about {peak} at the peak{on_each}, estimated; {args.device.type} has {there} free{for_each}; "
        what += f"{estimate.num_trained:,} of {estimate.num_parameters:,} parameters are trained"
        what += "; longer prompts, which the agent writes, take more" * setup.has_program
        yield Finding(severity="note", code="C029", what=what)
    elif estimate.reference_bytes and estimate.peak_bytes - estimate.reference_bytes <= (estimate.available_bytes or 0):
        what = f"{setup.at('beta')} is {args.beta:g}: the reference model is a second copy of "
        what += (
            f"{gigabytes(estimate.reference_bytes)}; with it {who} takes about {peak}, and {there} are free{for_each}"
        )
        fix = f"{setup.line('beta', 0)}, or train an adapter, whose reference is the model without it"
        yield Finding(
            severity="warning", code="C015", what=what, why="by this estimate it would fit without the copy", fix=fix
        )
    else:
        most = estimate.largest_num_generations
        smaller = setup.line("num_generations", most) if most and most < args.num_generations else "`lora: {r: 16}`"
        what = f"{who} takes about {peak} at its peak, estimated, and {args.device.type} has {there} free{for_each}"
        why = ", ".join(f"{what} {much}" for what, much in estimate.rows() if "GB" in much)
        fix = f"{smaller}, a shorter max_completion_length, or a smaller model"
        yield Finding(severity="warning", code="C028", what=what, why=why, fix=fix)


_ADAPTER_SIZE = ("r", "target_modules", "modules_to_save", "use_dora", "lora_bias")
"""Settings that decide the size of an adapter."""


def _adapter(setup: Setup) -> LoraConfig | None:
    """The adapter as far as its size goes."""
    if setup.lora is None:
        return None
    given = {name: setup.lora[name] for name in _ADAPTER_SIZE if setup.lora.get(name) is not None}
    return LoraConfig(**{"task_type": "CAUSAL_LM", **given})


def _estimate(setup: Setup, args: GRPOConfig) -> MemoryEstimate | None:
    """None where the model cannot be built from its configuration alone."""
    facts, longest = setup.model, setup.train.longest[0] if setup.train is not None else 0
    if facts is None or facts.config is None or any(adapter_targets(setup)):
        return None
    lora = _adapter(setup)
    bits = 0 if lora is None else bits_of(setup.quantization or {})
    try:
        return estimate_memory(facts.config, args, prompt_tokens=max(longest, 1), peft_config=lora, bits=bits)
    except CANNOT_BUILD:
        return None
