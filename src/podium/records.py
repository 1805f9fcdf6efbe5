"""Every record that crosses a package boundary.

    dataset row -> Prompt -> Group -> ScoredGroup -> TrainingGroup -> Pack (packing.py) -> TokenLogps -> loss

Ragged data are tuples of Python numbers or numpy arrays up to `packing`, flat tensors after it.

Shape letters, used everywhere: P prompts, G completions per prompt, R rollouts, N trained tokens, T all tokens in a
pack, K reward functions, V vocabulary, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]
"""One chat turn, `{"role": ..., "content": ...}`."""

Finish = Literal["stop", "length"]
"""Why a completion ended: with an end token, or because it reached `max_tokens`."""

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Severities of findings, the most severe first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset row, ready to be sampled from."""

    id: int
    """Number of this prompt within its generation round over all ranks; part of the key of its random numbers."""
    row: int
    """Position in the dataset, for messages and reports (-1 when the dataset is a stream)."""
    token_ids: tuple[int, ...]
    text: str
    """The text of `token_ids`: the rendered chat template or the plain prompt."""
    content: str | list[Message]
    """The `prompt` column as in the dataset; reward functions get it as `prompts`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; reward functions get them by name."""

    @property
    def is_chat(self) -> bool:
        """Whether the row is a conversation; then completions reach the rewards as message lists."""
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """Including the end token, when there is one; padding never."""
    logps: tuple[float, ...]
    """Log-probability of each token under `logits / temperature` of the policy that sampled it, in nats; those of vLLM
    are after all filters."""
    finish: Finish
    text: str
    """Decoded without special tokens."""
    policy_step: int
    """Optimizer steps the sampling weights had taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt and its G completions. A group never leaves its rank."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with the values of every reward function."""

    group: Group
    names_K: tuple[str, ...]
    rewards_GK: np.ndarray
    """float64; NaN where a reward function returned None ("does not apply here")."""
    extras: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Columns that reward functions added with `log_extra`, one value per completion."""

    @property
    def num_completions(self) -> int:
        """G."""
        return len(self.group.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """The part of a scored group that is trained on: token ids, advantages, and the policies to compare with."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[tuple[int, ...], ...]
    advantages_G: np.ndarray
    """float32."""
    sampled_logps: tuple[np.ndarray, ...]
    """Per completion, float32, from the engine that sampled it."""
    old_logps: tuple[np.ndarray, ...] | None = None
    """Per completion, under the weights at sampling time; None: the policy has not moved since (ratio 1)."""
    ref_logps: tuple[np.ndarray, ...] | None = None
    """Per completion, under the reference policy; None: beta is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn. Log-probabilities are always those of `logits / temperature`, before any filter."""

    num_completions: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    """1 switches it off."""
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    """0 switches it off."""
    repetition_penalty: float = 1.0
    greedy: bool = False
    end_ids: frozenset[int] = frozenset()
    """Every one of these ends a completion, and stays in it as its last token."""
    seed: int = 0
    round: int = 0
    """Number of the generation round: with `seed`, the prompt's id, g and t it decides every random number."""
    lengths: Callable[[int, int], int] | None = None
    """Exact lengths, from a prompt's id and the number of its completion: no end token is drawn before, and one is put
    there. For benchmarks and memory probes; None: completions end when they end."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`generation_kwargs` that only `model.generate` knows."""

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem or a remark about a run, before, during or after it."""

    code: str
    severity: Severity
    what: str
    """One sentence with the evidence in numbers."""
    why: str = ""
    fix: str = ""
    """The setting to change or the command to type."""
    step: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the cure changes, in keys and values of a recipe; None takes a key out. Empty: the cure is no
    setting."""

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code}] {self.what}", f"  why: {self.why}", f"  fix: {self.fix}"]
        return "\n".join(line for line, text in zip(lines, (self.what, self.why, self.fix), strict=True) if text)

    def _repr_html_(self) -> str:
        """For notebooks. It may quote a model: everything is escaped."""
        what, *more = (escape(clean(line)) for line in str(self).splitlines())
        return f"<b>{what}</b>" + "".join(f"<br>{line}" for line in more)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step in numbers: one line of `metrics.jsonl`. Names are TRL's where TRL has one."""

    step: int
    values: Mapping[str, float]


_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor moves
    r"|(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and similar: titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    r"""Text of a model without control sequences and characters, and without marks that turn its direction; lines stay.

    >>> clean("a\x1b[31mb\x1b]52;c;aGk=\x07c\rd\u202ee\nf")
    'abcde\nf'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def last_user_turn(content: str | Sequence[Message]) -> str:
    """The question in a prompt: its last user message, or all of a plain one.

    >>> last_user_turn([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}])
    '1+1?'
    """
    if isinstance(content, str):
        return content
    turns = [message for message in content if message.get("role") == "user"] or list(content)
    return str(turns[-1].get("content", ""))
