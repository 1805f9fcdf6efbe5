"""A recipe that was read: the records of a run and of its stages, checked, with nothing heavy loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.data.rows import DataSpec, Loaded, load_data
from podium.errors import ConfigError, Finding, named_in
from podium.errors.texts import quoted
from podium.models.check import refuse_other_task
from podium.trainer.fields import options

if TYPE_CHECKING:
    from trl import SFTConfig

    from podium.agents.setup import Program
    from podium.agents.tools import Tool
    from podium.recipe.gates import Gate
    from podium.recipe.rewards import RewardSpec

EVAL_ROWS, EVAL_SAMPLES = 200, 4
"""Defaults of `eval_rows` and `eval_samples`, the size of the evaluations before and after training."""

Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """The tools, environments and the agent of a recipe, resolved.

    tools: [tools.py:multiply, builtin:calculator]     # functions in files beside the recipe, or of the library
    tools: [{mcp: {command: [python, -m, mcp_server_time]}}]      # those of an MCP server
    environment: game.py:Guess                         # a class with `reset`, and `step` or methods that are tools
    environment:                                       # or several, chosen by the rows' column `environment`
      easy: game.py:Guess?largest=7
      word: textarena:Hangman-v0
    max_turns: 4
    agent: agent.py:run                                # or a program, which samples turns by itself
    agent: {command: [python, my_agent.py]}
    """

    tools: tuple[Tool, ...] = ()
    environment: Factory | Mapping[str, Factory] | None = None
    program: Program | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `GRPOTrainer`; none of those that the recipe does not have."""
        given = {"tools": list(self.tools), "environment_factory": self.environment, "agent": self.program}
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a run needs."""

    name: str
    """As the user wrote it, for messages."""
    model: str
    model_settings: Mapping[str, Any]
    """Arguments of `from_pretrained`: revision, dtype, attn_implementation."""
    data: DataSpec
    rewards: tuple[RewardSpec, ...]
    lora: Mapping[str, Any] | None
    """Arguments of peft's `LoraConfig`."""
    quantization: Mapping[str, Any] | None
    """Arguments of `BitsAndBytesConfig`."""
    config: Mapping[str, Any]
    """Arguments of `GRPOConfig`."""
    agents: AgentSpec = field(default_factory=AgentSpec)
    """Tools and environments."""
    resume: str | bool | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set in the process that trains."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Place of each key: `run.yaml:7`, or `--flag`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The keys and values as written, flags included: the contents of `config.yaml` in the run's folder."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """The inferred keys among `given`."""
    rows: Loaded | None = None
    """`CheckedRows`, where a check has read them; None: rows are loaded when they are needed."""
    stages: tuple[Stage, ...] = ()
    """The parts of a run in stages, in order; the other fields are then those of the last, by which it is judged."""

    @property
    def accuracy(self) -> str | None:
        """Name of the reward that tells right (at least 1) from wrong; None: the one whose name suggests it."""
        return self._setting("accuracy")

    @property
    def eval_samples(self) -> int:
        """Completions per held-out prompt, before and after."""
        return self._setting("eval_samples") or EVAL_SAMPLES

    @property
    def eval_temperature(self) -> float | None:
        """Temperature of those completions; None: as in training."""
        return self._setting("eval_temperature")

    @property
    def eval_rows(self) -> int:
        """Most held-out prompts that are sampled, before and after."""
        most = self._setting("eval_rows")
        return EVAL_ROWS if most is None else most

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(str(self.config["output_dir"]))

    def _setting(self, name: str) -> Any:
        return self.config.get(name, options("GRPOConfig")[name].default)

    def placed(self, error: Finding | ValueError) -> ConfigError:
        """Turn a problem with the settings into an error that begins with the place of its first setting."""
        if isinstance(error, Finding | ConfigError):
            own = error
        else:
            own = ConfigError(str(error), settings=named_in(error, self.config))
        place = next((self.places[name] for name in own.settings if name in self.places), self.name)
        return ConfigError(
            f"{place}: {own.what}",
            code=own.code or "C030",
            fix=own.fix,
            changes=own.changes,
            **{**own.facts, "place": place, "what": own.what},
        )

    def load_rows(self) -> Loaded:
        """Training rows and held-out rows (or None); no rows where an environment makes the prompts."""
        if self.rows is None:
            return load_data(self.data) if self.data.is_given else Loaded(None)
        train, held_out = self.rows
        return Loaded(train.rows, None if held_out is None else held_out.rows)

    def peft_config(self) -> Any:
        """`LoraConfig`, or None. Raises `ConfigError`."""
        if self.lora is None:
            return None
        from peft import LoraConfig

        refuse_other_task(self.lora.get("task_type"))
        try:
            return LoraConfig(**{"task_type": "CAUSAL_LM", **self.lora})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name}: `lora`: {quoted(error)}",
                code="C003",
                settings=(self.name, "lora"),
                name=self.name,
                error=error,
            ) from error

    def quantization_config(self) -> Any:
        """`BitsAndBytesConfig`, or None."""
        if self.quantization is None:
            return None
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**self.quantization)


Kind = Literal["grpo", "sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a run, resolved."""

    number: int
    """From 1."""
    name: str
    kind: Kind
    recipe: Recipe
    """The recipe of this stage alone, with its own `output_dir`. `config` of an SFT stage is for `SFTConfig`."""
    until: Gate | None
    optimizer: str
    reference: str
    schedule: str
    adaptive_weights: str
    completion: str | None
    """For an SFT stage: the column with the right completion, or a text with columns in braces."""
    rows: tuple[Any, Any] | None = None
    """Training and held-out rows that are given as they are, in Python; None: those of the recipe."""

    @property
    def folder(self) -> str:
        """`02-correctness`, inside the run's folder."""
        return f"{self.number:02}-{self.name}"

    @property
    def kept(self) -> frozenset[str]:
        """Names of the states that it takes over from the stage before."""
        names = () if self.number == 1 else ("optimizer", "schedule", "adaptive_weights")
        return frozenset(name for name in names if getattr(self, name) in ("keep", "continue"))

    @property
    def max_steps(self) -> int | None:
        """The most optimizer steps it may take; None: as many as its epochs have."""
        steps = self.recipe.config.get("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def load_rows(self) -> tuple[Any, Any]:
        """Training rows and held-out rows (or None)."""
        return self.rows if self.rows is not None else self.recipe.load_rows()

    def sft_arguments(self) -> SFTConfig:
        """Arguments of an SFT stage, on a CPU without mixed precision unless `bf16` is set. Raises `ConfigError`."""
        import torch
        from trl import SFTConfig

        config = dict(self.recipe.config)
        if not torch.accelerator.is_available():
            config = {"use_cpu": True, "bf16": False, **config}
        try:
            return SFTConfig(**config)
        except ValueError as error:
            raise self.recipe.placed(error) from error
