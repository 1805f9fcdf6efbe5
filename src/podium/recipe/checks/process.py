"""The process around a check, put back as it was: a check may be asked for while something is training in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def process_as_it_was() -> Iterator[None]:
    """Afterwards accelerate's shared state, the environment and the global random generators are what they were.

    Every `TrainingArguments` that is made empties the state of all trainers of the process, and sets variables.
    """
    from accelerate.state import AcceleratorState, PartialState

    from podium.trainer.snapshot import same_random_numbers

    shared = [state._shared_state for state in (AcceleratorState, PartialState)]
    before, environment = [dict(values) for values in shared], dict(os.environ)
    try:
        with same_random_numbers():
            yield
    finally:
        for values, then in zip(shared, before, strict=True):
            values.clear()
            values.update(then)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
