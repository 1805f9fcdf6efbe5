"""Rewards: the boundary that calls them, and a library of them.

A library reward is a plain function with TRL's signature; settings come after the `*`, or make the function (those
named `get_...`). `library_reward` takes both by name, as recipes do:

    GRPOTrainer(..., reward_funcs=[answer_format, library_reward("numeric_match", tolerance=0.01)])

A setting that cannot work is a `ConfigError`, when the reward is made where it can be known.

To add one: write the function, with an example in its docstring, and name it in `LIBRARY`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from podium.data.gym import gym_rows
from podium.errors import ConfigError, as_line, did_you_mean
from podium.rewards.answers import answer_correct, exact_match, multiple_choice, numeric_closeness, numeric_match
from podium.rewards.code import CodeStages, CodeTests
from podium.rewards.combine import PARTS, clipped, gated, normalised, scheduled, weighted
from podium.rewards.coverage import answer_f1, keyword_coverage
from podium.rewards.format import (
    answer_format,
    regex_format,
    think_format,
    think_format_reward,
    xml_format,
    xml_format_partial,
)
from podium.rewards.from_file import file_reward
from podium.rewards.gym import ReasoningGym
from podium.rewards.json_format import json_format, json_match, json_schema
from podium.rewards.judge import Judge
from podium.rewards.languages import language
from podium.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    ideal_length,
    token_budget,
)
from podium.rewards.mathematics import accuracy_reward, math_match, reasoning_accuracy_reward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import (
    Reward,
    check_rewards,
    load_reward_models,
    resolve_rewards,
    resolve_weights,
)
from podium.rewards.score import CallSettings, score
from podium.rewards.style import distinct_ngrams, forbidden_patterns, group_diversity, required_patterns
from podium.rewards.tester import audit, examine

FACTORIES: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "code_stages": CodeStages,
    "code_tests": CodeTests,
    "clipped": clipped,
    "gated": gated,
    "get_cosine_scaled_reward": get_cosine_scaled_reward,
    "get_repetition_penalty_reward": get_repetition_penalty_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
    "judge": Judge,
    "normalised": normalised,
    "reasoning_gym": ReasoningGym,
    "reward_model": RewardModel,
    "scheduled": scheduled,
    "weighted": weighted,
}
"""Called with their settings, they give a reward function."""

LIBRARY: Mapping[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (
            *(accuracy_reward, answer_correct, answer_f1, answer_format, distinct_ngrams, exact_match),
            *(forbidden_patterns, group_diversity, ideal_length, json_format, json_match, json_schema),
            *(keyword_coverage, language, math_match, multiple_choice, numeric_closeness, numeric_match),
            *(reasoning_accuracy_reward, regex_format, required_patterns, think_format, think_format_reward),
            *(token_budget, xml_format, xml_format_partial),
        )
    },
    **FACTORIES,
}
"""Every reward by its name in recipes."""


def library_reward(name: str, **arguments: Any) -> Callable[..., Any]:
    """The reward function of that name with these settings. Raises `ConfigError` for a name or setting it lacks.

    >>> library_reward("regex_format", pattern="[0-9]+")(completions=["7", "seven"])
    [1.0, 0.0]
    """
    if name not in LIBRARY:
        raise ConfigError(
            f"no reward `{name}` in the library. It has {', '.join(LIBRARY)}.",
            fix=did_you_mean(name, LIBRARY) or "podium rewards list",
        )
    function = LIBRARY[name]
    settings = _settings(name)
    for argument in arguments:
        if argument not in settings:
            known = f"It takes {', '.join(settings)}." if settings else "It takes no settings."
            what = f"reward `{name}` has no setting `{argument}`. {known}"
            raise ConfigError(what, fix=did_you_mean(argument, settings) or as_line(argument, None))
    needed = [key for key, each in settings.items() if each.default is each.empty and key not in arguments]
    if needed:
        raise ConfigError(f"reward `{name}` needs {', '.join(f'`{setting}`' for setting in needed)}.")
    if name in FACTORIES:
        return function(**arguments)
    made = functools.partial(function, **arguments) if arguments else function
    _try_settings(name, made)
    return made


def _try_settings(name: str, made: Callable[..., Any]) -> None:
    """Scores no completions at all, so that a setting that cannot work is found now and not in the first round."""
    data = set(inspect.signature(LIBRARY[name]).parameters) - set(_settings(name)) - {*_SERVICES}
    try:
        made(**{column: [] for column in data})
    except ConfigError as error:
        raise ConfigError(f"reward `{name}`: {error.what}", code=error.code, fix=error.fix) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward `{name}` cannot work with these settings: {error}") from error


_SERVICES = ("trainer_state", "log_extra", "log_metric")
"""Arguments of a reward that are no lists with an entry for each completion."""


def _settings(name: str) -> dict[str, inspect.Parameter]:
    """The parameters that a recipe may set: all of a factory; those behind the `*` of a reward function."""
    parameters = inspect.signature(LIBRARY[name]).parameters
    return {key: each for key, each in parameters.items() if name in FACTORIES or each.kind is each.KEYWORD_ONLY}


__all__ = [
    "FACTORIES",
    "LIBRARY",
    "PARTS",
    "CallSettings",
    "CodeStages",
    "CodeTests",
    "Judge",
    "ReasoningGym",
    "Reward",
    "RewardModel",
    "accuracy_reward",
    "answer_correct",
    "answer_f1",
    "answer_format",
    "audit",
    "check_rewards",
    "clipped",
    "distinct_ngrams",
    "exact_match",
    "examine",
    "file_reward",
    "forbidden_patterns",
    "gated",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "group_diversity",
    "gym_rows",
    "ideal_length",
    "json_format",
    "json_match",
    "json_schema",
    "keyword_coverage",
    "language",
    "library_reward",
    "load_reward_models",
    "math_match",
    "multiple_choice",
    "normalised",
    "numeric_closeness",
    "numeric_match",
    "reasoning_accuracy_reward",
    "regex_format",
    "required_patterns",
    "resolve_rewards",
    "resolve_weights",
    "scheduled",
    "score",
    "think_format",
    "think_format_reward",
    "token_budget",
    "weighted",
    "xml_format",
    "xml_format_partial",
]
