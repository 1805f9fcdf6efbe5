"""The conversation of one program as sequences of tokens: what was sampled is kept, only what is new is rendered.

    session = ProgramSession(chat, limits)
    placed = session.place(asked)                        # the tokens to continue, on a branch
    answer = session.settle(placed, drawn)               # what the program is answered with

A branch is a sequence that grows at its end: a prompt, drawn tokens, given ones, drawn ones. A request whose messages
are those of a branch and new ones goes on with its tokens as they were drawn. Any other request begins a branch, whose
prompt holds what it shares with others. So every drawn token belongs to one branch, and is trained once.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from podium.agents.chat import ChatFormat, TooManyTokens, bounded
from podium.agents.programs.wire import Answer, ApiError, Asked
from podium.data.images import image_blocks
from podium.engines.base import Drawn
from podium.models.candidates import of_completion
from podium.records import (
    Completion,
    Finish,
    GivenImages,
    Message,
    Prompt,
    SamplingSettings,
    Turn,
    canonical,
    plain_call,
)

MOST_REFUSED = 100
"""Requests of a session that did not fit, after which no other is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of one session, all of them the recipe's."""

    settings: SamplingSettings
    """How the round is sampled. `max_tokens` bounds all tokens after the prompts, sampled or given, in all branches."""
    context_length: int | None
    vocabulary: int
    """Token ids that the model has."""
    max_requests: int
    """Answers that a program gets."""


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """A sequence of tokens that grows at its end."""

    number: int
    """Of its stream of random numbers; the first branch has 0."""
    prompt_ids: tuple[int, ...]
    asked: Asked
    """The request that began it."""
    first: int
    """Number of that request among those of the session."""
    last: int = 0
    """Number of its latest one that was answered."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    """As `Completion.candidates`."""
    images: list[GivenImages] = field(default_factory=list)
    """In the prompt and behind it."""
    turns: list[Turn] = field(default_factory=list)
    finish: Finish = "stop"
    busy: bool = False
    """Whether an answer is being drawn."""
    own: float = 0.0
    """Seconds that the program had taken by itself when it was last answered here."""

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A request on its branch."""

    branch: Branch
    asked: Asked
    added: tuple[int, ...]
    """Given tokens between the branch's last and the first to be drawn."""
    added_images: tuple[GivenImages, ...]
    """Those among them."""
    replies: tuple[Message, ...]
    """The messages that `added` renders."""
    room: int
    """Tokens that may be drawn."""
    bounded_by_program: bool
    """Whether that is the `max_tokens` of the request, and the recipe would leave more."""
    number: int
    """The request's number within its session."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens before the first that is drawn."""
        return (*self.branch.ids, *self.added)

    @property
    def images(self) -> tuple[GivenImages, ...]:
        """Those among these tokens."""
        return (*self.branch.images, *self.added_images)

    @property
    def position(self) -> int:
        """Tokens of the branch behind its prompt."""
        return len(self.branch.token_ids) + len(self.added)


Continuation = tuple[Branch, tuple[int, ...], tuple[GivenImages, ...], tuple[Message, ...]]
"""A branch, the tokens that are added to it, the images among them, and the messages that they render."""


