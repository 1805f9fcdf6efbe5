"""The process around a check, put back as it was: a check may run while something is training in the process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def process_as_it_was(variables: Mapping[str, str]) -> Iterator[None]:
    """With these environment variables; then accelerate's state, the environment and random generators are restored.

    Every `TrainingArguments` that is made empties the state of all trainers of the process, and sets variables.
    """
    environment = dict(os.environ)
    os.environ.update(variables)  # before transformers is imported, which reads some of them once
    from accelerate.state import AcceleratorState, PartialState

    from podium.trainer.snapshot import same_random_numbers

    sharding = logging.getLogger("transformers.distributed.tensor_parallel")  # warns of every model without weights
    level = sharding.level
    sharding.setLevel(logging.ERROR)
    shared = [state._shared_state for state in (AcceleratorState, PartialState)]
    before = [dict(values) for values in shared]
    try:
        with same_random_numbers():
            yield
    finally:
        sharding.setLevel(level)
        for values, then in zip(shared, before, strict=True):
            values.clear()
            values.update(then)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
