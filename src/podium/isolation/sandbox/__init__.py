"""A sandbox for code that a model wrote: one per program, all its tests inside, judged from outside.

    backend = choose("auto")                                          # bubblewrap, else Landlock, else RewardError
    results = run_program("print(int(input()) * 2)", [{"stdin": "3"}], backend=backend)
    [passed(test, result) for test, result in zip(tests, results)]    # expected answers stay here

It can be used without the rest of Podium: it imports `podium.isolation.machine` and `podium.errors` alone.
`confinement` puts `seccomp` (numbers) and `inside` (the harness) into a command, which `process` runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from podium.errors import ConfigError
from podium.isolation.sandbox.choice import SANDBOXES, SandboxName, choose, fix_of, probe
from podium.isolation.sandbox.confinement import USUAL, BackendName, Extras, Limits
from podium.isolation.sandbox.process import FAULT, OUTCOMES, Outcome, Result, Sandbox, SandboxFault
from podium.isolation.sandbox.verdict import passed

logger = logging.getLogger(__name__)

_TO_THE_PROGRAM = ("stdin", "call", "args", "kwargs")


def run_program(
    source: str, tests: Sequence[Mapping[str, Any]], *, backend: BackendName, limits: Limits = USUAL
) -> list[Result]:
    """One result per test, from a sandbox of their own. After two failures of the sandbox itself, `FAULT` for each.

    Landlock has no count of threads for each sandbox: where there were too many, a program is run again alone. `tests`
    may have what is expected in them; it is taken out before they go in.

    >>> run_program("print(input()[::-1])", [{"stdin": "abc", "stdout": "cba"}], backend="none")[0].stdout
    'cba\\n'
    """
    inputs = [{key: test[key] for key in _TO_THE_PROGRAM if key in test} for test in tests]
    results = [FAULT] * len(tests)
    for alone in (False, True):
        try:
            with _turns(os.getpid()).taken(alone=alone), Sandbox.start(backend, limits) as sandbox:
                results = sandbox.run(source, inputs)
        except SandboxFault as fault:
            logger.warning("The %s sandbox failed: %s", backend, fault)
        # Other programs may have taken what this one needed.
        crowded = "RuntimeError: can't start new thread"
        if not any(each.outcome == "fault" or (each.error or "").startswith(crowded) for each in results):
            break
    return results


class _Turns:
    """A lock for programs that run at the same time, and now and then one that runs alone."""

    def __init__(self) -> None:
        self._changed, self._running, self._is_alone = threading.Condition(), 0, False

    @contextlib.contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Waits until there is room: for one that runs `alone`, until no other runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            if alone:
                self._is_alone = True
                self._changed.wait_for(lambda: not self._running)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._is_alone = self._is_alone and not alone
                self._changed.notify_all()


@functools.cache
def _turns(process_id: int) -> _Turns:
    return _Turns()


def check_settings(reward: Any, ways: Iterable[str]) -> None:
    """Raises `ConfigError` for settings of a reward in a sandbox that cannot work; `extract` is one of `ways`."""
    if reward.extract not in ways:
        raise ConfigError("isolation.extract_must", extract=reward.extract, ways=ways)
    if not reward.call_seconds > 0:
        raise ConfigError("isolation.call_seconds_must", call_seconds=reward.call_seconds)
    for name in ("timeout", "memory_megabytes", "workers"):
        value = getattr(reward, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError("isolation.must_whole_number", name=name, value=value)


__all__ = ["FAULT", "OUTCOMES", "SANDBOXES", "BackendName", "Extras", "Limits", "Outcome", "Result", "Sandbox"]
__all__ += ["SandboxFault", "SandboxName", "check_settings", "choose", "fix_of", "passed", "probe", "run_program"]
