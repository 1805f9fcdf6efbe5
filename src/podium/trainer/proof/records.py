"""Records of the proof: the run under proof, the input of checks, their results."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from transformers import TrainerState

from podium.errors import Finding
from podium.models.forward import unwrap
from podium.records import Sample, ScoredGroup
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import MicroBatch
from podium.trainer.run import TrainingRun
from podium.trainer.step import Objective, Step

NAMED = 3
"""Tensors that a message names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    code: str
    """Page of `podium explain`."""
    passed: bool | None
    """None: not checked, for the reason in `detail`."""
    detail: str
    """The finding, with the tensor or token where it is wrong."""
    measured: float | None = None
    tolerance: float | None = None
    """The largest `measured` that passes."""
    fix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The settings that `fix` changes, as in `Finding`."""
    note: bool = False
    """It passed, but `detail` is worth reading."""
    suspect: bool = False
    """It passed, but the run is probably in vain."""
    overruled: bool = False
    """It failed, and the user goes on against it."""

    @property
    def word(self) -> str:
        """The result in the table.

        >>> Check(name="rewards", code="P010", passed=True, detail="").word
        'ok'
        """
        if self.passed is None:
            return "not checked"
        if not self.passed:
            return "overruled" if self.overruled else "FAILED"
        if self.suspect:
            return "WARNING"
        return "note" if self.note else "ok"

    @property
    def is_quiet(self) -> bool:
        return self.word in ("ok", "not checked")

    @property
    def finding(self) -> Finding:
        """As an error, a warning or a note of the run."""
        severity: Any = {"FAILED": "error", "overruled": "error", "WARNING": "warning"}.get(self.word, "note")
        what = f"{self.name}: {self.detail}"
        made = Finding(code=self.code, severity=severity, what=what, fix=self.fix, step=0, changes=self.changes)
        return made.overruled() if self.overruled else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All checks of a run so far."""

    checks: tuple[Check, ...]
    step: int
    """Optimizer steps the run had taken when it began: not 0 after a resume."""
    processes: int
    seconds: float

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that stop the run."""
        return tuple(check for check in self.checks if check.word == "FAILED")

    def summary(self) -> str:
        """One line where all is well; every other check that was made has a line below it."""
        counts = Counter({"ok": "passed", "note": "passed"}.get(check.word, check.word) for check in self.checks)
        words = ("FAILED", "overruled", "WARNING", "not checked")
        others = "".join(f", {counts[word]} {word.lower()}" for word in words if counts[word])
        head = f"proof on the first batch: {counts['passed']} checks passed{others}, {self.seconds:.1f} s"
        lines = (f"  {check.word}  {check.name}  {check.detail}" for check in self.checks if not check.is_quiet)
        return "\n".join([head, *lines])

    def table(self) -> str:
        widest = max((len(check.name) for check in self.checks), default=0)
        lines = [f"  {check.word:11}  {check.name:{widest}}  {check.detail}" for check in self.checks]
        return "\n".join([f"proof on the first batch, {self.seconds:.1f} s", *lines])

    def write(self, file: Path) -> None:
        """Write `proof.json`; NaN and infinity are null."""
        checks = [{**dataclasses.asdict(check), "result": check.word} for check in self.checks]
        for check in checks:
            check.update({k: None for k, v in check.items() if isinstance(v, float) and not math.isfinite(v)})
        passed = all(check.passed is not False for check in self.checks)
        head = {"passed": passed, "step": self.step, "processes": self.processes}
        text = {**head, "seconds": round(self.seconds, 3), "checks": checks}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run under proof, at one moment."""

    training: TrainingRun
    state: TrainerState
    optimizer: Any
    try_step: Callable[[MicroBatch, Step, Objective], Tensor]
    """The trainer's own forward and backward of a micro-batch, with other settings; gives its loss."""
    entropy_coef: float
    wait: Callable[[], Any]
    """Returns when no round is being sampled."""

    @property
    def model(self) -> nn.Module:
        """The policy, without wrappers."""
        return unwrap(self.training.step.model)

    @property
    def args(self) -> GRPOConfig:
        return self.training.args

    @property
    def kind(self) -> str:
        """The part of the model that is trained."""
        return "adapter" if hasattr(self.model, "peft_config") else "weights"

    def shown(self, token: int | None) -> str:
        """A token and its id: `<|im_end|> (2)`."""
        return f"{self.training.policy.tokenizer.convert_ids_to_tokens(token)} ({token})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A large tensor in few numbers."""

    norm: float
    numbers: np.ndarray
    """At most `KEPT` of its values, float64."""


Traces = Mapping[str, Trace]


class Gradients(NamedTuple):
    """Gradients of every trained tensor, and the loss."""

    traces: Traces
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few completions, computed by the sampler, the packed forward, the training step and the plain model."""

    samples: tuple[Sample, ...]
    sampled_N: np.ndarray
    """Log-probabilities from the engine, at perturbed weights."""
    packed_N: np.ndarray
    """From the packed forward, in the weights' own precision."""
    plain_N: np.ndarray
    """From the plain model."""
    plain_at_1_N: np.ndarray | None
    """From the plain model at temperature 1, where something disagrees at the run's temperature."""
    before_N: np.ndarray
    """From the plain model at the weights as they are."""
    misplaced: str
    """A token that stands at a wrong position of the packed forward; empty: none."""
    one_step: Gradients
    """From one micro-step of one pack, in the precision of the run."""
    repeated: Gradients
    """From the same once more: where it differs, training is random."""
    two_steps: Gradients
    """From two micro-steps that cut a group in two, in the weights' own precision."""
    plain: Gradients
    """From the plain model."""
    again: Gradients
    """The same with inputs that rounding has moved: what differs more is no rounding."""
    again_N: np.ndarray
    """Log-probabilities of the same."""
    against: int
    """Tokens that the loss makes likelier although their advantage is negative, or less likely where it is positive."""

    @property
    def doubt(self) -> float:
        """1 less the probability of the least certain token, to which gradients are proportional."""
        return float(-np.expm1(self.plain_N.min())) if self.plain_N.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Input of the checks before the first optimizer step."""

    run: Subject
    trained: tuple[Sample, ...]
    """All samples of the step that will be trained on."""
    scored: tuple[ScoredGroup, ...]
    """As they were sampled and scored."""
    probe: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Input of the checks after a step: the state before it."""

    run: Subject
    weights: Traces
    samples: tuple[Sample, ...]
    logps: list[np.ndarray]
    """Log-probabilities of `samples`, as the run trains on them."""
    reference: list[np.ndarray]
    """The same under the reference; empty without one."""
    signal: bool
    """Whether a completion has an advantage in this step."""
    tensors: Mapping[str, Tensor]
    """A few weights, whole tensors, as they were."""
    decays: Mapping[str, float]
    """Learning rate x weight decay of the tensors that have any."""
    gradients: Sequence[Mapping[str, Tensor]]
    """Gradients of those tensors, as the backward left them: of the steps so far, the latest last."""


def named(names: Iterable[str]) -> str:
    """The first names, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
