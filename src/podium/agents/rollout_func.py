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
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.errors import AgentError, ConfigError
from podium.errors.texts import named_list
from podium.isolation.functions import shown
from podium.records import Completion, Finish, Prompt, SamplingSettings, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.agents.chat import ChatFormat

logger = logging.getLogger(__name__)

RolloutFunction = Callable[[list[Any]], Mapping[str, Any]]
"""The user's function with the trainer."""

REQUIRED = ("completion_ids", "logprobs", "prompt_ids")
"""Keys that the dict of a `rollout_func` must have."""

SHIFTED = "`env_mask` may be shifted, or the function takes end tokens away, and no turn learns to end"
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
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> list[GivenTurn]:
    """The result of a `rollout_func` for the prompts of completions.

    Raises `ConfigError` (a `ValueError`, as in TRL) where keys are missing, `AgentError` for entries of another number.
    """
    output = dict(rollout_func([copy.deepcopy(prompt.content) for prompt in prompts]))
    prompt_ids, completion_ids, logprobs = (output.pop(key) for key in ("prompt_ids", "completion_ids", "logprobs"))
    if (masks := output.pop("env_mask", None)) is None:
        _check_no_other_mask(output, completion_ids)
    entries = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, "env_mask": masks}
    for name, values in entries.items():
        if values is None and name in ("logprobs", "env_mask"):  # they may be absent
            continue
        count = len(values) if isinstance(values, list) else 0
        if count != len(prompts):
            raise AgentError(
                f"rollout_func returned {count} `{name}` for {len(prompts)} prompts",
                fix="return one entry for each prompt that it was given, in their order",
                count=count,
                name=name,
                flat_count=len(prompts),
            )
    turns = []
    for i, prompt in enumerate(prompts):
        ids = completion_ids[i]
        own = tuple(prompt_ids[i])
        if not ids or not own:
            missing = "token" if own else "`prompt_ids`"
            fix = "return at least an end token" if own else "return the ids that the completion was drawn after"
            raise AgentError(f"rollout_func returned no {missing} for completion {i}", fix=fix)
        drawn = None if masks is None else _drawn(masks[i], i)
        if drawn is not None and len(drawn) != len(ids):
            raise AgentError(
                f"rollout_func returned {len(drawn)} entries of `env_mask` for the {len(ids)} tokens of completion {i}",
                fix="return 1 for each token that the policy drew and 0 for the others",
                drawn_count=len(drawn),
                ids_count=len(ids),
                i=i,
            )
        logps = _logps(None if logprobs is None else logprobs[i], ids, drawn, i)
        extra = {
            key: values[i] if isinstance(values, list) else values
            for key, values in output.items()
            if not isinstance(values, list) or i < len(values)
        }
        text = prompt.text if own == prompt.token_ids else str(tokenizer.decode(list(own)))
        made = replace(prompt, token_ids=own, text=text, columns={**prompt.columns, **extra})
        turns.append(GivenTurn(prompt=made, token_ids=ids, logps=logps, drawn=drawn))
    for doubt in _doubts(turns, settings):
        _warn(doubt)
    return turns


def checked_output(output: Any, model: Any) -> Mapping[str, Any]:
    """Results of a `rollout_func`, tensors and tuples as lists. Raises `AgentError` for anything but token ids in
    the vocabulary, and `ConfigError` where keys are missing.
    """
    if not isinstance(output, Mapping):
        raise AgentError(
            f"rollout_func returned {shown(output)}; expected a dict",
            fix=f"return a dict with {named_list(REQUIRED)}",
            shown=shown(output),
            required=REQUIRED,
        )
    if missing := sorted(set(REQUIRED) - output.keys()):
        raise ConfigError(f"rollout_func must return keys {missing} in its output dict.", missing=missing)
    size = model.get_input_embeddings().num_embeddings
    lists = {name: _plain(values) for name, values in output.items() if name in (*REQUIRED, "env_mask")}
    for name in ("prompt_ids", "completion_ids"):
        if isinstance(lists[name], list):
            lists[name] = [_ids(ids, name, i, size) for i, ids in enumerate(lists[name])]
    return {**output, **lists}


