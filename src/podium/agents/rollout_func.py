"""TRL's `rollout_func`: completions that the user's own function samples.

    def rollout_func(prompts, trainer):
        return {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "env_mask": [...], "score": [...]}

It is given every prompt as often as the group has completions, and answers for each; `env_mask` is 0 for tokens that
the policy did not draw; every other key becomes a column for the reward functions.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from podium.engines.base import RolloutEngine, Sampled
from podium.errors import AgentError, ConfigError
from podium.isolation.workers.call_result import shown
from podium.records import Completion, Finish, Group, Message, Prompt, SamplingSettings, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RolloutFunction = Callable[[list[Any]], Mapping[str, Any]]
"""The user's function with the trainer."""

REQUIRED = ("completion_ids", "logprobs", "prompt_ids")
"""Keys that the dict of a `rollout_func` must have."""

SHIFTED = "`env_mask` may be shifted or inverted, or the function takes end tokens away"
ROUNDING = 0.01
"""Nats by which a log-probability may be above 0 through rounding in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTurn:
    """The entries of one completion in the dict that a `rollout_func` returned."""

    prompt: Prompt
    """With the token ids and the columns that were returned."""
    token_ids: list[int]
    logps: list[float]
    """Log-probabilities of the drawn tokens; NaN where they were not returned."""
    drawn: tuple[bool, ...] | None
    """Whether the policy drew each token; None: it drew all of them."""


def first_turns(
    rollout_func: RolloutFunction,
    members: Sequence[Sequence[Prompt]],
    settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[GivenTurn]]:
    """The result of a `rollout_func` by group and completion.

    Raises `ConfigError` (a `ValueError`, as in TRL) where keys are missing, `AgentError` for entries of another number.
    """
    flat = [prompt for group in members for prompt in group]
    output = dict(rollout_func([copy.deepcopy(prompt.content) for prompt in flat]))
    if missing := sorted(set(REQUIRED) - output.keys()):
        raise ConfigError(f"rollout_func must return keys {missing} in its output dict.")
    prompt_ids, completion_ids, logprobs = (output.pop(key) for key in ("prompt_ids", "completion_ids", "logprobs"))
    masks = output.pop("env_mask", None)
    if masks is None:
        _check_no_other_mask(output, completion_ids)
    entries = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, "env_mask": masks}
    for name, values in entries.items():
        if values is None and name in ("logprobs", "env_mask"):  # they may be absent
            continue
        count = len(values) if isinstance(values, Sized) else 0
        if count != len(flat):
            what = f"rollout_func returned {count} `{name}` for {len(flat)} prompts"
            raise AgentError(what, fix="return one entry for each prompt that it was given, in their order")
    turns = []
    for i, prompt in enumerate(flat):
        ids = [int(token) for token in completion_ids[i]]
        if not ids:
            raise AgentError(f"rollout_func returned no token for completion {i}", fix="return at least an end token")
        drawn = None if masks is None else _drawn(masks[i], i)
        if drawn is not None and len(drawn) != len(ids):
            what = (
                f"rollout_func returned {len(drawn)} entries of `env_mask` for the {len(ids)} tokens of completion {i}"
            )
            raise AgentError(what, fix="return 1 for each token that the policy drew and 0 for the others")
        logps = _logps(None if logprobs is None else logprobs[i], ids, drawn, i)
        extra = {
            key: values[i] if isinstance(values, list) else values
            for key, values in output.items()
            if not isinstance(values, list) or i < len(values)
        }
        own = tuple(int(token) for token in prompt_ids[i])
        text = prompt.text if own == prompt.token_ids else str(tokenizer.decode(list(own)))
        made = replace(prompt, token_ids=own, text=text, columns={**prompt.columns, **extra})
        turns.append(GivenTurn(prompt=made, token_ids=ids, logps=logps, drawn=drawn))
    for doubt in _doubts(turns, settings):
        _warn(doubt)
    count = settings.num_completions
    return [turns[start : start + count] for start in range(0, len(turns), count)]


def with_known_ids(output: Any, model: Any) -> Mapping[str, Any]:
    """Check that a `rollout_func` returned a dict of token ids in the vocabulary. Raises `AgentError`."""
    if not isinstance(output, Mapping):
        fix = f"return a dict with {', '.join(f'`{name}`' for name in REQUIRED)}"
        raise AgentError(f"rollout_func returned {shown(output)}; expected a dict", fix=fix)
    size = model.get_input_embeddings().num_embeddings
    for name in ("prompt_ids", "completion_ids"):
        for i, ids in enumerate(output.get(name) or ()):
            unknown = next((int(token) for token in ids if not 0 <= int(token) < size), None)
            if unknown is not None:
                what = f"rollout_func returned the token id {unknown} in `{name}` of completion {i}; the model has the "
                raise AgentError(f"{what}ids 0 to {size - 1}", fix="return ids of the trainer's tokenizer, unpadded")
    return output


def _check_no_other_mask(columns: Mapping[str, Any], completion_ids: Any) -> None:
    """Raise `AgentError` for a mask of tokens under another name than `env_mask`."""
    for name, values in columns.items():
        pairs = zip(values, completion_ids, strict=False) if isinstance(values, list) else ()
        sizes = [isinstance(mask, Sized) and len(mask) == len(ids) for mask, ids in pairs]
        if name.endswith("_mask") and sizes and all(sizes):
            what = f"rollout_func returned `{name}`, with an entry for each token, and no `env_mask`"
            fix = "call it `env_mask`: 1 for each token that the policy drew; a column for rewards by another name"
            raise AgentError(what, fix=fix)


def _drawn(mask: Sequence[Any], completion: int) -> tuple[bool, ...]:
    """An `env_mask` as bools. Raises `AgentError` for an entry that is neither 0 nor 1."""
    odd = next((i for i, each in enumerate(mask) if each not in (0, 1)), None)
    if odd is not None:
        what = f"rollout_func returned {shown(mask[odd])} in `env_mask`, at token {odd} of completion {completion}"
        raise AgentError(what, fix="return 1 for each token that the policy drew and 0 for the others")
    return tuple(bool(each) for each in mask)


def _doubts(turns: Sequence[GivenTurn], settings: SamplingSettings) -> Iterator[str]:
    """Doubts about the entries of a round, in sentences; none of them proves a mistake."""
    if turns and not any(turn.drawn is None or any(turn.drawn) for turn in turns):
        yield "`env_mask` is 0 for every token of all completions, so that nothing is trained"
    before, inside = [], []  # whether drawn tokens end where given ones follow; end tokens with drawn ones after them
    for turn in turns:
        of_policy = turn.drawn or (True,) * len(turn.token_ids)
        spans = [
            [token for token, _ in span]
            for own, span in groupby(zip(turn.token_ids, of_policy, strict=True), key=lambda each: each[1])
            if own
        ]
        given_last = not of_policy[-1]
        before += [span[-1] in settings.end_ids for span in (spans if given_last else spans[:-1])]
        inside += [
            token in settings.end_ids and after not in settings.end_ids for s in spans for token, after in pairwise(s)
        ]
    if before and not any(before):
        yield f"none of {len(before)} drawn spans ends in an end token before given tokens follow: {SHIFTED}"
    if any(inside):
        yield f"{sum(inside)} end tokens are followed by tokens that `env_mask` calls drawn: given text may be trained"
    longest = max((len(turn.token_ids) for turn in turns), default=0)
    if longest > settings.max_tokens:
        yield f"a completion has {longest:,} tokens, more than max_completion_length {settings.max_tokens:,}"


@functools.cache
def _warn(doubt: str) -> None:
    """Log a doubt, each once."""
    logger.warning("rollout_func: %s.", doubt)


def _logps(values: Any, token_ids: Sequence[int], drawn: tuple[bool, ...] | None, completion: int) -> list[float]:
    """The log-probabilities of the drawn tokens; NaN where there are none."""
    count = len(token_ids) if drawn is None else sum(drawn)
    if values is None:
        return [math.nan] * count
    values = [
        math.nan if each is None else float(each[0] if isinstance(each, list | tuple) else each) for each in values
    ]
    above = next((i for i, value in enumerate(values) if value > ROUNDING), None)
    if above is not None and (drawn is None or len(values) != len(token_ids) or drawn[above]):
        what = f"rollout_func returned the log-probability {values[above]:g} for token {above} of completion "
        raise AgentError(f"{what}{completion}: above 0", fix="return logarithms of probabilities, natural ones")
    if len(values) == len(token_ids) and drawn is not None:
        return [value for value, own in zip(values, drawn, strict=True) if own]
    if len(values) != count:
        what = f"rollout_func returned {len(values)} `logprobs` for a completion of {len(token_ids)} tokens"
        raise AgentError(what, fix="return one number for each token, or None")
    return values


def given_groups(
    given: Sequence[Sequence[GivenTurn]],
    settings: SamplingSettings,
    policy_step: int,
    message: Callable[[Prompt, Sequence[int]], Message],
) -> list[Group]:
    """Groups of completions that are just what a `rollout_func` returned; `message` parses the tokens of one."""
    return [
        Group(
            prompt=group[0].prompt,
            completions=tuple(
                _completion(each, settings, policy_step, message(each.prompt, each.token_ids)) for each in group
            ),
        )
        for group in given
    ]


def _completion(given: GivenTurn, settings: SamplingSettings, policy_step: int, message: Message) -> Completion:
    finish: Finish = "stop" if given.token_ids[-1] in settings.end_ids else "length"
    return Completion(
        token_ids=tuple(given.token_ids),
        logps=tuple(given.logps),
        finish=finish,
        text=str(message.get("content") or ""),
        policy_step=policy_step,
        turns=(Turn(start=0, stop=len(given.token_ids), message=message),),
        prompt=given.prompt,
        drawn=given.drawn,
    )


class BegunEngine(RolloutEngine):
    """An engine whose completions have begun already: only their further turns are drawn."""

    name = "rollout_func"

    def __init__(self, engine: RolloutEngine, given: Sequence[GivenTurn]) -> None:
        self.engine, self.given, self.tokenizer = engine, given, engine.tokenizer

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[list[Sampled]]:
        """The first turns as they were given, in their order; the engine's own after them."""
        if any(prompt.earlier for prompt in prompts):
            return self.engine.sample(prompts, settings)
        return [[(list(each.token_ids), list(each.logps))] for each in self.given] if prompts else []