class ProgramSession:
    """The branches of one program; one thread at a time."""

    def __init__(self, chat: ChatFormat, limits: SessionLimits, name: str = "0") -> None:
        """`name`: becomes part of the ids of answers."""
        self.chat = chat
        self.limits = limits
        self.name = name
        self.branches: list[Branch] = []
        self.counts: Counter[str] = Counter()
        """`requests`, `forks`, `realigned` (computed again), `capped`; `offers` (answers to
        requests with tools) and `calls` (in these answers)."""
        self._ends: dict[bytes, tuple[Branch, int]] = {}
        """By the digest of a conversation, the branch that holds it and the length of its tokens then."""
        self._begun: Counter[int] = Counter()
        """How many branches each prompt has begun, by a digest of it."""
        self._placed = 0
        """Requests so far, whatever became of them."""

    # ---- before drawing ----

    def place(self, asked: Asked) -> Placed:
        """The request on its branch, which is busy until it is settled. Raises `ApiError` at a limit."""
        self._placed += 1
        if self.counts["requests"] >= self.limits.max_requests:
            raise self._capped(f"the episode has had its {self.limits.max_requests} answers (max_turns)")
        if asked.tools and not self.chat.parses:
            raise ApiError(400, "the chat template of this model renders no tools", param="tools")
        if self.chat.images is None and any(image_blocks(message) for message in asked.messages):
            raise ApiError(400, "this model takes text alone", param="messages", code="unsupported_value")
        chain = _digests(asked)
        stop = next((i for i in range(len(asked.messages) - 1, 0, -1) if chain[i] in self._ends), 0)
        try:
            found = self._continued(asked, stop, chain[stop]) if stop else None
            branch, added, images, replies = found or self._anew(asked)
        except TooManyTokens:
            raise self._too_long(f"more than {self.limits.context_length}") from None
        room = self._left - len(added)
        if room < 1:
            raise self._used()
        length = len(branch.ids) + len(added)
        if self.limits.context_length is not None:
            room = min(room, self.limits.context_length - length)
        if room < 1:
            raise self._too_long(str(length))
        if branch not in self.branches:
            self.counts["forks"] += bool(self.branches)
            self.counts["realigned"] += bool(stop and found is None)
            self.branches.append(branch)
        self.counts["requests"] += 1
        branch.busy = True
        asked_for = asked.max_tokens or room
        return Placed(
            branch=branch,
            asked=asked,
            added=added,
            added_images=images,
            replies=replies,
            room=min(room, asked_for),
            bounded_by_program=asked_for < room,
            number=self._placed,
        )

    def give_up(self, placed: Placed) -> None:
        """Forget a request that will not be answered."""
        placed.branch.busy = False
        self.counts["requests"] -= 1
        if not placed.branch.turns:
            self.branches.remove(placed.branch)
            self.counts["forks"] -= bool(self.branches)

    @property
    def is_spent(self) -> bool:
        """Whether no further request can be answered."""
        is_used = self._left < 1 or self.counts["requests"] >= self.limits.max_requests
        return is_used or self.counts["refused"] >= MOST_REFUSED

    @property
    def _left(self) -> int:
        """Tokens that the episode may still draw and be given."""
        return self.limits.settings.max_tokens - sum(len(branch.token_ids) for branch in self.branches)

    def _used(self) -> ApiError:
        return self._capped(
            f"the episode has used its {self.limits.settings.max_tokens} tokens (max_completion_length)"
        )

    def _too_long(self, count: str) -> ApiError:
        self.counts["refused"] += 1
        what = f"This model's maximum context length is {self.limits.context_length} tokens; the request has {count}"
        return ApiError(400, what, param="messages", code="context_length_exceeded")

    def _capped(self, what: str) -> ApiError:
        self.counts["capped"] = 1
        self.counts["refused"] += 1
        return ApiError(429, f"Rate limit reached: {what}", code="rate_limit_exceeded")

    def _continued(self, asked: Asked, stop: int, digest: bytes) -> Continuation | None:
        """The branch whose conversation goes on behind the first `stop` messages; None: it must be rendered anew."""
        branch, length = self._ends[digest]
        replies = asked.messages[stop:]
        before = branch.ids[: len(branch.prompt_ids) + length]
        if not all(reply["role"] in ("tool", "user") for reply in replies):
            return None
        most = self.limits.context_length
        try:
            added, images = self.chat.suffix(replies, last=before[-1], most=most)
        except TooManyTokens:
            if most is not None and self._left <= most:
                raise self._used() from None
            raise
        except Exception:  # noqa: BLE001  a template can raise anything
            return None
        images = tuple(replace(x, start=len(before) + x.start) for x in images)
        if length == len(branch.token_ids) and not branch.busy:
            return branch, added, images, replies
        images = (*(x for x in branch.images if x.start < len(before)), *images)
        return self._begin((*before, *added), images, asked), (), (), ()

    def _anew(self, asked: Asked) -> Continuation:
        """A branch of its own; the one whose tokens the rendering extends exactly, where there is one."""
        try:
            rendered, images = self._rendered(asked)
        except (TooManyTokens, ApiError):
            raise
        except Exception as error:  # noqa: BLE001  a template can raise anything
            raise ApiError(400, f"the chat template refused the conversation: {error}", param="messages") from None
        ids = tuple(rendered)
        if not ids:
            raise ApiError(400, "the request has no tokens", param="prompt")
        for branch in self.branches:
            whole = branch.ids
            if branch.busy or len(whole) >= len(ids) or ids[: len(whole)] != whole:
                continue
            if branch.images == [x for x in images if x.start < len(whole)]:
                new = tuple(x for x in images if x.start >= len(whole))
                return branch, ids[len(whole) :], new, asked.messages[-1:]
        return self._begin(ids, images, asked), (), (), ()

    def _rendered(self, asked: Asked) -> tuple[Sequence[int], tuple[GivenImages, ...]]:
        most = self.limits.context_length
        if asked.prompt is None:
            return self.chat.prompt(asked.messages, asked.tools, most=most)
        if isinstance(asked.prompt, str):
            return bounded(lambda text: self.chat.tokenizer(text)["input_ids"], asked.prompt, most), ()
        if most is not None and len(asked.prompt) > most:
            raise self._too_long(str(len(asked.prompt)))
        if (largest := max(asked.prompt)) >= self.limits.vocabulary:
            what = f"'prompt' has the token id {largest}; those of this model end at {self.limits.vocabulary - 1}"
            raise ApiError(400, what, param="prompt")
        return asked.prompt, ()

    def _begin(self, ids: tuple[int, ...], images: Sequence[GivenImages], asked: Asked) -> Branch:
        """A new branch. Its random numbers depend on its prompt, and on how often that was asked, not on the order."""
        key = zlib.crc32(np.array(ids, np.int64).tobytes())
        self._begun[key] += 1
        number = zlib.crc32(f"{key} {self._begun[key]}".encode()) or 1
        return Branch(
            number=number if self.branches else 0,
            prompt_ids=ids,
            images=[*images],
            asked=asked,
            first=self._placed,
        )

    # ---- after drawing ----

    def settle(self, placed: Placed, drawn: Drawn, *, seconds: float, own: float) -> Answer:
        """Add what was drawn to its branch; what the program is answered with.

        `seconds`: from the request to the answer. `own`: what the program had taken by itself when it asked; what other
        branches took in between is not waited for the program.
        """
        branch = placed.branch
        asked = placed.asked
        prompt_ids = placed.ids
        count, stopped, stop_text = self._until_stop(drawn.token_ids, asked.stop)
        token_ids = tuple(drawn.token_ids[:count])
        logps = tuple(drawn.logps[:count])
        message = self._message(token_ids, prompt_ids, asked, stopped)
        settings = replace(self.limits.settings, max_tokens=placed.room)
        text = str(self.chat.tokenizer.decode(token_ids, skip_special_tokens=True))
        ended = stopped is not None or settings.has_ended(token_ids, text)
        if branch.turns:
            waited = own - branch.own
            branch.turns[-1] = replace(branch.turns[-1], replies=placed.replies, reply_seconds=waited)
        branch.own = own
        branch.last = placed.number
        branch.token_ids += (*placed.added, *token_ids)
        branch.images += placed.added_images
        branch.logps += logps
        branch.candidates += (drawn.candidates or [])[:count]
        # A program that asked for so many tokens has what it wanted: `max_completion_length` has cut nothing off.
        branch.finish = "stop" if ended or placed.bounded_by_program else "length"
        branch.busy = False
        self.counts["offers"] += bool(asked.tools)
        self.counts["calls"] += len(message.get("tool_calls") or ())
        stop = len(branch.token_ids)
        branch.turns.append(Turn(start=stop - count, stop=stop, message=message, seconds=seconds))
        history = replace(asked, messages=(*asked.messages, message))
        if asked.prompt is None:
            self._ends[_digests(history)[-1]] = branch, stop
        calls = "tool_calls" if message.get("tool_calls") and ended else None
        return Answer(
            id=f"chatcmpl-{self.name}-{sum(len(other.turns) for other in self.branches)}",
            message=message,
            finish=calls or ("stop" if ended else "length"),
            stop=stop_text,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logps=logps,
            pieces=tuple(_piece(self.chat.tokenizer, token) for token in token_ids) if asked.logprobs else (),
            applied={
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "max_tokens": placed.room,
            },
        )

    def _until_stop(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str | None, str]:
        """Tokens up to the first `stop` in their text, the text before it, and it; all of them, None and no text."""
        if not stops:
            return len(token_ids), None, ""
        decode = self.chat.tokenizer.decode
        for count in range(1, len(token_ids) + 1):
            text = str(decode(list(token_ids[:count]), skip_special_tokens=True))
            places = [(at, wanted) for wanted in stops if (at := text.find(wanted)) >= 0]
            if places:
                at, stop = min(places)
                return count, text[:at], stop
        return len(token_ids), None, ""

    def _message(self, token_ids: Sequence[int], prefix: Sequence[int], asked: Asked, stopped: str | None) -> Message:
        if stopped is not None:
            return {"role": "assistant", "content": stopped}
        parsed = {} if asked.prompt is not None else self.chat.parse(token_ids, prefix=prefix, tools=asked.tools)
        calls = parsed.get("tool_calls")
        if not parsed or (calls and not asked.tools):  # a client that has offered no tools expects text, as at OpenAI
            text = str(self.chat.tokenizer.decode(list(token_ids), skip_special_tokens=True))
            return {"role": "assistant", "content": text}
        message = {**parsed, "content": parsed.get("content") or ""}
        if calls:
            message["tool_calls"] = [plain_call(call["function"]) for call in calls]
        return message

    def completion(self, prompt: Prompt, policy_step: int) -> Completion:
        """The session as a completion of `prompt`: its last branch, with the others in `branches`."""
        answered = sorted((branch for branch in self.branches if branch.turns), key=attrgetter("last"))
        if not answered:
            return Completion(token_ids=(), logps=(), finish="stop", text="", policy_step=policy_step, prompt=prompt)
        *others, last = answered
        others.sort(key=attrgetter("first"))
        made = [self._completion(branch, prompt, policy_step) for branch in (last, *others)]
        finish: Finish = "turns" if self.counts["capped"] else made[0].finish
        return replace(made[0], finish=finish, branches=tuple(made[1:]))

    def _completion(self, branch: Branch, prompt: Prompt, policy_step: int) -> Completion:
        decode = self.chat.tokenizer.decode
        length = len(branch.prompt_ids)
        if branch.images or branch.prompt_ids != prompt.token_ids:
            content = branch.asked.prompt if isinstance(branch.asked.prompt, str) else list(branch.asked.messages)
            text = str(decode(list(branch.prompt_ids)))
            images = tuple(x for x in branch.images if x.start < length)
            prompt = replace(prompt, token_ids=branch.prompt_ids, text=text, content=content or text, images=images)
        return Completion(
            token_ids=tuple(branch.token_ids),
            logps=tuple(branch.logps),
            candidates=of_completion(branch.candidates, len(branch.logps)),
            finish=branch.finish,
            text=str(decode(branch.token_ids, skip_special_tokens=True)),
            policy_step=policy_step,
            turns=tuple(branch.turns),
            images=tuple(x for x in branch.images if x.start >= length),
            prompt=prompt,
            begun=branch.first,
        )


def _piece(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """The text of a token and its bytes, which may be a part of a character."""
    text = str(tokenizer.decode([token]))
    name = str(tokenizer.convert_ids_to_tokens(token))
    if "\ufffd" not in text:
        return text, text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return text, bytes.fromhex(byte[1])
    known = _byte_level()
    return text, bytes(known[character] for character in name) if known.keys() >= set(name) else text.encode()


@cache
def _byte_level() -> dict[str, int]:
    """The bytes behind the characters with which tokenizers of bytes write their tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _digests(asked: Asked) -> list[bytes]:
    """Digests of the conversation after each of its messages, and first of its tools alone."""
    digests = [hashlib.sha256(json.dumps(asked.tools, sort_keys=True, default=str).encode()).digest()]
    for message in asked.messages:
        digests.append(hashlib.sha256(digests[-1] + canonical(message).encode()).digest())
    return digests
