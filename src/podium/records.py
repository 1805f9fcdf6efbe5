"""Every record that crosses a package boundary.

    dataset row -> Prompt -> Group -> ScoredGroup -> Sample -> Pack (packing.py) -> TokenLogps -> loss

Ragged data are tuples of Python numbers or numpy arrays up to `packing`, flat tensors after it.

Shape letters, used everywhere: P prompts, G completions per prompt, R rollouts, A drawn tokens of a rollout, N those of
a pack, T all tokens in a pack, K reward functions, V vocabulary, D width.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn, `{"role": ..., "content": ...}`."""

Finish = Literal["stop", "length", "turns", "context"]
"""Why a completion ended: with an end token; because a turn reached `max_tokens`; with calls that the limit of turns
leaves unanswered; with a call or a turn whose answer did not fit and was left out."""

CallProblem = Literal["", "unknown", "arguments", "error", "timeout", "result", "lost"]
"""Kind of a call's failure: no such tool, wrong arguments, an exception, the time limit, a result of no use, a server
that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenImages:
    """Images among given tokens, as the processor has prepared them. Equal where the images and their places are."""

    digest: bytes
    """Hash of the tokens and of all fields."""
    placeholder: int
    """The token that stands for a feature of an image."""
    placeholders: np.ndarray = field(compare=False)
    """Indices of these tokens among those that are described, in the order of the features."""
    fields: Mapping[str, Tensor] = field(compare=False)
    """Arguments of the model's forward that describe the images: `pixel_values` and others, [rows, ...]."""
    token_fields: Mapping[str, Tensor] = field(compare=False)
    """Arguments that describe the tokens, such as `mm_token_type_ids`, [tokens]."""
    num_tokens: int = field(default=0, compare=False)
    """How many tokens are described."""
    short_ids: tuple[int, ...] = field(default=(), compare=False)
    """These tokens before each image got one for each feature, for a server that prepares images by itself."""
    pictures: tuple[Any, ...] = field(default=(), compare=False)
    """The images themselves, opened, in order; for such a server alone, so a checkpoint has none."""
    start: int = field(default=0, compare=False)
    """Index in the whole sequence of the first token that is described."""
    prompt: tuple[int, int] | None = field(default=None, compare=False)
    """Id and row of the prompt, of which a checkpoint makes them again; None: they are not those of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset row, ready to be sampled from."""

    id: int
    """Number of this prompt within its generation round over all ranks; part of the key of its random numbers."""
    row: int
    """Position in the dataset, for messages and reports (-1 when the dataset is a stream)."""
    token_ids: tuple[int, ...]
    text: str
    """The text of `token_ids`: the rendered chat template or the plain prompt, images as one mark with their hash."""
    content: str | list[Message]
    """The `prompt` column as in the dataset; reward functions get it as `prompts`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; reward functions get them by name."""
    images: tuple[GivenImages, ...] = ()
    """Empty: text alone."""

    @property
    def is_chat(self) -> bool:
        """Whether the row is a conversation; then completions reach the rewards as message lists."""
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool, and its result."""

    name: str
    arguments: Mapping[str, Any]
    content: str | list[Any]
    """Content of the tool message: the result as text, content blocks as they are, or the error."""
    failed: bool
    seconds: float
    cut: int = 0
    """Tokens of the result that were cut off."""
    problem: CallProblem = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens that the policy drew without interruption, and the messages that it was given after them."""

    start: int
    """`token_ids[start:stop]` of the completion were drawn; those before `start` and after the turn before were given.
    """
    stop: int
    message: Message
    """The assistant message that the tokens were parsed into, with its `tool_calls`."""
    calls: tuple[Call, ...] = ()
    replies: tuple[Message, ...] = ()
    """Results of tools, or the environment's next user message; plain data: checkpoints, rewards and logs read it."""
    reward: float | None = None
    """Reward of this step, where an environment gives one."""
    seconds: float = 0.0
    """From the reply before (or the start of sampling) until its last token was drawn."""
    reply_seconds: float = 0.0
    """From its last token until the replies were there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """Including the end token, when there is one; padding never. With several turns also the tokens given between them,
    in order."""
    logps: tuple[float, ...]
    """Log-probability of each drawn token under `logits / temperature` of the policy that sampled it, in nats; those of
    vLLM are after all filters."""
    finish: Finish
    text: str
    """Decoded without special tokens."""
    policy_step: int
    """Optimizer steps the sampling weights had taken."""
    turns: tuple[Turn, ...] = ()
    """Empty: one uninterrupted answer."""
    prompt: Prompt | None = None
    """Its own prompt, where an environment made it differ from the group's."""
    drawn: tuple[bool, ...] | None = None
    """Whether each token was drawn by the policy, where a `rollout_func` says so; None: the turns tell."""
    candidates: tuple[np.ndarray, ...] | None = None
    """For each drawn token what filters such as `top_p` had left to draw it from, as `models.candidates` stores it;
    `logps` are then those of that distribution. None: every token could be drawn, or it is not known which."""

    images: tuple[GivenImages, ...] = ()
    """Those that tools or an environment gave between turns."""
    branches: tuple[Completion, ...] = ()
    """Other sequences of the same episode, each behind a prompt of its own, where a program has edited its history or
    begun another conversation. They have the completion's advantage."""
    begun: int = 0
    """Orders the sequences of an episode by their first requests."""

    @property
    def sequences(self) -> tuple[Completion, ...]:
        """All that is trained on: itself and its branches. A token is drawn in one of them alone."""
        return (self, *self.branches)

    @property
    def in_order(self) -> tuple[Completion, ...]:
        """The same in the order in which they began."""
        return tuple(sorted(self.sequences, key=lambda sequence: sequence.begun))

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy drew, those of branches included."""
        return sum(len(sequence.logps) for sequence in self.sequences)

    @property
    def messages(self) -> list[Message]:
        """The conversation after the prompt: every turn's message and its replies."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        return [message for turn in self.turns for message in (turn.message, *turn.replies)]

    @property
    def action_mask(self) -> tuple[bool, ...]:
        """Whether the policy drew each token."""
        if self.drawn is not None:
            return self.drawn
        mask = [len(self.logps) == len(self.token_ids)] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        return tuple(mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt and its G completions. A group never leaves its rank."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    temperature: float | None = None
    """That of the log-probabilities, where training computes with another; None: the same."""


PROGRAM_FAILED, PROGRAM_LOG = "program failed", "program log"
"""Columns of `ScoredGroup.extras` where completions are episodes of a program."""


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

    def failure(self, g: int) -> tuple[str, str]:
        """How the program of a completion has failed, and the end of its output; empty where it has not."""
        how = self.extras.get(PROGRAM_FAILED)
        logs = self.extras.get(PROGRAM_LOG)
        return (str(how[g]), str(logs[g]) if logs else "") if how and how[g] else ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence to train on: a prompt, the tokens behind it, and numbers for each token that was drawn.

    A completion is one sample; an episode of a program whose history was edited is several.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The tokens behind the prompt."""
    actions: np.ndarray
    """The action mask, bool over `token_ids`: what the policy drew. A are those tokens; only these are trained on."""
    advantage: float
    """Advantage of the whole sequence, for loss terms that have one value per rollout."""
    advantages_A: np.ndarray
    """float32."""
    sampled_logps_A: np.ndarray
    """float32, from the engine that sampled it; NaN where it gave none."""
    old_logps_A: np.ndarray | None = None
    """float32, under the weights at sampling time; None: the policy has not moved since (ratio 1)."""
    ref_logps_A: np.ndarray | None = None
    """float32, under the reference policy; None: beta is 0."""
    penalties_A: np.ndarray | None = None
    """float32, weights of |log(pi / pi_old)|; None: 0."""
    candidates: tuple[np.ndarray, ...] | None = None
    """For each drawn token those that it could have been, over which all log-probabilities are normalized; None: all
    tokens."""
    rollout: tuple[int, int] = (0, 0)
    """Its prompt's place in the round over all ranks, and the number of its completion in the group."""
    images: tuple[GivenImages, ...] = ()
    """Those of its prompt, and those that were given later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Settings of sampling. Log-probabilities are those of `logits / temperature`: over all tokens, or with `replay`
    over those that the filters have left."""

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
    """Exact lengths of turns, from a prompt's id and the number of its completion: no end token is drawn before, and
    one is put there. For benchmarks and memory probes; None: completions end when they end."""
    in_order_of_answers: bool = False
    """Whether the live engine goes on with a row as soon as its tools have answered. By default it goes on with all
    rows of a turn together, so that batches, and with them the last bits of the logits, do not depend on how long a
    tool took."""
    never: tuple[int, ...] = ()
    """Tokens that are not drawn, as they stand for images; log-probabilities are normalized over them all the same."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`generation_kwargs` that only `model.generate` knows."""
    replay: bool = False
    """Whether the tokens that filters leave are kept with each token that is drawn, for training to normalize over."""

    @property
    def keeps_candidates(self) -> bool:
        """Whether tokens are drawn from less than all tokens, and those are kept."""
        return self.replay and not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a completion, under the name of transformers or vLLM."""
        given = self.extra.get("stop_strings") or self.extra.get("stop") or ()
        return (given,) if isinstance(given, str) else tuple(given)

    def has_ended(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether one turn ended by itself: with an end token, or with one of `stop_texts`."""
        if token_ids[-1] in self.end_ids:
            return True
        return bool(self.stop_texts) and (
            len(token_ids) < self.max_tokens or any(stop in text for stop in self.stop_texts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Tokens that an engine is asked to continue, and whose random numbers it draws with.

    What it draws depends on the tokens and on these numbers, not on when it comes or what else is sampled.
    """

    token_ids: tuple[int, ...]
    """A prompt, and what has followed it so far."""
    prompt_id: int
    completion: int = 0
    """Number of its first completion within the group of the prompt."""
    num_completions: int = 1
    max_tokens: int
    """Tokens to draw at most."""
    turn: int = 0
    """Number of the turn, where turns have random numbers of their own; their positions then begin anew."""
    position: int = 0
    """Tokens at the end of `token_ids` that belong to the completion: random numbers go on behind theirs."""
    images: tuple[GivenImages, ...] = ()
    """Those among its tokens."""
    settings: SamplingSettings | None = None
    """Its own; None: those of the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step in numbers: one line of `metrics.jsonl`. Names are TRL's where TRL has one."""

    step: int
    values: Mapping[str, float]


_CALL = re.compile(r"</?tool_call|<\|tool_call|<function=|\"name\"\s*:.*\"arguments\"\s*:", re.DOTALL)


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message: of several blocks those with text, and a mark for each image.

    >>> content_of({"content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]})
    '[image] What is this?'
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    blocks = [block for block in content if isinstance(block, Mapping)]
    return " ".join("[image]" if block.get("type") == "image" else str(block.get("text", "")) for block in blocks)


def has_malformed_call(message: Message) -> bool:
    """Whether the text of a turn has the form of a call, although none could be parsed."""
    return not message.get("tool_calls") and _CALL.search(content_of(message)) is not None


MOST_NESTED = 64
"""Levels of lists and objects within each other that are taken of what a model or a program has written."""


def is_too_deep(value: Any) -> bool:
    """Whether JSON is nested more than `MOST_NESTED` deep: what follows it by recursion ends in a `RecursionError`.

    >>> is_too_deep({"a": [1]}), is_too_deep(json.loads("[" * 65 + "]" * 65))
    (False, True)
    """
    level = [value]
    for _ in range(MOST_NESTED + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not inner:
            return False
        level = [item for of_one in inner for item in of_one]
    return True


def plain_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call for chat templates: arguments are a mapping where they are one."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
            arguments = read if isinstance(read, dict) and not is_too_deep(read) else arguments
        except (ValueError, RecursionError):
            pass
    return {"type": "function", "function": {"name": str(function.get("name")), "arguments": arguments}}


def is_picture(value: Any) -> bool:
    """Whether a value is a Pillow image, without an import of Pillow."""
    return type(value).__module__.startswith("PIL.")


def as_name(value: Any) -> str:
    """A value that JSON lacks as a text that is always the same: of an image, or its bytes, the sha256."""
    if is_picture(value):
        value = value.tobytes()
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def data_url(image: Any) -> str:
    """A Pillow image, or the bytes of a file of one, as text."""
    if not isinstance(image, bytes):
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        image = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def canonical(message: Message) -> str:
    """Equal for two messages that say the same, whichever keys a client has added."""
    calls = [plain_call(call["function"])["function"] for call in message.get("tool_calls") or ()]
    kept = [message["role"], message.get("content") or "", message.get("reasoning_content") or "", calls]
    return json.dumps(kept, sort_keys=True, default=as_name)


def is_void(message: Message) -> bool:
    """Whether a turn is neither a call nor an answer: empty, or a call that could not be parsed."""
    return has_malformed_call(message) or not (message.get("tool_calls") or content_of(message).strip())


def last_user_turn(content: str | Sequence[Message]) -> str:
    """The question in a prompt: its last user message, or all of a plain one.

    >>> last_user_turn([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}])
    '1+1?'
    """
    if isinstance(content, str):
        return content
    turns = [message for message in content if message.get("role") == "user"] or list(content)
    return content_of(turns[-1])
