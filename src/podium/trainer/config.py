"""`GRPOConfig`: TRL's, with Podium's additions.

`GRPOConfig` inherits `trl.GRPOConfig`, so every argument, default and parsing rule is TRL's own. Podium adds a few
fields, checks early what TRL checks late, and refuses what it would otherwise have to ignore.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
import yaml

from podium.algorithm.advantages import AGGREGATIONS
from podium.algorithm.losses import CORRECTIONS, OBJECTIVES
from podium.errors import ConfigError, as_line, did_you_mean, with_fix
from podium.models.devices import kind_of
from podium.runs.findings import codes
from podium.trainer.settings import call_settings, sampling_settings, take_generation_kwargs

logger = logging.getLogger(__name__)

ENGINES = ("auto", "live", "transformers", "vllm")
PRECISIONS = ("auto", "float32", "bfloat16")
OVERLONG = ("error", "drop", "truncate")

CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss_type": tuple(OBJECTIVES),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": tuple(AGGREGATIONS),
    "rollout_engine": ENGINES,
    "overlong_prompts": OVERLONG,
    "product_precision": PRECISIONS,
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": tuple(CORRECTIONS),
}
"""Fields with a closed set of values; TRL finds a wrong one only after the first generation."""

RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (1e-6, 100.0, "at 0 all completions of a group are the same, so nothing can be learnt"),
    "top_p": (1e-6, 1.0, "it is a share of probability"),
    "top_k": (0, float("inf"), "0 switches it off"),
    "min_p": (0.0, 1.0, "it is a share of the likeliest token's probability"),
    "repetition_penalty": (1e-6, float("inf"), "1 switches it off"),
    "learning_rate": (0.0, 1000.0, "a negative rate climbs away from the reward, and no optimizer bears a higher one"),
    "weight_decay": (0.0, float("inf"), "a negative one makes all weights grow"),
    "adam_beta1": (0.0, 1 - 1e-9, "it is a share of the past that stays"),
    "adam_beta2": (0.0, 1 - 1e-9, "it is a share of the past that stays"),
    "adam_epsilon": (0.0, float("inf"), "it keeps a division from one by zero"),
    "max_grad_norm": (0.0, float("inf"), "0 switches clipping off"),
    "warmup_steps": (0.0, float("inf"), "0 switches warm-up off; below 1 it is a share of all steps"),
    "max_steps": (1, float("inf"), "-1, or leaving it out, trains num_train_epochs"),
    "per_device_train_batch_size": (1, float("inf"), "it counts completions"),
    "per_device_eval_batch_size": (1, float("inf"), "it counts completions"),
    "gradient_accumulation_steps": (1, float("inf"), "1 accumulates nothing"),
    "generation_batch_size": (1, float("inf"), "it counts completions"),
    "steps_per_generation": (1, float("inf"), "it is the number of micro-steps that a generation serves"),
    "save_steps": (1e-9, float("inf"), "`save_strategy: no` saves nothing"),
    "eval_steps": (1e-9, float("inf"), "`eval_strategy: no` evaluates nothing"),
    "logging_steps": (1e-9, float("inf"), "`logging_strategy: no` logs nothing"),
    "ref_model_sync_steps": (1, float("inf"), "it is a number of steps"),
    "seed": (0, 2**32 - 1, "random number generators take no other"),
    "data_seed": (0, 2**32 - 1, "random number generators take no other"),
    "record_megabytes": (0, float("inf"), "`record: false` records nothing"),
    "ddp_timeout": (1, float("inf"), "it is in seconds"),
    "beta": (0.0, float("inf"), "a negative weight would reward drifting away"),
    "epsilon": (0.0, 1.0, "it is the distance of the lower clip bound from a ratio of 1"),
    "epsilon_high": (0.0, float("inf"), "it is a distance from a ratio of 1 (for cispo the ratio itself)"),
    "delta": (1.0, float("inf"), "it bounds ratios above 1"),
    "max_completion_length": (1, float("inf"), "a completion has at least one token"),
    "max_prompt_length": (1, float("inf"), "a prompt has at least one token"),
    "num_generations": (2, float("inf"), "an advantage compares the completions of one prompt"),
    "num_iterations": (1, float("inf"), "every rollout is trained on at least once"),
    "top_entropy_quantile": (0.0, 1.0, "it is a share of tokens"),
    "ref_model_mixup_alpha": (0.0, 1.0, "it is a share"),
    "max_resamples": (1, float("inf"), "switch `dynamic_sampling` off instead"),
    "tokens_per_pack": (1, float("inf"), "a pack has at least one token"),
    "reward_timeout": (0, float("inf"), "it is in seconds; 0 switches it off"),
    "reward_workers": (1, float("inf"), "a function from a file runs in at least one process"),
    "async_rollouts": (0, 1, "it is how many rounds sampling may be ahead of training"),
    "vllm_server_timeout": (1e-3, float("inf"), "it is in seconds"),
    "vllm_gpu_memory_utilization": (1e-6, 1.0, "it is a share of the GPU's memory"),
    "vllm_tensor_parallel_size": (1, float("inf"), "it is a number of GPUs"),
}
"""Fields with limits: (lowest, highest, why)."""

GONE: Mapping[str, str] = {
    "evaluation_strategy": "write `eval_strategy`",
    "lr_scheduler": "write `lr_scheduler_type`",
    "warmup_ratio": "write `warmup_steps`; below 1 it is a share of all steps",
    "overwrite_output_dir": "leave it out",
    "logging_dir": "leave it out",
    "resume": "write `resume_from_checkpoint`: `true` is the newest checkpoint",
    "checkpoint": "write `resume_from_checkpoint`",
    "epochs": "write `num_train_epochs`",
    "lr": "write `learning_rate`",
    "batch_size": "write `per_device_train_batch_size`; it counts completions",
    "max_seq_length": "write `max_completion_length`, and `max_prompt_length` where prompts are to be limited",
    "max_length": "write `max_completion_length`, and `max_prompt_length` where prompts are to be limited",
    "group_by_length": "leave it out: packs have no padding, so nothing is gained by sorting",
    "vllm_device": "leave it out: `vllm_mode: colocate` puts vLLM beside the trainer, `server` on a GPU of its own",
    "vllm_dtype": "leave it out; a server has options of its own (`vllm serve --help`)",
    "no_cuda": "write `use_cpu: true`",
    "activation_offloading": "leave it out: GRPO of TRL has no such setting either, and a pack bounds the activations "
    "already; make it smaller with `tokens_per_pack`, or set `gradient_checkpointing: true`",
    "tokenizer": "leave it out: the model's own tokenizer is used; in Python: `processing_class`",
    "reward_functions": "write `reward_funcs`",
    "max_tokens": "write `max_completion_length`",
}
"""Keys of older transformers and TRL, and likely slips, with what to do."""

SENSIBLE = {"max_steps": 100}
"""Values to type where the default says nothing."""

UNLIMITED = {"max_steps": -1}
"""Values beyond the limits that mean that there is none."""


def out_of_range(name: str, value: Any, limits: Mapping[str, tuple[float, float, str]] = RANGES) -> str:
    """What is wrong with a number, as the end of a sentence; empty where nothing is.

    >>> out_of_range("num_iterations", 0), out_of_range("max_steps", -1)
    ('is 0; it must be at least 1: every rollout is trained on at least once', '')
    """
    if name not in limits or not isinstance(value, (int, float)) or value == UNLIMITED.get(name):
        return ""
    low, high, why = limits[name]
    if low <= value <= high:
        return ""
    bounds = (
        ("above 0" if low == 1e-9 else f"at least {low:g}") if high == float("inf") else f"between {low:g} and {high:g}"
    )
    return f"is {value:g}; it must be {bounds}: {why}"


REFUSED: Mapping[str, tuple[Any, str]] = {
    "vllm_structured_outputs_regex": (
        None,
        "training would compute with probabilities that know nothing of the constraint",
    ),
    "ds3_gather_for_generation": (True, "sampling from sharded weights without gathering them is not supported"),
}
"""TRL fields that Podium does not honour: (value that asks for nothing, what to know)."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, str]] = {
    "pad_to_multiple_of": ("auto", "nothing is padded"),
    "use_liger_kernel": (
        False,
        "its kernels make the same numbers faster; Podium drives the forward itself and computes the head in chunks",
    ),
    "torch_compile": (False, "nothing is compiled: the head is replaced for every forward"),
    "torch_compile_backend": (None, "nothing is compiled"),
    "torch_compile_mode": (None, "nothing is compiled"),
    "max_tool_calling_iterations": (None, "no tools are called"),
    "log_multimodal": (True, "there are no images to leave out"),
    "transformers_continuous_batching_config": (None, "the live engine schedules by itself"),
    "use_transformers_continuous_batching": (False, "the live engine lets rows enter and leave as they end, too"),
    "use_transformers_paged": (False, "the live engine lets rows enter and leave as they end, too"),
}
"""TRL fields that change nothing here and nothing in the result: (value that asks for nothing, why). A note says so."""

