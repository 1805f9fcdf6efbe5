"""One training run: its step, what acts and what scores, its rows and what it minimises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from podium.agents.setup import Agents
from podium.algorithm.advantages import AdvantageSettings
from podium.data.prompts import PromptBuilder
from podium.models.loading import LoadSettings
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.resolve import Reward
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import Plan, PromptOrder
from podium.trainer.step import Objective, Policy, Step

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from podium.engines.table import Connection, ServedTeacher
    from podium.runs.find_model import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of `GRPOTrainer`, by their names there."""

    model: Any
    reward_funcs: Any = None
    args: GRPOConfig | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    reward_processing_classes: Any = None
    quantization_config: Any = None
    peft_config: Any = None
    tools: Any = None
    rollout_func: Any = None
    environment_factory: Any = None
    """A factory, a mapping of them, or the `EnvironmentPools` made of them."""
    agent: Any = None
    """A function, `file.py:run`, `{"command": [...]}`, or the `Program` made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The datasets, checked, and how prompts are made of them."""

    builder: PromptBuilder
    order: PromptOrder
    """In which training rows are drawn."""
    train: Any
    evaluation: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The reward functions, and how their values become advantages."""

    rewards: tuple[Reward, ...]
    accuracy: str | None
    """The reward function that tells right from wrong; None: there is none."""
    advantage: AdvantageSettings
    adaptive: AdaptiveWeights
    """The weights of the functions at the start of the run."""
    warned: set[str] = field(default_factory=set)
    """Kinds of values of rewards that this run has warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run before its weights are loaded: everything is checked."""

    source: Any
    """The model as it was given."""
    args: GRPOConfig
    load: LoadSettings
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    served: Connection | None
    """vLLM, where it samples."""
    teacher: ModelSource | ServedTeacher | None
    """The place of a teacher; None: there is none, or it is the policy."""
    agents: Agents
    rows: Rows
    scoring: Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Everything that a run has from its beginning to its end."""

    args: GRPOConfig
    step: Step
    agents: Agents
    """Tools, environments or a program, `rollout_func`, and the chat format."""
    rows: Rows
    scoring: Scoring
    objective: Objective

    @property
    def policy(self) -> Policy:
        return self.step.policy

    @property
    def plan(self) -> Plan:
        """The arithmetic of batches."""
        return self.rows.order.plan
