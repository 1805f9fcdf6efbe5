"""`GRPOConfig`: TRL's, so every argument, default and parsing rule is TRL's own, with Podium's fields and checks."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import logging
import math
import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast, get_type_hints

import torch
import trl

from podium.agents.chat import with_named_template
from podium.errors import ArgumentError, ConfigError, Finding, named_in, pip_line
from podium.errors.rule import Facts, Rule, Settings, broken, error_of, of_error
from podium.errors.texts import as_line, plain, with_fix
from podium.models.devices import kind_of
from podium.runs.redaction import without_secrets
from podium.trainer.machine import this_machine
from podium.trainer.names import meant
from podium.trainer.planned import gpu_planned, launch_planned
from podium.trainer.rules import (
    CHOICES,
    FILTERS,
    RANGES,
    SENSIBLE,
    WITHOUT_EFFECT,
    actions,
    choice_rule,
    enumerated,
    generation_problem,
    range_rule,
    taken_generation_kwargs,
    warn_of_no_overrule,
)
from podium.trainer.setting_rules import (
    BATCHES,
    CONTRADICTIONS,
    FORMS,
    LENGTHS,
    OFF_POLICY,
    ON_CPU,
    missing_packages,
    refused_by,
    vllm_rule,
)

logger = logging.getLogger(__name__)


def option(default: Any, text: str) -> Any:
    """A field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def documented(cls: type) -> str:
    """The docstring of a class of options, and a line with the default and the help text of every field, by name."""
    lines = [inspect.getdoc(cls) or "", "", "Fields:"]
    for option in sorted(dataclasses.fields(cls), key=lambda option: option.name):
        default = "" if option.default is dataclasses.MISSING else f" = {option.default!r}"
        lines.append(f"    {option.name}{default}")
        lines += textwrap.wrap(
            str(option.metadata.get("help") or ""), 110, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


class _Signature:
    """Descriptor whose value is the signature of a class's `__init__`; `__new__`, which takes anything, hides it."""

    def __get__(self, _: Any, owner: type) -> inspect.Signature:
        found = inspect.signature(owner.__init__)  # type: ignore[misc]
        return found.replace(parameters=[*found.parameters.values()][1:])


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's `GRPOConfig` with Podium's additions; it checks early what TRL checks late.

    Differences in defaults: `gradient_checkpointing` is decided by memory unless set (packs bound the activations, so
    it is rarely needed); `bf16` and `use_cpu` follow the device unless set; a NaN loss is logged as NaN. `gspo` is
    accepted as a `loss_type`; `max_steps=None` means no limit.

    Raises `ConfigError` (a `ValueError`) for a value that cannot work or that would have to be ignored.
    """

    gradient_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass. None: only when memory needs it."
    )
    logging_nan_inf_filter: bool = option(False, "Replace a NaN loss in the logs. Off: a NaN has to be seen.")
    rollout_engine: str = option(
        "auto",
        "What samples completions: `live` (Podium's own, from the trainer's weights), `transformers` "
        "(`model.generate`), `vllm` (as `use_vllm`), or `auto`: live wherever the model and the settings allow it.",
    )
    vllm_server_base_url: str | list[str] | None = option(
        None,
        "Address of the vLLM server, or a list of addresses, whose servers share the prompts. None: "
        "`vllm_server_host` and `vllm_server_port`.",
    )
    vllm_weights_folder: str | None = option(
        None,
        "With a vLLM server, a folder through which weights go to it, and which it must see under the same "
        "path. None: over NCCL where both have it, else a folder in output_dir, for a server on this machine.",
    )
    async_rollouts: int = option(
        0,
        "Rounds that are sampled and scored ahead, by an engine with weights of its own, while one is trained on. "
        "Their completions are at most as many rounds old, which the loss corrects. 0: sampling and training take "
        "turns.",
    )
    rollout_device: str | None = option(
        None,
        "With `async_rollouts`, where the live engine has its copy of the weights: a GPU that does not "
        "train, such as `cuda:1`. None: the CPU, where that trains.",
    )
    max_prompt_length: int | None = option(
        None, "Most tokens a prompt may have. None: what the model's context leaves."
    )
    overlong_prompts: str = option(
        "error", "What happens to a longer prompt: `error`, `drop` or `truncate` (on the left)."
    )
    advantage_estimator: str = option(
        "grpo",
        "How rewards become advantages: `grpo` (as `scale_rewards` and `multi_objective_aggregation` say), `rloo`, "
        "`reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `maxrl`, `opo` or `raft`; see docs/algorithm.md.",
    )
    teacher_model: str | None = option(
        None,
        "On-policy distillation: a model with the same tokenizer (a folder, a run, a hub id, or the `http://` address "
        "of a vLLM server), to which each token of a completion is compared. `policy`: the policy itself, behind the "
        "row's `teacher_prompt`. None: no teacher.",
    )
    teacher_coef: float = option(
        1.0, "Weight of log pi_teacher - log pi in the advantage of a token; only with `teacher_model`."
    )
    teacher_coef_end: float | None = option(
        None, "That weight at the last step; it moves there on a straight line. None: it stays as it is."
    )
    covariance_control: str = option(
        "none",
        "What to do with the few likely tokens of high advantage that take the entropy away (arXiv:2505.22617): `clip` "
        "leaves some of them out, `kl` holds them near the policy that sampled, `none` nothing.",
    )
    covariance_share: float = option(2e-4, "Share of a round's tokens that this concerns.")
    observation_coef: float = option(
        0.0,
        "Weight of the cross-entropy of the tokens that tools, an environment or an `agent` gave to the policy, which "
        "learns to predict them (ECHO, arXiv:2605.24517; 0.1 is usual). 0: they are context alone.",
    )
    balance_column: str | None = option(
        None, "A column whose values are few, such as labels: rows are drawn so that each value comes equally often."
    )
    dynamic_sampling: bool = option(
        False, "Replace groups without spread in their rewards by fresh prompts (DAPO, arXiv:2503.14476)."
    )
    max_resamples: int = option(3, "Most rounds of replacement that a generation round may take.")
    frozen_parameters: str | None = option(
        None,
        "Parameters that are not trained: those in whose names this regular expression is found, such as "
        "`embed_tokens`. They need no gradient and no optimizer state. None: all are trained.",
    )
    train_image_encoder: bool = option(
        False,
        "Also train what is outside the language model: the encoder of images and what connects it. With an adapter "
        "its `target_modules` may then name layers there. False: they are frozen.",
    )
    product_precision: str = option(
        "auto",
        "Precision of matrix products on a CPU: `float32`, `bfloat16` (weights, gradients and optimizer "
        "stay float32), or `auto`: bfloat16 where it measures faster. On a GPU `bf16` decides.",
    )
    reward_timeout: float | None = option(
        None,
        "Seconds after which a call of a reward function in a file (`file.py:function`) is ended and has failed; one "
        "in this process is waited for, and a warning says so. None or 0: all are waited for.",
    )
    on_reward_error: str = option(
        "raise",
        "What becomes of a reward function that raises, runs over its limit or returns no finite number: "
        "`raise` ends the run, `none` leaves it out, a number is taken in its place.",
    )
    tool_timeout: float | None = option(
        60.0, "Seconds that one call of a tool, or one step of an environment, may take. 0: no limit."
    )
    max_tool_result_tokens: int | None = option(
        None, "Most tokens of one result of a tool; what is cut off is counted. None: no limit."
    )
    tool_result_cut: str = option("right", "Side where a result that is too long is cut: `left`, `middle` or `right`.")
    max_turns: int | None = option(None, "Most turns of the policy in one completion. None: no limit.")
    agent_timeout: float | None = option(
        120.0,
        "Seconds that an `agent` may take in one episode by itself, without those in which it waits for answers. 0: no "
        "limit.",
    )
    tool_order: str = option(
        "fixed",
        "With the live engine, when a completion goes on after its tools: `fixed` (all of a turn together, so that "
        "runs are bit-equal however long tools take) or `arrival` (each as soon as its own have answered).",
    )
    sampling_replay: bool = option(
        True,
        "With `top_p`, `top_k` or `min_p`, keep the tokens that could be drawn in place of each token, and normalize "
        "its log-probabilities in training over those. False: over all tokens, as in TRL.",
    )
    turn_discount: float | None = option(
        None,
        "With an environment whose steps are rewarded, gives each turn an advantage of its own: from the rewards that "
        "come after it, each later one multiplied by this once more. None: every turn has that of its completion.",
    )
    mask_void_turns: bool = option(
        False, "Leave out of the loss what has a turn that is neither a call nor an answer (SimpleTIR)."
    )
    max_call_corrections: int = option(
        0, "Times that a completion is told that its call cannot be parsed, and goes on. 0: as in TRL, it has ended."
    )
    accuracy: str | None = option(
        None,
        "Name of the reward function that tells right (at least 1) from wrong. None: the one whose name suggests it "
        "(accuracy, correct, match, answer).",
    )
    eval_samples: int | None = option(None, "Completions per held-out prompt, before and after training. None: 4.")
    eval_temperature: float | None = option(None, "Temperature of those completions. None: as in training.")
    eval_rows: int | None = option(
        None,
        "Most held-out prompts that are asked before and after training: a random sample, the same every time. 0: "
        "none. None: 200; in Python, where `eval_samples` is None too, one completion for each of as many as a "
        "generation round has completions.",
    )
    reward_workers: int = option(1, "Processes for each reward function from a file that judges every row by itself.")
    adaptive_rewards: dict[str, Any] | None = option(
        None,
        "Rewards whose weights adapt to their success rate: their names, each with `true` or a mapping of "
        "settings (see `podium.rewards.adaptive`).",
    )
    prove_first_batch: bool = option(
        True,
        "Before the first optimizer step, show in seconds that sampling and training agree on this model "
        "and data, and stop where they do not. See `podium explain P004` and its neighbours.",
    )
    tokens_per_pack: int | None = option(
        None, "Most tokens in one forward and backward: it bounds activation memory. None: from the model's size."
    )
    record: bool = option(True, "Record metrics, rollouts and findings in output_dir, and look at the run's health.")
    record_megabytes: float = option(512, "Most megabytes of recorded rollouts; beyond half of it, only some groups.")
    on_finding: dict[str, str] | str | None = option(
        None, "What a finding does, by its code: `stop`, `rollback` or `ignore`. `{M132: rollback}`"
    )
    strict: bool = option(False, "Stop, with a checkpoint, at a finding of severity error.")

    _given = cast("Mapping[str, Any] | None", None)  # no annotation, or it would be an argument
    """The arguments as they were written."""

    _problems = cast("list[Finding] | None", None)
    """Takes what is wrong with the values, for `survey`; None: it is raised."""

    _made = cast("Mapping[str, Any] | None", None)
    """The values when it was made; of a copy those of `_SIZES`, and None before."""

    __signature__ = _Signature()

    def __new__(cls, *in_order: Any, **given: Any) -> GRPOConfig:
        """Raise `ArgumentError` for an argument that there is not, with all else that is wrong."""
        made = super().__new__(cls)
        made._given = {**dict(zip(arguments_of(cls), in_order, strict=False)), **given}
        if not arguments_of(cls).keys() >= given.keys():
            problems, cured_one = survey(cls, made._given)
            raise joined(cls, made._given, [*problems, *_packages(cured_one)])
        return made

    def __getstate__(self) -> dict[str, Any]:  # secrets are not hidden in what is left out
        made = self._made and {name: self._made[name] for name in _SIZES}
        left_out = ("_given", "_problems")
        return {**{name: value for name, value in vars(self).items() if name not in left_out}, "_made": made}

    def __post_init__(self) -> None:
        problems = self._settle()
        if self._problems is not None:
            self._problems += problems
        elif problems:
            raise joined(type(self), self._given or {}, [*problems, *_packages(self)])

    def _settle(self) -> list[Finding]:
        """Set the values that follow from those given; what is wrong with them, each judged beside the cures before.

        The rules look at a plain mapping. transformers and TRL then see the cured values, once, and may refuse more.
        """
        values = self._values()
        settings, problems = judged(type(self), values, self._given or {}, setting_rules())
        self.__dict__.update(_without_effect(settings, values))
        self._follow_device()
        renamed = getattr(self, "activation_checkpointing", None)  # what transformers 5.23 calls it
        checkpointing = self.gradient_checkpointing if renamed is None else renamed
        self.gradient_checkpointing = bool(checkpointing)
        try:
            super().__post_init__()
        except Exception as error:
            refused = self._refused(error)
            if refused is None:
                raise
            return [*problems, refused]
        self.gradient_checkpointing = checkpointing
        self._finish()
        return problems

    def settle_again(self) -> None:
        """Check the values that were changed since, and the size of the batch. Raises `ConfigError`."""
        made = self._made or {}
        now = self._values()
        changed = [name for name, value in now.items() if name not in made or made[name] is not value != made[name]]
        if not changed:
            return
        settings, problems = judged(type(self), now, changed, value_rules())
        if problems:
            raise error_of(problems[0])
        self.__dict__.update(_without_effect(settings, changed))
        whole = self.per_device_train_batch_size * self.world_size * self.steps_per_generation
        if "generation_batch_size" not in changed:
            self.generation_batch_size = whole
        if self.generation_batch_size != whole or whole % self.num_generations:
            listed = ", ".join(f"{name} {getattr(self, name)}" for name in _SIZES)
            raise ConfigError(
                "A batch cannot be cut into groups, or is of another size than it says, after changes of "
                f"a {type(self).__name__} that was made: {listed}.",
                code="C010",
                fix=f"give {type(self).__name__} all of them when it is made",
                settings=(
                    "generation_batch_size",
                    "num_generations",
                    "per_device_train_batch_size",
                    "steps_per_generation",
                ),
                kind=type(self).__name__,
                listed=listed,
            )
        self._finish()

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _finish(self) -> None:
        """Set what transformers and TRL leave as it is."""
        if self.chat_template_kwargs:
            self.chat_template_kwargs = with_named_template(self.chat_template_kwargs)
        if self.loss_type == "gspo":  # one spelling from here on
            self.loss_type = "grpo"
            self.importance_sampling_level = "sequence"
        if self.rollout_device is not None and self.device.type == "cuda":
            self._n_gpu = 1  # one trains, another samples
        self._made = self._values()

    def _refused(self, error: Exception) -> Finding | None:
        """What transformers or TRL refuse beyond Podium's rules, which they have only words for; None: a defect."""
        values = self._values()
        if isinstance(error, OverflowError):
            name = next(name for name, value in values.items() if value in (math.inf, -math.inf))
            return Finding(
                code="C003",
                severity="error",
                what=f"{name} is {values[name]!r}; it must be a finite number.",
                fix=as_line(name, default(name)),
                changes={name: default(name)},
                settings=(name,),
                facts={"each_name": name, "value": plain(values[name]), "kind": "a finite number"},
            )
        if isinstance(error, ValueError):
            is_half = any(name in str(error) for name in ("fp16", "bf16", "tf32"))
            fix = "take `bf16`, `fp16` and `tf32` out: what the device can is chosen"
            return Finding(
                code="C013" if is_half else "C030",
                severity="error",
                what=str(error),
                fix=fix if is_half else "",
                settings=tuple(named_in(error, values)),
            )
        if not isinstance(error, (ImportError, OSError, TypeError, KeyError, RuntimeError)):
            return None
        file = getattr(error, "filename", None)
        named = [name for name, value in values.items() if file and value == file]
        named += named_in(error, values)
        return Finding(
            code="C030",
            severity="error",
            what=f"{', '.join(named) or 'the settings'}: transformers raised {type(error).__name__}: {error}",
            fix=pip_line(error),
            settings=tuple(named),
        )

    @property
    def device(self) -> torch.device:
        """The Trainer's; several processes on the CPU share `cpu`, as torch cannot load an optimizer to `cpu:1`.

        In a check for a GPU it is one.
        """
        device: torch.device = super().device  # which also makes the state that `process_index` reads
        if gpu_planned() is not None:
            return torch.device("cuda")
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def world_size(self) -> int:
        """The number of processes; in a check of a launch, of that."""
        launch = launch_planned()
        return int(super().world_size) if launch is None else launch.processes

    def _follow_device(self) -> None:
        """Without an accelerator: CPU and float32 arithmetic in the Trainer's sense, unless set otherwise."""
        if not torch.cuda.is_available() and not self.use_cpu:
            self.use_cpu = True
            if torch.accelerator.is_available() and gpu_planned() is None:
                logger.warning(
                    "Training runs on the CPU: of accelerators only CUDA's are supported, and this machine has %s.",
                    torch.accelerator.current_accelerator(),
                )
        self.bf16_asked = bool(self.bf16)
        if kind_of("cpu" if self.use_cpu and gpu_planned() is None else "cuda").autocast:
            self._choose_half()
            return
        if self.bf16 is False and self.product_precision == "auto":
            self.product_precision = "float32"
        # Our own products in place of autocast, which rounds more and casts every weight in every forward.
        self.bf16 = False

    def _choose_half(self) -> None:
        """bfloat16 where the device has units for it, else float16 with loss scaling; what the user set stays."""
        if self.fp16 or self.bf16 is False:
            self.bf16 = False
        elif has_bfloat16():
            self.bf16 = True
        else:
            self.bf16 = False
            self.fp16 = True
            if gpu_planned() is None:  # a plan says it itself
                logger.warning(
                    "This GPU has no bfloat16 units (torch would emulate them, several times slower): float16 with "
                    "loss scaling is used%s. bf16: false computes in float32.",
                    " in place of bf16: true" if self.bf16_asked else "",
                )


GRPOConfig.__doc__ = documented(GRPOConfig)


def default(name: str) -> Any:
    """The default of a field, or a value to type where that is no example."""
    return SENSIBLE.get(name, getattr(GRPOConfig, name))


@cache
def _hints() -> Mapping[str, Any]:
    """The resolved annotations of the fields."""
    return get_type_hints(GRPOConfig)


@cache
def _enumerations() -> Mapping[str, tuple[str, ...]]:
    """The values of fields that transformers declares as an enumeration."""
    return {name: found for name, hint in _hints().items() if (found := enumerated(hint))}


_SIZES = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation", "num_generations")

# ---- values as they are judged ----

_NUMBERS = {"class", "int", "float", "bool", "None", "NoneType", "Optional", "Union", "typing"}
"""Words of the annotations that take numbers and truth values, and no text."""

_MAY_BE_NONE = ("max_steps", "max_completion_length", *FILTERS)
"""Numbers for which None has a meaning, or a message, of its own."""


def _as_number(value: Any, words: set[str]) -> Any:
    """A number or truth value that may be written as text, read as a recipe's is. Raises `ValueError`."""
    if not isinstance(value, str):
        return value
    if "bool" in words:
        return {"true": True, "false": False}[value.lower()]
    number = float(value)
    if "float" in words:
        return number
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _number_rule(name: str, words: set[str]) -> Rule:
    """The rule of a setting that is a number or a truth value, and no other text."""
    is_number = words in ({"class", "int"}, {"class", "float"}) or name == "num_generations"
    if "bool" in words:
        kind = "true or false"
    elif "float" in words:
        kind = "a number"
    else:
        kind = "a whole number"

    def wrong(settings: Settings) -> dict[str, Any] | None:
        value = settings[name]
        if value is None and is_number and name not in _MAY_BE_NONE:
            return {"each_name": name, "value": value, "kind": "a number"}
        try:
            _as_number(value, words)
        except (ValueError, KeyError, OverflowError):
            return {"each_name": name, "value": value, "kind": kind}
        return None

    return Rule(
        code="C003",
        when=wrong,
        says=lambda settings, *, value, kind, **_: f"{name} is {value!r}; it must be {kind}.",
        cure={name: default(name)},
        about=(name,),
    )


@cache
def _number_words() -> Mapping[str, set[str]]:
    """The settings that are numbers or truth values, with the words of their annotations.

    A field's own `type` is changed by transformers' parser.
    """
    words = {name: set(re.findall(r"\w+", str(annotation))) for name, annotation in _hints().items()}
    return {
        name: kinds for name, kinds in words.items() if kinds <= _NUMBERS and name in GRPOConfig.__dataclass_fields__
    }


@cache
def reading_rules() -> tuple[Rule, ...]:
    """Rules of values as they are written, before they are read."""
    numbers = [_number_rule(name, words) for name, words in _number_words().items()]
    return (*numbers, refused_by(actions, "on_finding"))


@cache
def value_rules() -> tuple[Rule, ...]:
    """Rules of values as they were read, but for the sizes of batches."""
    valued = []
    for name in {**CHOICES, **_enumerations(), **RANGES}:
        if name in CHOICES:
            valued.append(choice_rule(name, CHOICES[name], default))
        elif name in _enumerations():
            valued.append(choice_rule(name, _enumerations()[name], default, of_text=True))
        if name in RANGES:
            valued.append(range_rule(name, RANGES[name], default))
    of_vllm = [
        vllm_rule(field.name, field.default)
        for field in dataclasses.fields(GRPOConfig)
        if field.name.startswith("vllm_")
    ]
    return (*FORMS, *valued, *LENGTHS, *CONTRADICTIONS, *of_vllm, ON_CPU, *OFF_POLICY)


@cache
def setting_rules() -> tuple[Rule, ...]:
    """Rules of values as they were read."""
    return (*value_rules(), *BATCHES)


def read(values: Mapping[str, Any]) -> Settings:
    """Values in the types in which they are judged and used."""
    settings = Settings(values)
    for name, words in _number_words().items():
        settings[name] = _as_number(settings[name], words)
    settings["on_finding"] = actions(settings.on_finding)
    warn_of_no_overrule(settings.on_finding)
    if settings.max_steps is None:
        settings["max_steps"] = -1
    for name in ("top_p", "top_k", "repetition_penalty"):
        if settings[name] is None:
            settings[name] = FILTERS[name]
    if hasattr(settings.reward_weights, "tolist"):  # an array, or a tensor
        settings["reward_weights"] = settings.reward_weights.tolist()
    if str(settings.fsdp).lower() in ("true", "false"):
        settings["fsdp"] = True if str(settings.fsdp).lower() == "true" else None
    if settings.rollout_engine == "vllm":
        settings["use_vllm"] = True
    scales = {True: "group", False: "none", "True": "group", "False": "none"}
    settings["scale_rewards"] = scales.get(settings.scale_rewards, settings.scale_rewards)
    if isinstance(settings.generation_kwargs, str):
        with suppress(ValueError):
            settings["generation_kwargs"] = json.loads(settings.generation_kwargs)
    if generation_problem(settings) is None:
        settings.update(taken_generation_kwargs(settings, lambda name: getattr(GRPOConfig, name)))
    return settings


def judged(
    cls: type, values: Mapping[str, Any], given: Container[str], rules: Iterable[Rule]
) -> tuple[Settings, list[Finding]]:
    """The settings as they were read, with the cures of all that is wrong with them, and what that is.

    Nothing is built: every rule looks at a mapping, with the cures of those before. Where a problem has no cure, the
    setting that it is about has its default for the rules after it, if possible one of those given.

    Args:
        cls: of the settings, for their defaults.
        values: given ones over the defaults.
        given: names of those that were written.
        rules: of values as they were read.
    """
    found: list[Finding] = []

    def after(rule: Rule, facts: Facts) -> Settings:
        settings = Settings(facts.settings)
        for finding in broken(rule, facts):
            found.append(finding)
            about = [name for name in finding.settings if name in settings]
            taken_out = next((name for name in about if name in given), about[0] if about else None)
            changes = finding.changes or ({taken_out: None} if taken_out else {})
            settings = with_changes(cls, settings, changes)
        return settings

    settings = Settings(values)
    for rule in reading_rules():
        settings = after(rule, Facts(settings=settings))
    settings = read(settings)
    machine = this_machine(settings)
    for rule in rules:
        settings = after(rule, Facts(settings=settings, machine=machine))
    return settings, found


def _without_effect(settings: Settings, names: Container[str]) -> Settings:
    """Settings without those of `names` that change nothing here and that transformers would act on; with warnings."""
    made = Settings(settings)
    for name, (idle, reason) in WITHOUT_EFFECT.items():
        value = settings[name]
        if name in names and value != idle and value is not None:
            logger.warning("%s=%r has no effect: %s.", name, value, reason)
            if name.startswith(("use_liger", "torch_compile")):
                made[name] = idle
    return made


def _packages(args: GRPOConfig | None) -> list[ConfigError]:
    """Packages that are missing here, where the settings could be made."""
    return [] if args is None or args._made is None else list(missing_packages(args))


def with_changes(cls: type, settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Settings with changes; one that becomes None has its default."""
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    made = Settings(settings)
    for name, value in changes.items():
        made[name] = fields[name].default if value is None and name in fields else value
    return made


def with_cure(finding: Finding, given: Mapping[str, Any]) -> Finding:
    """A finding with changes that cure it: where it has none, the setting that it is about is taken out."""
    if finding.changes:
        return finding
    return dataclasses.replace(finding, changes=dict.fromkeys([name for name in finding.settings if name in given][:1]))


# ---- arguments ----


def arguments_of(cls: type) -> dict[str, Any]:
    """The arguments of a class by name; of one that hands on any, those of `GRPOConfig` too."""
    own = dict(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    own = {
        name: parameter
        for name, parameter in own.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self"
    }
    return {**own, **arguments_of(GRPOConfig)} if hands_on and issubclass(cls, GRPOConfig) else own


def unknown_arguments(cls: type, given: Mapping[str, Any]) -> list[Finding]:
    """A finding for each argument that a class does not take, with what was meant."""
    known = arguments_of(cls)
    return [_unknown(cls, name, given, known) for name in given if name not in known]


def _unknown(cls: type, name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Finding:
    fix, meaning = meant(name, given[name], known)
    if not issubclass(cls, GRPOConfig) and name in GRPOConfig.__dataclass_fields__:
        fix = f"args=GRPOConfig({name}=...)"
        meaning = None
    elif name.startswith("lora_") or name == "use_peft":
        fix = "GRPOTrainer(..., peft_config=LoraConfig(r=16))"
        meaning = None
    others = {key: value for key, value in (meaning or {}).items() if key not in given}
    return Finding(
        code="C001",
        severity="error",
        what=f"{cls.__name__} has no argument `{name}`.",
        fix=fix,
        changes={name: None, **others},
        settings=(name,),
        facts={"kind": cls.__name__, "name": name},
    )


def survey(cls: type, given: Mapping[str, Any]) -> tuple[list[Finding], GRPOConfig | None]:
    """All that is wrong with arguments of `GRPOConfig`, or a class of that kind; and what their cures make of them.

    Where transformers or TRL refuse a value, it is made without it; None where they refuse that as well.
    """
    problems = unknown_arguments(cls, given)
    values = cured(given, problems)
    found, made = _built(cls, values)
    problems += found
    if made is None:
        refused = next((name for name in found[-1].settings if name in values), None)
        values = {name: value for name, value in values.items() if name != refused}
        made = _built(cls, values)[1]
    return problems, made


def _built(cls: type, values: Mapping[str, Any]) -> tuple[list[Finding], GRPOConfig | None]:
    """What is wrong with values, and the object that their cures make; None where transformers or TRL refuse it."""
    made = cast("GRPOConfig", object.__new__(cls))
    made._given = values
    problems = made._problems = []
    cls.__init__(made, **values)  # type: ignore[misc]
    made._problems = None
    return problems, None if made._made is None else made


def cured(values: Mapping[str, Any], problems: Iterable[Finding]) -> dict[str, Any]:
    """The arguments with the changes of problems; one that becomes None is left out."""
    made = dict(values)
    for problem in problems:
        for key, value in problem.changes.items():
            made.pop(key, None) if value is None else made.update({key: value})
    return made


def joined(cls: type, given: Mapping[str, Any], problems: Sequence[Finding | ConfigError]) -> ConfigError:
    """Problems of the arguments of a class as one error, with the call that cures all of them, if each has a cure."""
    found = [with_cure(problem if isinstance(problem, Finding) else of_error(problem), given) for problem in problems]
    kind = ArgumentError if any(problem.code == "C001" for problem in found) else ConfigError
    call = _as_call(cls, given, cured(given, found)) if all(problem.changes for problem in found) else ""
    if len(found) == 1:
        [only] = found
        fix = "\n".join(filter(None, (only.fix, call)))
        return kind(only.what, code=only.code, fix=fix, changes=only.changes, settings=only.settings)
    listed = [with_fix(f"{problem.what} [{problem.code}]", problem.fix) for problem in found]
    what = "\n".join([f"{cls.__name__} has {len(found)} problems:", *listed])
    fix = f"all of it at once:\n{call}" if call else ""
    return kind(what, code=found[0].code, fix=fix, findings=found)


def _as_call(cls: type, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The call of a class with these values, which says what was given in place of each."""
    defaults = {name: field.default for name, field in getattr(cls, "__dataclass_fields__", {}).items()}
    lines = [] if defaults else ["    ...,"]
    for name, value in values.items():
        was = f"  # was {given[name]!r:.60}" if name in given and given[name] != value else ""
        if was or value != defaults.get(name) or len(given) < len(defaults):  # a command line gives all of them
            lines.append(f"    {name}={_as_literal(name, value)},{was}")
    left_out = [name for name in given if name not in values]
    if left_out:
        lines.append(f"    # without {', '.join(left_out)}")
    return "\n".join([f"{cls.__name__}(", *lines, ")"])


def _as_literal(name: str, value: Any) -> str:
    """A value as it is typed in Python; `...` where it cannot be, or is secret."""
    value = getattr(value, "value", value)
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value == without_secrets(value, name):
            return repr(value)
    return "..."


def refuse_unknown(cls: type, given: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` for all arguments that a class other than `GRPOConfig` does not take."""
    if problems := unknown_arguments(cls, given):
        raise joined(cls, given, problems)


def has_bfloat16() -> bool:
    """Whether the GPU multiplies bfloat16 itself; where there is none, a CPU stands in for one, and does."""
    gpu = gpu_planned()
    if gpu is not None:
        return gpu.bfloat16
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
