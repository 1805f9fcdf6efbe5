"""What a check says, and all of them together."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.records import Finding


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
    warning: bool = False
    """It passed, but `detail` is worth reading."""

    @property
    def word(self) -> str:
        """
        >>> Check(name="rewards", code="P010", passed=True, detail="").word
        'ok'
        """
        return {True: "note" if self.warning else "ok", False: "FAILED", None: "not checked"}[self.passed]

    @property
    def finding(self) -> Finding:
        """A failure or a warning, as other rooms know it."""
        severity: Any = "warning" if self.passed else "error"
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
