"""Rewards for code: the completion's program is run in a sandbox against the row's tests.

    rewards:
      - name: code_tests            # the share of the tests that pass
        args: {extract: fence, sandbox: auto}
      - code_stages                 # and a little for code that is there, parses, runs: for small models

The `tests` column has a list of tests, or JSON text of one, in the forms of `program_tests`: standard input and the
output expected, a function with arguments and the value expected, or assertions.

What is expected stays outside the sandbox. None, not 0, where a row has no tests and where the sandbox itself failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from podium.data.extract import fenced, tagged, text_of
from podium.errors import ConfigError
from podium.isolation.machine import cores
from podium.isolation.sandbox import BackendName, Limits, Result, check_settings, choose, passed, run_program
from podium.rewards.program_tests import read_rows

Extract = Literal["fence", "answer", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A program with its tests and how they went."""

    tests: Sequence[Mapping[str, Any]]
    results: Sequence[Result]

    @property
    def num_passed(self) -> int:
        return sum(map(passed, self.tests, self.results))

    @property
    def is_open(self) -> bool:
        """Whether the result is open: the sandbox failed, or time was up before the program had used its own."""
        outcomes = {result.outcome for result in self.results}
        return "fault" in outcomes or ("not_run" in outcomes and "timeout" not in outcomes)

    def reached(self, *stages: str) -> bool:
        return any(result.stage in stages for result in self.results)


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The share of the row's `tests` that the completion's program passes, each run in a sandbox.

    Settings: where the code is (`extract`: the last fenced block of Python, the last `<answer>`, or the `raw` text),
    whether all tests must pass (`all_or_nothing`), the processor seconds of a test (`timeout`), its address space
    (`memory_megabytes`), programs at once (`workers`, by default two per core), and the `sandbox`: auto, bubblewrap,
    landlock, or none. A call ends after about `call_seconds`: programs that no time is left for get None. Raises
    `RewardError` where no sandbox works, when it is made.

    >>> reward = CodeTests(extract="raw", sandbox="none")
    >>> tests = [{"call": "double", "args": [2], "expected": 4}, {"call": "double", "args": [3], "expected": 6}]
    >>> reward(completions=["def double(x): return x * 2", "def double(x): return 4", "no"], tests=[tests] * 3)
    [1.0, 0.5, 0.0]
    """

    __name__: ClassVar[str] = "code_tests"  # in metrics and messages

    extract: Extract = "fence"
    all_or_nothing: bool = False
    timeout: int = 1
    memory_megabytes: int = 512
    workers: int | None = None
    sandbox: str = "auto"
    call_seconds: float = 45.0
    _backend: BackendName = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, _EXTRACT)
        object.__setattr__(self, "_backend", choose(self.sandbox))

    def __call__(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
    ) -> list[float | None]:
        texts = [text_of(completion) for completion in completions]
        parsed = read_rows(tests)
        end = time.monotonic() + self.call_seconds
        with ThreadPoolExecutor(max_workers=self.workers or 2 * cores()) as pool:
            judged = list(pool.map(self._judge, texts, parsed, [end] * len(texts)))
        if log_extra is not None:
            log_extra("code", [_summary(program) for program in judged])
        return [None if own is None else self._score(program) for program, own in zip(judged, parsed, strict=True)]

    def _judge(self, text: str, tests: Sequence[Mapping[str, Any]] | None, end: float) -> _Judged | None:
        """None where there is no code, or nothing to test it with."""
        source = _EXTRACT[self.extract](text)
        if tests is None or source is None or not source.strip():
            return None
        left = end - time.monotonic()
        if left <= 0:
            return _Judged(tests=tests, results=[Result(outcome="not_run")] * len(tests))
        limits = Limits(
            cpu_seconds=self.timeout,
            wall_seconds=3.0 * self.timeout,
            total_seconds=min(10.0 * self.timeout, max(left, 3.0 * self.timeout)),
            memory_megabytes=self.memory_megabytes,
        )
        return _Judged(tests=tests, results=run_program(source, tests, backend=self._backend, limits=limits))

    def _score(self, judged: _Judged | None) -> float | None:
        if judged is None:
            return 0.0
        if judged.is_open:
            return None
        share = judged.num_passed / len(judged.tests)
        return float(share == 1) if self.all_or_nothing else share


@dataclass(frozen=True, kw_only=True)
class CodeStages(CodeTests):
    """Credit in stages: for code that is there, that parses, that runs, and for each test passed.

    What `found`, `parses` and `runs` leave of 1 is for the tests. "Runs" means that the program itself ends without an
    exception in some test, whatever its functions do.

    >>> reward = CodeStages(extract="answer", sandbox="none")
    >>> codes = [")", "1 / 0", "x = 1", "def f(): return 5"]
    >>> tests = [[{"call": "f", "args": [], "expected": 5}]] * 4
    >>> [round(value, 2) for value in reward(completions=[f"<answer>{code}</answer>" for code in codes], tests=tests)]
    [0.1, 0.2, 0.3, 1.0]
    """

    __name__: ClassVar[str] = "code_stages"

    found: float = 0.1
    parses: float = 0.1
    runs: float = 0.1

    def __post_init__(self) -> None:
        parts = (self.found, self.parses, self.runs)
        if min(parts) < 0 or sum(parts) > 1:
            raise ConfigError(
                f"found, parses and runs are {parts}; they must be at least 0 and together at most 1.", parts=parts
            )
        super().__post_init__()

    def _score(self, judged: _Judged | None) -> float | None:
        tested = super()._score(judged)
        if judged is None or tested is None:
            return tested
        stages = self.found + self.parses * judged.reached("parsed", "ran") + self.runs * judged.reached("ran")
        return stages + (1 - self.found - self.parses - self.runs) * tested


_EXTRACT: Mapping[str, Callable[[str], str | None]] = {
    "fence": fenced,
    "answer": lambda text: tagged(text, "answer"),
    "raw": lambda text: text,
}
"""Functions that find the code of a completion; None where there is none."""


def _summary(judged: _Judged | None) -> str:
    """For the table of completions: `3/4 (ok 3, timeout 1)`."""
    if judged is None:
        return "no code"
    outcomes = [result.outcome for result in judged.results]
    counts = ", ".join(f"{outcome} {outcomes.count(outcome)}" for outcome in dict.fromkeys(outcomes))
    return f"{judged.num_passed}/{len(outcomes)} ({counts})"
