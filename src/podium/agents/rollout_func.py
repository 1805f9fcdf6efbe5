"""TRL's `rollout_func`: completions that the user's own function samples.

    def rollout_func(prompts, trainer):
        return {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "env_mask": [...], "score": [...]}

It is given every prompt as often as the group has completions, and answers for each; `env_mask` is 0 for tokens that
the policy did not draw; every other key becomes a column for the reward functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from podium.engines.base import RolloutEngine, Sampled
from podium.errors import AgentError, ConfigError
from podium.records import Completion, Finish, Group, Message, Prompt, SamplingSettings, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RolloutFunction = Callable[[list[Any]], Mapping[str, Any]]
"""The user's function with the trainer."""

REQUIRED = ("completion_ids", "logprobs", "prompt_ids")
"""Keys that the dict of a `rollout_func` must have."""


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
        drawn = None if masks is None else tuple(bool(each) for each in masks[i])
        if drawn is not None and len(drawn) != len(ids):
            what = (
                f"rollout_func returned {len(drawn)} entries of `env_mask` for the {len(ids)} tokens of completion {i}"
            )
            raise AgentError(what, fix="return 1 for each token that the policy drew and 0 for the others")
        logps = _logps(None if logprobs is None else logprobs[i], ids, drawn)
        extra = {
            key: values[i] if isinstance(values, list) else values
            for key, values in output.items()
            if not isinstance(values, list) or i < len(values)
        }
        own = tuple(int(token) for token in prompt_ids[i])
        text = prompt.text if own == prompt.token_ids else str(tokenizer.decode(list(own)))
        made = replace(prompt, token_ids=own, text=text, columns={**prompt.columns, **extra})
        turns.append(GivenTurn(prompt=made, token_ids=ids, logps=logps, drawn=drawn))
    count = settings.num_completions
    return [turns[start : start + count] for start in range(0, len(turns), count)]


def _logps(values: Any, token_ids: Sequence[int], drawn: tuple[bool, ...] | None) -> list[float]:
    """The log-probabilities of the drawn tokens; NaN where there are none."""
    count = len(token_ids) if drawn is None else sum(drawn)
    if values is None:
        return [math.nan] * count
    values = [
        math.nan if each is None else float(each[0] if isinstance(each, list | tuple) else each) for each in values
    ]
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
