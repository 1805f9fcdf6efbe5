"""Everything Podium raises on purpose.

PodiumError
|-- ConfigError      (ValueError)    a setting, a recipe key, an argument
|-- DataError        (ValueError)    a dataset, a row, a prompt
|-- ModelError       (ValueError)    a model, a tokenizer, an adapter
|-- RewardError      (RuntimeError)  a reward function: raised, or returned something unusable
|-- EngineError      (RuntimeError)  a rollout engine
|-- ProofError       (RuntimeError)  the proof on the first batch, or of a merge: what must hold does not
`-- CheckpointError  (RuntimeError)  nothing to resume from, or nothing that verifies

Each child is also the stdlib error it refines, so `except ValueError` in a user's script keeps working. The command
line prints a `PodiumError` as its message alone, never as a traceback; inside the house a contradiction is an `assert`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class PodiumError(Exception):
    """A mistake the user can repair; the message says what, where, why and what to type.

    Args:
        what: the message, or the part of it that says what is wrong and where.
        code: of the rule that was broken, as in `podium explain CODE`; empty where there is none.
        fix: what to type; the message ends with it.
        findings: where several things are wrong at once, each of them (`podium.records.Finding`).

    >>> str(PodiumError("train.jsonl is empty (0 bytes).", code="D024", fix="Write it again."))
    'train.jsonl is empty (0 bytes). Write it again.'
    """

    def __init__(self, what: str = "", *, code: str = "", fix: str = "", findings: Iterable[Any] = ()) -> None:
        super().__init__(f"{what} {fix}".strip())
        self.what = what
        self.code = code
        self.fix = fix
        self.findings = tuple(findings)


class ConfigError(PodiumError, ValueError):
    """A setting that cannot work."""


class DataError(PodiumError, ValueError):
    """A dataset, or a row of it, that cannot be trained on."""


class ModelError(PodiumError, ValueError):
    """A model, tokenizer or adapter that cannot be used."""


class RewardError(PodiumError, RuntimeError):
    """A reward function that raised, or returned something that is not one number per completion."""

    def __init__(self, what: str = "", *, code: str = "W010", fix: str = "", findings: Iterable[Any] = ()) -> None:
        """W010: the function raised."""
        super().__init__(what, code=code, fix=fix, findings=findings)


class EngineError(PodiumError, RuntimeError):
    """A rollout engine that cannot sample."""


class ProofError(PodiumError, RuntimeError):
    """Something that must hold of sampling and training does not: the run was stopped before it could do harm."""


class CheckpointError(PodiumError, RuntimeError):
    """No checkpoint that can be resumed from."""


class HubError(PodiumError, RuntimeError):
    """The hub cannot be reached, or refuses."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean "x"?` for the nearest choice, or the empty string.

    >>> did_you_mean("learning_rat", ["learning_rate", "beta"])
    ' Did you mean `learning_rate`?'
    >>> did_you_mean("zzz", ["learning_rate"])
    ''
    """
    near = get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""
