"""The task that an adapter is for: PEFT gives a model of any other task another head, or another forward."""

from __future__ import annotations

from typing import Any

from podium.errors import ConfigError


def refuse_other_task(task_type: Any) -> None:
    """Raise `ConfigError` for the adapter of anything but a causal language model.

    >>> refuse_other_task(None), refuse_other_task("CAUSAL_LM")
    (None, None)
    """
    name = getattr(task_type, "value", task_type)
    if name not in (None, "CAUSAL_LM"):
        raise ConfigError(
            f"The adapter's `task_type` is {name}; GRPO trains a causal language model, and that task "
            "would give it another head.",
            code="C003",
            fix='task_type="CAUSAL_LM", or leave it out',
            task=name,
        )