def _plain(values: Any) -> Any:
    """Tensors, arrays and tuples as lists; anything else as it is."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, tuple) else values


def _ids(values: Any, name: str, completion: int, size: int) -> list[int]:
    """The token ids of one completion. Raises `AgentError`."""
    fix = "return ids of the trainer's tokenizer, unpadded"
    try:
        ids = [operator.index(token) for token in _plain(values)]
    except TypeError:
        raise AgentError(
            f"rollout_func returned {shown(values)} in `{name}` of completion {completion}; expected a list of ids",
            fix=fix,
            shown=shown(values),
            name=name,
            completion=completion,
        ) from None
    unknown = next((token for token in ids if not 0 <= token < size), None)
    if unknown is not None:
        what = f"rollout_func returned the token id {unknown} in `{name}` of completion {completion}"
        raise AgentError(f"{what}; the model has the ids 0 to {size - 1}", fix=fix)
    return ids


def _check_no_other_mask(columns: Mapping[str, Any], completion_ids: Any) -> None:
    """Raise `AgentError` for a mask of tokens under another name than `env_mask`."""
    for name in (column for column in columns if "mask" in column.lower()):
        rows = _plain(columns[name])
        pairs = zip(rows, completion_ids or (), strict=False) if isinstance(rows, list) else ()
        sizes = [isinstance(mask := _plain(row), list) and len(mask) == len(ids) for row, ids in pairs]
        if sizes and all(sizes):
            raise AgentError(
                f"rollout_func returned `{name}`, with an entry for each token, and no `env_mask`",
                fix="call it `env_mask`: 1 for each token that the policy drew; a column for rewards by another name",
                name=name,
            )


def _drawn(values: Any, completion: int) -> tuple[bool, ...]:
    """An `env_mask` as bools. Raises `AgentError` for an entry that is neither 0 nor 1."""
    mask = _plain(values)
    odd = next((i for i, value in enumerate(mask) if value not in (0, 1)), None) if isinstance(mask, list) else 0
    if odd is not None:
        entry, token = (mask[odd], f", at token {odd}") if isinstance(mask, list) else (mask, "")
        at = f"{token} of completion {completion}"
        raise AgentError(
            f"rollout_func returned {shown(entry)} in `env_mask`{at}",
            fix="return 1 for each token that the policy drew and 0 for the others",
            shown=shown(entry),
            at=at,
        )
    return tuple(bool(value) for value in mask)


def _doubts(turns: Sequence[GivenTurn], settings: SamplingSettings) -> Iterator[str]:
    """Doubts about the entries of a round, in sentences; none of them proves a mistake."""
    if turns and not any(turn.drawn is None or any(turn.drawn) for turn in turns):
        yield "`env_mask` is 0 for every token of all completions, so that nothing is trained"
    ended = []
    returned = []
    inside = 0
    turned = []
    for turn in turns:
        of_policy = turn.drawn or (True,) * len(turn.token_ids)
        spans = [
            (own, [token in settings.end_ids for token, _ in span])
            for own, span in groupby(zip(turn.token_ids, of_policy, strict=True), key=lambda pair: pair[1])
        ]
        for (own, ends), (_, after) in pairwise(spans):
            if own and not all(after):  # which would be padding
                ended.append(ends[-1])
                returned.append(after[0])
        inside += sum(end and not after for own, ends in spans if own for end, after in pairwise(ends))
        turned.append(not of_policy[0] and not of_policy[-1] and turn.token_ids[-1] in settings.end_ids)
    if any(returned) and not any(ended):
        yield f"given tokens begin with the end token of the drawn ones, {sum(returned)} times: {SHIFTED}"
    if inside:
        yield f"{inside} end tokens are followed by tokens that `env_mask` calls drawn: given text may be trained"
    if turned and all(turned):
        yield "`env_mask` is 0 for the first and the last token of all completions: it may be inverted"
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
    try:
        values = [
            math.nan if value is None else float(value[0] if isinstance(value, list | tuple) else value)
            for value in _plain(values)
        ]
    except (TypeError, ValueError):
        raise AgentError(
            f"rollout_func returned {shown(values)} in `logprobs` of completion {completion}; expected numbers",
            fix="return one number for each token, or None",
            shown=shown(values),
            completion=completion,
        ) from None
    whole = drawn is not None and len(values) == len(token_ids)
    mine = {i: value for i, value in enumerate(values) if not whole or (drawn is not None and drawn[i])}
    odd = next((i for i, value in mine.items() if value > ROUNDING or value == -math.inf), None)
    if odd is not None:
        how = "above 0" if values[odd] > 0 else "it was drawn"
        what = f"rollout_func returned the log-probability {values[odd]:g} for token {odd} of completion {completion}"
        raise AgentError(
            f"{what}: {how}", fix="return natural logarithms of probabilities, or None", what=what, how=how
        )
    if len(mine) != count:
        raise AgentError(
            f"rollout_func returned {len(values)} `logprobs` for a completion of {len(token_ids)} tokens",
            fix="return one number for each token, or None",
            values_count=len(values),
            token_ids_count=len(token_ids),
        )
    return [*mine.values()]


def given_completion(
    turn: GivenTurn, chat: ChatFormat, tools: Sequence[Any], settings: SamplingSettings, policy_step: int
) -> Completion:
    """A completion that is just what a `rollout_func` returned. `tools`: schemas with which it is parsed."""
    message = chat.parse(turn.token_ids, prefix=turn.prompt.token_ids, tools=tools)
    text = str(message.get("content") or "")
    finish: Finish = "stop" if settings.has_ended(turn.token_ids, text) else "length"
    return Completion(
        token_ids=tuple(turn.token_ids),
        logps=tuple(turn.logps),
        finish=finish,
        text=text,
        policy_step=policy_step,
        turns=(Turn(start=0, stop=len(turn.token_ids), message=message),),
        prompt=turn.prompt,
        drawn=turn.drawn,
    )


def foreign_logps(returned: Sequence[np.ndarray], own: Sequence[np.ndarray], most: float) -> str:
    """How returned log-probabilities differ from the policy's own of the same tokens, and what they are instead.

    Args:
        returned: of the drawn tokens of each completion; NaN where there is none.
        own: of the same tokens.
        most: mean difference in nats up to which they are the same; then the result is empty.

    >>> own = [np.array([-1.0, -2.0, -3.0, -4.0]), np.array([-5.0, -1.0, -2.0, -0.5])]
    >>> foreign_logps([np.array([-2.0, -3.0, -4.0, 0.0]), np.array([-1.0, -2.0, -0.5, 0.0])], own, 0.1)
    "differ from the policy's by 1.75 nats on average; they are those of the token after each"
    """

    def apart(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        gaps = np.concatenate([np.abs(a - b) for a, b in pairs]) if pairs else np.empty(0)
        return float(gaps[~np.isnan(gaps)].mean()) if (~np.isnan(gaps)).any() else 0.0

    def other(values: np.ndarray) -> np.ndarray:
        return min((b for b in own if len(b) == len(values)), key=lambda b: apart([(values, b)]))

    pairs = list(zip(returned, own, strict=True))
    if not apart(pairs) > most:
        return ""
    readings = {
        "they are those of the token after each": [(a[:-1], b[1:]) for a, b in pairs],
        "they are those of the token before each": [(a[1:], b[:-1]) for a, b in pairs],
        "they are those of other completions": [(a, other(a)) for a in returned],
        "they are right but for zeros: `env_mask` may call given tokens drawn": [
            (np.where(a == 0, np.nan, a), b) for a, b in pairs
        ],
    }
    best = min(readings, key=lambda name: apart(readings[name]))
    hints = [best] if apart(readings[best]) <= apart(pairs) / 4 else []
    given = np.concatenate(returned)
    if np.nanmin(given) == np.nanmax(given):
        hints = [f"all of them are {np.nanmin(given):g}"]
    return "; ".join([f"differ from the policy's by {apart(pairs):.2f} nats on average", *hints])
