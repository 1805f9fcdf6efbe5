"""`GRPOConfig`: TRL's, so every argument, default and parsing rule is TRL's own, with Podium's fields and checks."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import math
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast, get_type_hints

import torch
import trl

from podium.agents.chat import with_named_template
from podium.errors import ArgumentError, ConfigError, Finding, named_in, pip_line
from podium.errors.texts import as_line, as_lines, with_fix
from podium.models.devices import kind_of
from podium.runs.redaction import without_secrets
from podium.trainer.names import meant
from podium.trainer.planned import launch_planned
from podium.trainer.rules import (
    CHOICES,
    CONTRADICTIONS,
    FILTERS,
    OFF_POLICY,
    RANGES,
    REFUSED,
    SENSIBLE,
    VLLM_ALONE,
    WITHOUT_EFFECT,
    actions,
    enumerated,
    missing_packages,
    on_error,
    refuse,
    take_generation_kwargs,
    wrong_value,
)

logger = logging.getLogger(__name__)


def option(default: Any, text: str) -> Any:
    """A field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def documented(cls: type) -> str:
    """The docstring of a class of options, and a line with the default and the help text of every field, by name."""
    lines = [inspect.getdoc(cls) or "", "", "Fields:"]
    for each in sorted(dataclasses.fields(cls), key=lambda each: each.name):
        default = "" if each.default is dataclasses.MISSING else f" = {each.default!r}"
        lines.append(f"    {each.name}{default}")
        lines += textwrap.wrap(
            str(each.metadata.get("help") or ""), 110, initial_indent=" " * 8, subsequent_indent=" " * 8
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
    vllm_weights_folder: str | None = option(
        None,
        "With a vLLM server, a folder through which weights go to it, and which it must see under the same "
        "path. None: over NCCL where both have it, else a folder in output_dir, for a server on this machine.",
    )
    async_rollouts: int = option(
        0,
        "1: the next round is sampled and scored, by an engine with weights of its own, while this one is "
        "trained on; its completions are one round old, which the loss corrects. 0: one after the other.",
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
    """The arguments as they were written; None: this is a trial of `survey_arguments`."""

    __signature__ = _Signature()

    def __new__(cls, *in_order: Any, **given: Any) -> GRPOConfig:
        """Raise `ArgumentError` for an argument that there is not, with all else that is wrong."""
        made = super().__new__(cls)
        made._given = {**dict(zip(arguments_of(cls), in_order, strict=False)), **given}
        if not arguments_of(cls).keys() >= given.keys():
            raise all_wrong(cls, made._given)
        return made

    _made = cast("Mapping[str, Any] | None", None)
    """The values when it was made; of a copy those of `_SIZES`, and None before."""

    def __getstate__(self) -> dict[str, Any]:  # secrets are not hidden in what is left out
        made = self._made and {name: self._made[name] for name in _SIZES}
        return {**{name: value for name, value in vars(self).items() if name != "_given"}, "_made": made}

    def __post_init__(self) -> None:
        try:
            self._settle()
        except ConfigError:
            if self._given is None:
                raise
            raise all_wrong(type(self), self._given) from None

    def _settle(self) -> None:
        """Check the values, and set what follows from them."""
        self._read()
        self._drop_without_effect(GRPOConfig.__dataclass_fields__)
        self._check_vllm()
        self._follow_device()
        renamed = getattr(self, "activation_checkpointing", None)  # what transformers 5.23 calls it
        checkpointing = self.gradient_checkpointing if renamed is None else renamed
        self.gradient_checkpointing = bool(checkpointing)
        try:
            super().__post_init__()
        except ValueError as error:
            raise self._from_library(str(error)) from None
        except (ImportError, OSError, TypeError, KeyError, RuntimeError) as error:  # of a file that it names, say
            file = getattr(error, "filename", None)
            named = [name for name, value in self._values().items() if file and value == file]
            named += named_in(error, self._values())
            said = f"{', '.join(named) or 'the settings'}: transformers raised {type(error).__name__}: {error}"
            raise ConfigError(said, code="C030", fix=pip_line(error), settings=named) from error
        except OverflowError:
            name = next(name for name, value in self._values().items() if value in (math.inf, -math.inf))
            shown_value = getattr(self, name)
            raise ConfigError(
                f"{name} is {shown_value!r}; it must be a finite number.",
                code="C003",
                changes={name: default(name)},
                settings=(name,),
                each_name=name,
                value=shown_value,
                kind="a finite number",
            ) from None
        self.gradient_checkpointing = checkpointing
        self._finish()

    def settle_again(self) -> None:
        """Check the values that were changed since, and the size of the batch. Raises `ConfigError`."""
        made, now = self._made or {}, self._values()
        changed = [name for name, value in now.items() if name not in made or made[name] is not value != made[name]]
        if not changed:
            return
        self._read()
        self._drop_without_effect(changed)
        self._check_vllm()
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
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def _read(self) -> None:
        """Check the values as they were given."""
        self._read_numbers()
        self.on_finding = actions(self.on_finding)  # first: it says which of the next errors cannot be overruled
        if self.max_steps is None:
            self.max_steps = -1
        for name in ("top_p", "top_k", "repetition_penalty"):
            if getattr(self, name) is None:
                setattr(self, name, FILTERS[name])
        if hasattr(self.reward_weights, "tolist"):  # an array, or a tensor
            self.reward_weights = self.reward_weights.tolist()
        if str(self.fsdp).lower() in ("true", "false"):
            self.fsdp = True if str(self.fsdp).lower() == "true" else None
        if self.rollout_engine == "vllm":
            self.use_vllm = True
        self._check_values()
        refuse(CONTRADICTIONS, self)

    def _finish(self) -> None:
        """Check and set what transformers and TRL leave as it is."""
        if self.chat_template_kwargs:
            self.chat_template_kwargs = with_named_template(self.chat_template_kwargs)
        take_generation_kwargs(self)
        self._check_values()
        if self.loss_type == "gspo":  # one spelling from here on
            self.loss_type, self.importance_sampling_level = "grpo", "sequence"
        on_error(self.on_reward_error)
        refuse(OFF_POLICY, self)
        if self.rollout_device is not None and self.device.type == "cuda":
            self._n_gpu = 1  # one trains, another samples
        self._made = self._values()

    def _from_library(self, said: str) -> ConfigError:
        """An error of TRL's or transformers', which have only words for it: read here, and nowhere else."""
        code, made = next(((code, made) for part, code, made in _CODES if part in said), ("C030", lambda _: {}))
        sizes = re.search(r"\((\d+)\) must be divisible by .*\((\d+)\)", said)
        more = {"fix": "", **made(self)}
        if code == "C010" and sizes:
            more["sizes"] = int(sizes[1]), int(sizes[2])
        return ConfigError(said, code=code, settings=named_in(said, GRPOConfig.__dataclass_fields__), **more)

    @property
    def device(self) -> torch.device:
        """The Trainer's; several processes on the CPU share `cpu`, as torch cannot load an optimizer to `cpu:1`."""
        device: torch.device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def world_size(self) -> int:
        """The number of processes; in a check of a launch, of that."""
        launch = launch_planned()
        return int(super().world_size) if launch is None else launch.processes

    def _read_numbers(self) -> None:
        """Numbers and truth values that are written as text, read as a recipe's are."""
        for name, annotation in _hints().items():  # a field's own `type` is changed by transformers' parser
            value = getattr(self, name, None)
            words = set(re.findall(r"\w+", str(annotation)))
            is_number = words in ({"class", "int"}, {"class", "float"}) or name == "num_generations"
            if value is None and is_number and name not in _MAY_BE_NONE:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a number.",
                    code="C003",
                    changes={name: default(name)},
                    settings=(name,),
                    each_name=name,
                    value=value,
                    kind="a number",
                )
            if not isinstance(value, str) or not words <= _NUMBERS:
                continue
            try:
                number = {"true": True, "false": False}.get(value.lower()) if "bool" in words else float(value)
                if number is None or ("float" not in words and number != int(number)):
                    raise ValueError
            except (ValueError, OverflowError):
                kind = "true or false" if "bool" in words else "a number" if "float" in words else "a whole number"
                raise ConfigError(
                    f"{name} is {value!r}; it must be {kind}.",
                    code="C003",
                    changes={name: default(name)},
                    settings=(name,),
                    each_name=name,
                    value=value,
                    kind=kind,
                ) from None
            setattr(self, name, number if {"bool", "float"} & words else int(number))

    def _check_values(self) -> None:
        words = {True: "group", False: "none", "True": "group", "False": "none"}
        self.scale_rewards = words.get(self.scale_rewards, self.scale_rewards)
        for name in {**CHOICES, **_enumerations(), **RANGES}:
            value = getattr(self, name)
            choices = CHOICES.get(name, ()) or (_enumerations().get(name, ()) if isinstance(value, str) else ())
            if error := wrong_value(name, value, choices=choices, default=default):
                raise error
        if self.max_completion_length is None:
            raise ConfigError(
                "max_completion_length is None; it must be a number: completions that never end would not.",
                code="C016",
                changes={"max_completion_length": default("max_completion_length")},
                settings=("max_completion_length",),
            )
        if self.max_steps < 0 and not self.num_train_epochs > 0:
            raise ConfigError(
                f"num_train_epochs is {self.num_train_epochs:g} and max_steps is not set: there is nothing to train.",
                code="C016",
                changes={"max_steps": 100},
                settings=("num_train_epochs", "max_steps"),
                num_train_epochs=self.num_train_epochs,
            )

    def _drop_without_effect(self, names: Container[str]) -> None:
        for name, (idle, reason) in WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if name in names and value != idle and value is not None:
                logger.warning("%s=%r has no effect: %s.", name, value, reason)
                if name.startswith(("use_liger", "torch_compile")):  # transformers would act on it
                    setattr(self, name, idle)
        for name, (idle, reason) in REFUSED.items():
            if getattr(self, name) != idle:
                shown_value = getattr(self, name)
                raise ConfigError(
                    f"{name}={shown_value!r} is an option of TRL that Podium does not honour: {reason}.",
                    code="C014" if "vllm" in name else "C018",
                    fix=f"take `{name}` out",
                    settings=(name,),
                    name=name,
                    value=shown_value,
                    reason=reason,
                )

    def _check_vllm(self) -> None:
        """Settings of vLLM where it does not sample, or of its other mode."""
        unused = VLLM_ALONE["colocate" if self.vllm_mode == "server" else "server"]
        for each in dataclasses.fields(self):
            name, value = each.name, getattr(self, each.name)
            if not name.startswith("vllm_") or value == each.default or (self.use_vllm and name not in unused):
                continue
            what = "belongs to vLLM, which does not sample here"
            fix = "Set use_vllm: true, or leave it out."
            if self.use_vllm:
                what = f"does nothing with vllm_mode={self.vllm_mode!r}"
                fix = "Leave it out; a server has options of its own (`vllm serve --help`)."
            raise ConfigError(
                f"{name}={value!r} {what}.", code="C014", fix=fix, settings=(name,), name=name, value=value, what=what
            )

    def _follow_device(self) -> None:
        """Without an accelerator: CPU and float32 arithmetic in the Trainer's sense, unless set otherwise."""
        if not torch.cuda.is_available() and not self.use_cpu:
            self.use_cpu = True
            if torch.accelerator.is_available():
                logger.warning(
                    "Training runs on the CPU: of accelerators only CUDA's are supported, and this machine has %s.",
                    torch.accelerator.current_accelerator(),
                )
        self.bf16_asked = bool(self.bf16)
        if kind_of("cpu" if self.use_cpu else "cuda").autocast:
            self._choose_half()
            return
        if self.fp16:
            raise ConfigError(
                "fp16=True needs a GPU, and this run is on the CPU.",
                code="C013",
                fix="Leave it out, or bf16: true.",
                settings=("fp16",),
            )
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
            self.bf16, self.fp16 = False, True
            logger.warning(
                "This GPU has no bfloat16 units (torch would emulate them, several times slower): float16 with loss "
                "scaling is used%s. bf16: false computes in float32.",
                " in place of bf16: true" if self.bf16_asked else "",
            )

    def _nearest_batch(self) -> dict[str, Any]:
        """The batch sizes next to one that cannot be cut into groups."""
        batch, group = self.generation_batch_size, self.num_generations
        if not isinstance(batch, int) or not isinstance(group, int) or group < 2 or batch % group == 0:
            return {}
        below, above = batch // group * group, -(-batch // group) * group
        sizes = " or ".join(str(size) for size in (below, above) if size)
        divisors = " or ".join(str(g) for g in range(2, batch + 1) if batch % g == 0 and g <= 2 * group)
        fix = (
            f"A group must not be cut in two. per_device_train_batch_size counts completions: make the generation "
            f"batch {sizes}" + f", or num_generations {divisors}" * bool(divisors) + "."
        )
        return {"fix": fix}

    def _whole_evaluation(self) -> dict[str, Any]:
        """The evaluation batch next to one that cannot be cut into groups."""
        group = self.num_generations_eval or self.num_generations
        return _changed("per_device_eval_batch_size", -(-self.per_device_eval_batch_size // group) * group)


GRPOConfig.__doc__ = documented(GRPOConfig)


def _changed(name: str, value: Any) -> dict[str, Any]:
    return {"changes": {name: value}, "fix": as_line(name, value)}


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
    return {name: found for name, each in _hints().items() if (found := enumerated(each))}


_SIZES = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation", "num_generations")

_NUMBERS = {"class", "int", "float", "bool", "None", "NoneType", "Optional", "Union", "typing"}
"""Words of the annotations that take numbers and truth values, and no text."""

_MAY_BE_NONE = ("max_steps", "max_completion_length", *FILTERS)
"""Numbers for which None has a meaning, or a message, of its own."""


def arguments_of(cls: type) -> dict[str, Any]:
    """The arguments of a class by name; of one that hands on any, those of `GRPOConfig` too."""
    own = dict(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
    hands_on = any(each.kind is each.VAR_KEYWORD for each in own.values())
    own = {name: each for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD and name != "self"}
    return {**own, **arguments_of(GRPOConfig)} if hands_on and issubclass(cls, GRPOConfig) else own


def unknown_arguments(cls: type, given: Mapping[str, Any]) -> list[ConfigError]:
    """The error of each argument that a class does not take, with what was meant."""
    known, found = arguments_of(cls), list[ConfigError]()
    for name in [each for each in given if each not in known]:
        fix, said = meant(name, given[name], known)
        if not issubclass(cls, GRPOConfig) and name in GRPOConfig.__dataclass_fields__:
            fix, said = f"args=GRPOConfig({name}=...)", None
        elif name.startswith("lora_") or name == "use_peft":
            fix, said = "GRPOTrainer(..., peft_config=LoraConfig(r=16))", None
        changes = {name: None, **{key: value for key, value in (said or {}).items() if key not in given}}
        found.append(
            ArgumentError(
                f"{cls.__name__} has no argument `{name}`.",
                code="C001",
                fix=fix,
                changes=changes,
                settings=(name,),
                kind=cls.__name__,
                name=name,
            )
        )
    return found


def survey_arguments(cls: type, given: Mapping[str, Any]) -> tuple[list[ConfigError], GRPOConfig | None]:
    """Find all mistakes in arguments of `GRPOConfig`, or a class of that kind: each is cured, and the next found.

    With what is made of the arguments as they are then; None where the last problem has no cure.
    """
    problems = unknown_arguments(cls, given)
    for _ in range(2 * len(given) + 2):
        values, trial = cured(given, problems), cast("GRPOConfig", object.__new__(cls))
        try:
            cls.__init__(trial, **values)  # type: ignore[misc]
        except ConfigError as error:
            found = with_cure(error, values)
            if found.what in {each.what for each in problems}:  # its cure does not help
                break
            problems.append(found)
            if not found.changes:
                break
        else:
            return problems, trial
    return problems, None


def all_wrong(cls: type, given: Mapping[str, Any]) -> ConfigError:
    """The problems of arguments as one error; with those of packages that are missing here, if there are others."""
    problems, args = survey_arguments(cls, given)
    return joined(cls, given, [*problems, *(missing_packages(args) if args is not None else ())])


def with_cure(error: ConfigError, values: Mapping[str, Any]) -> ConfigError:
    """The error with the change that cures it, or, on trial, with the setting taken out that it is about."""
    if error.changes:
        return error
    fix, changes = error.fix, dict[str, Any]()
    if "sizes" in error.facts:
        changes = _whole_groups(error.facts["sizes"], values)
        fix = "; ".join(filter(None, (as_lines(changes), fix)))
    is_trial = not changes
    if is_trial:
        changes = dict.fromkeys([each for each in error.settings if each in values][:1])
    cured = ConfigError(error.what, code=error.code, fix=fix, changes=changes, settings=error.settings)
    cured.is_trial = is_trial
    return cured


def _whole_groups(sizes: tuple[int, int], values: Mapping[str, Any]) -> dict[str, int]:
    """The next batch size that holds whole groups, where a batch, the first size, is no multiple of the second."""
    batch, unit = sizes
    unit = math.lcm(unit, int(values.get("num_generations") or GRPOConfig.num_generations))
    key = "generation_batch_size" if values.get("generation_batch_size") else "per_device_train_batch_size"
    now = batch if key == "generation_batch_size" else int(values.get(key, GRPOConfig.per_device_train_batch_size))
    size = next(each for each in range(now + 1, now + unit + 1) if each * (batch // now) % unit == 0)
    return {key: size}


def cured(values: Mapping[str, Any], problems: Iterable[ConfigError]) -> dict[str, Any]:
    """The arguments with the changes of problems; one that becomes None is left out."""
    made = dict(values)
    for problem in problems:
        for key, value in problem.changes.items():
            made.pop(key, None) if value is None else made.update({key: value})
    return made


def joined(cls: type, given: Mapping[str, Any], problems: Sequence[ConfigError]) -> ConfigError:
    """Problems of the arguments of a class as one error, with the call that cures all of them, if each has a cure."""
    [first, *rest] = problems
    kind = ArgumentError if any(isinstance(each, ArgumentError) for each in problems) else ConfigError
    call = _as_call(cls, given, cured(given, problems)) if all(each.changes for each in problems) else ""
    if not rest:
        return kind(first.what, code=first.code, fix="\n".join(filter(None, (first.fix, call))), changes=first.changes)
    listed = [with_fix(f"{each.what} [{each.code}]", each.fix) for each in problems]
    found = [
        Finding(code=each.code, severity="error", what=each.what, fix=each.fix, changes=each.changes)
        for each in problems
    ]
    what = "\n".join([f"{cls.__name__} has {len(problems)} problems:", *listed])
    return kind(what, code=first.code, fix=call and f"all of it at once:\n{call}", findings=found)


def _as_call(cls: type, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The call of a class with these values, which says what was given in place of each."""
    defaults = {name: each.default for name, each in getattr(cls, "__dataclass_fields__", {}).items()}
    lines = [] if defaults else ["    ...,"]
    for name, value in values.items():
        was = f"  # was {given[name]!r:.60}" if name in given and given[name] != value else ""
        if was or value != defaults.get(name) or len(given) < len(defaults):  # a command line gives all of them
            lines.append(f"    {name}={_as_literal(name, value)},{was}")
    left_out = [name for name in given if name not in values]
    gone = [f"    # without {', '.join(left_out)}"] * bool(left_out)
    return "\n".join([f"{cls.__name__}(", *lines, *gone, ")"])


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
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


_CODES: tuple[tuple[str, str, Callable[[GRPOConfig], dict[str, Any]]], ...] = (
    ("divisible by num_generations", "C010", GRPOConfig._nearest_batch),
    ("divisible by the global batch size", "C010", GRPOConfig._nearest_batch),
    ("at least 2 generations", "C011", lambda args: _changed("num_generations", default("num_generations"))),
    ("generations used for evaluation", "C012", GRPOConfig._whole_evaluation),
    *(
        (name, "C013", lambda _: {"fix": "take `bf16`, `fp16` and `tf32` out: what the device can is chosen"})
        for name in ("fp16", "bf16", "tf32")
    ),
)
"""(words of an error of TRL's or transformers', the code of its rule, its `fix` or `changes`)."""