VLLM_ALONE: Mapping[str, tuple[str, ...]] = {
    "server": (
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_weights_folder",
    ),
    "colocate": (
        "vllm_enable_sleep_mode",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_model_impl",
        "vllm_tensor_parallel_size",
    ),
}
"""Fields that only one `vllm_mode` reads."""


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's `GRPOConfig` with Podium's additions.

    Differences in defaults: `gradient_checkpointing` is decided by memory unless set (packs bound the activations, so
    it is rarely needed); `bf16` and `use_cpu` follow the device unless set; a NaN loss is logged as NaN. `gspo` is
    accepted as a `loss_type`; `max_steps=None` means no limit.

    Raises `ConfigError` (a `ValueError`) for a value that cannot work or that would have to be ignored.
    """

    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "Recompute activations in the backward pass. None: only when memory needs it."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Replace a NaN loss in the logs. Off: a NaN has to be seen."}
    )
    rollout_engine: str = field(
        default="auto",
        metadata={
            "help": "What samples completions: `live` (Podium's own, from the trainer's weights), `transformers` "
            "(`model.generate`), `vllm` (as `use_vllm`), or `auto`: live wherever the model and the settings allow it."
        },
    )
    vllm_weights_folder: str | None = field(
        default=None,
        metadata={
            "help": "With a vLLM server, a folder through which weights go to it, and which it must see under the same "
            "path. None: over NCCL where both have it, else a folder in output_dir, for a server on this machine."
        },
    )
    async_rollouts: int = field(
        default=0,
        metadata={
            "help": "1: the next round is sampled and scored, by an engine with weights of its own, while this one is "
            "trained on; its completions are one round old, which the loss corrects. 0: one after the other."
        },
    )
    rollout_device: str | None = field(
        default=None,
        metadata={
            "help": "With `async_rollouts`, where the live engine has its copy of the weights: a GPU that does not "
            "train, such as `cuda:1`. None: the CPU, where that trains."
        },
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Most tokens a prompt may have. None: what the model's context leaves."}
    )
    overlong_prompts: str = field(
        default="error",
        metadata={"help": "What happens to a longer prompt: `error`, `drop` or `truncate` (on the left)."},
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={"help": "Replace groups without spread in their rewards by fresh prompts (DAPO, arXiv:2503.14476)."},
    )
    max_resamples: int = field(default=3, metadata={"help": "Most rounds of replacement a generation round may take."})
    product_precision: str = field(
        default="auto",
        metadata={
            "help": "Precision of matrix products on a CPU: `float32`, `bfloat16` (weights, gradients and optimizer "
            "stay float32), or `auto`: bfloat16 where it measures faster. On a GPU `bf16` decides."
        },
    )
    reward_timeout: float | None = field(
        default=60.0, metadata={"help": "Seconds that one call of a reward function may take. 0: no limit."}
    )
    on_reward_error: str = field(
        default="raise",
        metadata={
            "help": "What becomes of a reward function that raises, runs over its limit or returns no finite number: "
            "`raise` ends the run, `none` leaves it out, a number is taken in its place."
        },
    )
    reward_workers: int = field(
        default=1,
        metadata={"help": "Processes for each reward function from a file that judges every row by itself."},
    )
    adaptive_rewards: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Rewards whose weights adapt to their success rate: their names, each with `true` or a mapping of "
            "settings (see `podium.rewards.adaptive`)."
        },
    )
    prove_first_batch: bool = field(
        default=True,
        metadata={
            "help": "Before the first optimizer step, show in seconds that sampling and training agree on this model "
            "and data, and stop where they do not. See `podium explain P004` and its neighbours."
        },
    )
    tokens_per_pack: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens in one forward and backward: it bounds activation memory. None: from the model's size."
        },
    )
    record: bool = field(
        default=True,
        metadata={"help": "Record metrics, rollouts and findings in output_dir, and look at the run's health."},
    )
    record_megabytes: float = field(
        default=512, metadata={"help": "Most megabytes of recorded rollouts; beyond half of it, only some groups."}
    )
    on_finding: dict[str, str] | str | None = field(
        default=None,
        metadata={"help": "What a finding does, by its code: `stop`, `rollback` or `ignore`. `{M132: rollback}`"},
    )
    strict: bool = field(default=False, metadata={"help": "Stop, with a checkpoint, at a finding of severity error."})

    def __new__(cls, *_: Any, **given: Any) -> GRPOConfig:
        """Raises `TypeError` for an argument that there is none of, with the name that was meant."""
        refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._read_numbers()
        if self.max_steps is None:
            self.max_steps = -1
        if str(self.fsdp).lower() in ("true", "false"):
            self.fsdp = True if str(self.fsdp).lower() == "true" else None
        self._check_choices()
        self._check_ranges()
        self._check_refused()
        self._check_vllm()
        self.on_finding = actions(self.on_finding)
        self._follow_device()
        renamed = getattr(self, "activation_checkpointing", None)  # what transformers 5.23 calls it
        checkpointing = self.gradient_checkpointing if renamed is None else renamed
        self.gradient_checkpointing = bool(checkpointing)
        try:
            super().__post_init__()
        except ValueError as error:
            code, fix = _code_of(str(error))
            raise ConfigError(str(error), code=code, fix=fix(self)) from None
        self.gradient_checkpointing = checkpointing
        take_generation_kwargs(self)
        self._check_ranges()
        if self.loss_type == "gspo":  # one spelling from here on
            self.loss_type, self.importance_sampling_level = "grpo", "sequence"
        if self.sync_ref_model and not self.beta:
            raise ConfigError(
                "sync_ref_model=True has no reference model to move, because beta is 0.",
                code="C030",
                fix="Set beta, or leave sync_ref_model out.",
            )
        call_settings(self)
        self._check_async()

    @property
    def device(self) -> torch.device:
        """As the Trainer's; several processes on the CPU share `cpu`, as torch cannot load an optimizer to `cpu:1`."""
        device: torch.device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    def _read_numbers(self) -> None:
        """Numbers and truth values that are written as text, read as a recipe's are."""
        for each in dataclasses.fields(GRPOConfig):
            value = getattr(self, each.name)
            words = set(re.findall(r"\w+", str(each.type)))
            if not isinstance(value, str) or not words <= _NUMBERS:
                continue
            try:
                number = _TRUTH.get(value.lower()) if "bool" in words else float(value)
                if number is None or ("float" not in words and number != int(number)):
                    raise ValueError
            except (ValueError, OverflowError):
                kind = "true or false" if "bool" in words else "a number" if "float" in words else "a whole number"
                what = f"{each.name} is {value!r}; it must be {kind}."
                raise ConfigError(what, code="C003", fix=default_line(each.name)) from None
            setattr(self, each.name, number if {"bool", "float"} & words else int(number))

    def _check_choices(self) -> None:
        self.scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards
        )
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"{name} is {value!r}; it must be one of {', '.join(allowed)}.",
                    code="C004",
                    fix=did_you_mean(value, allowed) or default_line(name),
                )

    def _check_ranges(self) -> None:
        if self.max_completion_length is None:
            raise ConfigError(
                "max_completion_length is None; it must be a number: completions that never end would not.",
                code="C016",
                fix=default_line("max_completion_length"),
            )
        for name in RANGES:
            if wrong := out_of_range(name, getattr(self, name)):
                raise ConfigError(f"{name} {wrong}.", code="C016", fix=default_line(name))
        if self.max_steps < 0 and not self.num_train_epochs > 0:
            what = f"num_train_epochs is {self.num_train_epochs:g} and max_steps is not set: there is nothing to train."
            raise ConfigError(what, code="C016", fix="max_steps: 100")

    def _check_async(self) -> None:
        for refused, what, fix in _NOT_ASYNC:
            if refused(self):
                raise ConfigError(what.format(args=self), code="C033", fix=fix)
        if self.rollout_device is not None and self.device.type == "cuda":
            self._n_gpu = 1  # one trains, another samples

    def _check_refused(self) -> None:
        if self.use_liger_kernel and (self.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
            raise ConfigError(
                "liger_kernel_config asks for fused_linear_cross_entropy, which drops the log-probabilities of tokens "
                "that the loss is made of.",
                code="C018",
                fix="take `liger_kernel_config` out",
            )
        for name, (idle, reason) in WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value != idle and value is not None:
                logger.info("%s=%r has no effect: %s.", name, value, reason)
                if name.startswith(("use_liger", "torch_compile")):  # transformers would act on it
                    setattr(self, name, idle)
        for name, (idle, reason) in REFUSED.items():
            if getattr(self, name) != idle:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is an option of TRL that Podium does not honour: {reason}.",
                    code="C014" if "vllm" in name else "C018",
                    fix=f"take `{name}` out",
                )

    def _check_vllm(self) -> None:
        """What belongs to vLLM goes together, or is not given at all."""
        if self.rollout_engine == "vllm":
            self.use_vllm = True
        if self.use_vllm and self.rollout_engine not in ("auto", "vllm"):
            raise ConfigError(
                f"use_vllm=True and rollout_engine={self.rollout_engine!r} name two engines.",
                code="C014",
                fix="Leave one of them out.",
            )
        unused = VLLM_ALONE["colocate" if self.vllm_mode == "server" else "server"]
        for field_ in dataclasses.fields(self):
            name, value = field_.name, getattr(self, field_.name)
            if not name.startswith("vllm_") or value == field_.default:
                continue
            if not self.use_vllm:
                raise ConfigError(
                    f"{name}={value!r} belongs to vLLM, which does not sample here.",
                    code="C014",
                    fix="Set use_vllm: true, or leave it out.",
                )
            if name in unused:
                raise ConfigError(
                    f"{name}={value!r} does nothing with vllm_mode={self.vllm_mode!r}.",
                    code="C014",
                    fix="Leave it out; a server has options of its own (`vllm serve --help`).",
                )
        if self.use_vllm:
            self._check_sampled_by_vllm()

    def _check_sampled_by_vllm(self) -> None:
        """What vLLM cannot do for this loss and these settings."""
        by_rollout = CORRECTIONS[self.vllm_importance_sampling_mode].per_rollout
        if self.loss_type == "vespo" and self.vllm_importance_sampling_correction and by_rollout:
            raise ConfigError(
                f"loss_type vespo weighs whole rollouts by itself; vllm_importance_sampling_mode is "
                f"{self.vllm_importance_sampling_mode}.",
                code="C014",
                fix="Set vllm_importance_sampling_mode: token_truncate.",
            )
        if self.cache_implementation is not None:
            raise ConfigError(
                "cache_implementation is `generate`'s, and vLLM samples.", code="C014", fix="Leave one of them out."
            )

    def _follow_device(self) -> None:
        """Without an accelerator: CPU and float32 arithmetic in the Trainer's sense, unless the user said otherwise."""
        if not torch.cuda.is_available() and not self.use_cpu:
            self.use_cpu = True
            if torch.accelerator.is_available():
                logger.warning(
                    "Training runs on the CPU: of accelerators only CUDA's are supported, and this machine has %s.",
                    torch.accelerator.current_accelerator(),
                )
        on_cpu = self.use_cpu
        self.bf16_asked = bool(self.bf16)
        if kind_of("cpu" if on_cpu else "cuda").autocast:
            self._choose_half()
            return
        if self.fp16:
            raise ConfigError(
                "fp16=True needs a GPU, and this run is on the CPU.", code="C013", fix="Leave it out, or bf16: true."
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

    def _nearest_batch(self) -> str:
        """The batch sizes next to one that cannot be cut into groups."""
        batch, group = self.generation_batch_size, self.num_generations
        if not isinstance(batch, int) or not isinstance(group, int) or group < 2 or batch % group == 0:
            return ""
        below, above = batch // group * group, -(-batch // group) * group
        sizes = " or ".join(str(size) for size in (below, above) if size)
        divisors = " or ".join(str(g) for g in range(2, batch + 1) if batch % g == 0 and g <= 2 * group)
        return (
            f"A group must not be cut in two. per_device_train_batch_size counts completions: make the generation "
            f"batch {sizes}, or num_generations {divisors}."
        )

    def _whole_evaluation(self) -> str:
        """The evaluation batch next to one that cannot be cut into groups."""
        group = self.num_generations_eval or self.num_generations
        return as_line("per_device_eval_batch_size", -(-self.per_device_eval_batch_size // group) * group)


def default_line(name: str) -> str:
    """What to type for a field to be as when nobody sets it."""
    return as_line(name, SENSIBLE.get(name, getattr(GRPOConfig, name)))


_TRUTH = {"true": True, "false": False}

_MEANT = {"config": "write `args`", "dataset": "write `train_dataset`"}
"""Arguments of other trainers that are no keys of a recipe."""

_NUMBERS = {"class", "int", "float", "bool", "None", "NoneType", "Optional", "Union", "typing"}
"""Words of the annotations that take numbers and truth values, and no text."""


def refuse_unknown(cls: type, given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for an argument that a class does not take, with the name that was meant."""
    known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    for name in given:
        if name not in known:
            fix = _MEANT.get(name) or GONE.get(name) or did_you_mean(name, known) or as_line(name, None)
            if not issubclass(cls, GRPOConfig) and name in GRPOConfig.__dataclass_fields__:
                fix = f"args=GRPOConfig({name}=...)"
            elif name.startswith("lora_") or name == "use_peft":
                fix = "GRPOTrainer(..., peft_config=LoraConfig(r=16))"
            raise TypeError(with_fix(f"{cls.__name__} has no argument `{name}`.", fix))


def has_bfloat16() -> bool:
    """Whether the GPU multiplies bfloat16 itself; where there is none, a CPU stands in for one, and does."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def _is_filtered(args: GRPOConfig) -> bool:
    return sampling_settings(args, frozenset(), num_completions=1, round_number=0).filtered


def _has_second_device(args: GRPOConfig) -> bool:
    """Whether the copy to sample from has a place: a GPU that does not train, in a run of one process; or the CPU."""
    try:
        device = torch.device(args.rollout_device or "cpu")
    except RuntimeError:
        return False
    if "cpu" in (device.type, args.device.type):
        return device.type == args.device.type
    return args.world_size == 1 and device.index not in (None, args.device.index)


_NOT_ASYNC: tuple[tuple[Callable[[GRPOConfig], bool], str, str], ...] = (
    (
        lambda args: args.rollout_device is not None and (not args.async_rollouts or args.use_vllm),
        "rollout_device is {args.rollout_device!r}, where the live engine would have a copy of the weights to sample "
        "from while they are trained; here it has none (async_rollouts is {args.async_rollouts}).",
        "Leave rollout_device out, or set async_rollouts: 1 without use_vllm.",
    ),
    (
        lambda args: bool(args.async_rollouts) and args.rollout_engine == "transformers",
        "async_rollouts samples while weights are trained, and rollout_engine: transformers has none of its own.",
        "Leave one of the two out.",
    ),
    (
        lambda args: bool(args.async_rollouts) and args.use_vllm and args.vllm_mode == "colocate",
        "async_rollouts samples on a device that does not train, and vllm_mode: colocate puts vLLM on the trainer's.",
        "Start a server and set vllm_mode: server, or leave async_rollouts out.",
    ),
    (
        lambda args: bool(args.async_rollouts) and args.use_vllm and _is_filtered(args),
        "async_rollouts corrects by the sampler's log-probabilities, and vLLM's are of what top_p, top_k, min_p or "
        "repetition_penalty left.",
        "Sample without a filter, or leave async_rollouts out.",
    ),
    (
        lambda args: bool(args.async_rollouts) and not args.use_vllm and not _has_second_device(args),
        "async_rollouts samples on a device that does not train, in a run of one process: training is on "
        "{args.device}, processes: {args.world_size}, rollout_device: {args.rollout_device}.",
        "Set rollout_device: cuda:1 (on a CPU leave it out), or leave async_rollouts out.",
    ),
)
"""(when, what, fix): what cannot sample while it trains."""


Fix = Callable[[GRPOConfig], str]


def _as_the_device(_: GRPOConfig) -> str:
    return "take `bf16`, `fp16` and `tf32` out: what the device can is chosen"


_CODES: tuple[tuple[str, str, Fix], ...] = (
    ("divisible by num_generations", "C010", GRPOConfig._nearest_batch),
    ("divisible by the global batch size", "C010", GRPOConfig._nearest_batch),
    ("at least 2 generations", "C011", lambda args: default_line("num_generations")),
    ("generations used for evaluation", "C012", GRPOConfig._whole_evaluation),
    ("fp16", "C013", _as_the_device),
    ("bf16", "C013", _as_the_device),
    ("tf32", "C013", _as_the_device),
)
"""(what a message of TRL or transformers holds, the code of its rule, what to type)."""


def _code_of(message: str) -> tuple[str, Fix]:
    """Code and fix of a rule that TRL or transformers checks; C030 and none where it is not one of ours."""
    return next(((code, fix) for part, code, fix in _CODES if part in message), ("C030", lambda _: ""))


ACTIONS = ("stop", "rollback", "ignore")


def actions(given: Any) -> dict[str, str]:
    """`on_finding` as a mapping from codes to actions, checked (`ConfigError`); text is YAML, as from the shell.

    >>> actions("{m132: stop}")
    {'M132': 'stop'}
    """
    try:
        asked = yaml.safe_load(given) if isinstance(given, str) else given or {}
        wishes = {str(code).upper(): str(wish) for code, wish in asked.items()}
    except (AttributeError, yaml.YAMLError):
        raise ConfigError(f"on_finding is {given!r}; it must be like {{M132: stop, M161: ignore}}.") from None
    for code, wish in wishes.items():
        if code not in codes():
            raise ConfigError(f"on_finding names {code}, which is no finding.", fix=did_you_mean(code, codes()))
        if wish not in ACTIONS:
            raise ConfigError(f"on_finding for {code} is {wish!r}; it must be one of {', '.join(ACTIONS)}.")
    return wishes
