"""What a check looks at and what it says, and all of them together."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.records import Finding, ScoredGroup, TrainingGroup

if TYPE_CHECKING:
    import numpy as np

    from podium.trainer.proof.evidence import Sample, Traces
    from podium.trainer.trainer import GRPOTrainer

NAMED = 3
"""Tensors that a message names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    code: str
    """Of its page: `podium explain P004`."""
    passed: bool | None
    """None: not checked, `detail` says why."""
    detail: str
    """What was found, with the tensor or token where it is wrong."""
    measured: float | None = None
    tolerance: float | None = None
    """The largest `measured` that passes."""
    fix: str = ""
    note: bool = False
    """It passed, but `detail` is worth reading."""
    suspect: bool = False
    """Likewise, and the run is probably in vain."""

    @property
    def word(self) -> str:
        """
        >>> Check(name="rewards", code="P010", passed=True, detail="").word
        'ok'
        """
        passed = "WARNING" if self.suspect else "note" if self.note else "ok"
        return {True: passed, False: "FAILED", None: "not checked"}[self.passed]

    @property
    def finding(self) -> Finding:
        """A failure, a warning or a note, as other rooms know it."""
        severity: Any = {"FAILED": "error", "WARNING": "warning"}.get(self.word, "note")
        return Finding(code=self.code, severity=severity, what=f"{self.name}: {self.detail}", fix=self.fix, step=0)


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
        """What stops the run."""
        return tuple(check for check in self.checks if check.passed is False)

    def table(self) -> str:
        """A line a check."""
        widest = max((len(check.name) for check in self.checks), default=0)
        lines = [f"  {check.word:11}  {check.name:{widest}}  {check.detail}" for check in self.checks]
        return "\n".join([f"proof on the first batch, {self.seconds:.1f} s", *lines])

    def write(self, file: Path) -> None:
        """`proof.json`. Numbers that JSON does not know are null."""
        checks = [{**dataclasses.asdict(check), "result": check.word} for check in self.checks]
        for check in checks:
            check.update({k: None for k, v in check.items() if isinstance(v, float) and not math.isfinite(v)})
        text = {
            "passed": not self.failures,
            "step": self.step,
            "processes": self.processes,
            "seconds": round(self.seconds, 3),
            "checks": checks,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the checks before the first optimizer step look at."""

    trainer: GRPOTrainer
    trained: tuple[TrainingGroup, ...]
    """All groups of the step that will be trained on."""
    scored: tuple[ScoredGroup, ...]
    """As they were sampled and scored."""
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What the checks after a step compare."""

    trainer: GRPOTrainer
    weights_before: Traces
    groups: tuple[TrainingGroup, ...]
    logps_before: tuple[np.ndarray, ...]
    """Of `groups`, as the run trains on them."""
    reference_before: tuple[np.ndarray, ...]
    """Of `groups`, under the reference; empty without one."""
    trained: tuple[TrainingGroup, ...]
    """What the step is trained on, or enough of it to tell where it goes."""
    trained_before: tuple[np.ndarray, ...]
    """Their log-probabilities, in the weights' own precision."""


# ---- in words ----


def named(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def shown_token(trainer: GRPOTrainer, token: int | None) -> str:
    """`<|im_end|> (2)`."""
    return f"{trainer.parts.tokenizer.convert_ids_to_tokens(token)} ({token})"
