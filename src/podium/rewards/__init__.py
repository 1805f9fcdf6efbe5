"""Rewards: the boundary that calls them, and a library of them.

A library reward is a plain function with TRL's signature; settings come after the `*`, or make the function (those
named `get_...`). `library_reward` takes both by name, as recipes do:

    GRPOTrainer(..., reward_funcs=[answer_format, library_reward("numeric_match", tolerance=0.01)])

A setting that cannot work is a `ConfigError`, when the reward is made where it can be known.

To add one: write the function, with an example in its docstring, and name it in `LIBRARY` below.
"""

from __future__ import annotations

from podium.lazy import lazy_names
from podium.rewards.answers import (
    answer_correct,
    answer_f1,
    exact_match,
    keyword_coverage,
    multiple_choice,
    numeric_closeness,
    numeric_match,
    text_similarity,
    worked_steps,
)
from podium.rewards.code import CodeStages, CodeTests
from podium.rewards.combine import PARTS, clipped, gated, normalised, scheduled, weighted
from podium.rewards.format import (
    answer_format,
    json_format,
    json_match,
    json_schema,
    regex_format,
    think_format,
    think_format_reward,
    tool_use,
    xml_format,
    xml_format_partial,
)
from podium.rewards.from_file import file_reward
from podium.rewards.judge import Judge
from podium.rewards.mathematics import accuracy_reward, math_match, reasoning_accuracy_reward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import (
    FACTORIES,
    LIBRARY,
    Reward,
    check_rewards,
    library_reward,
    load_reward_models,
    resolve_rewards,
    resolve_weights,
)
from podium.rewards.score import CallSettings, score
from podium.rewards.style import (
    distinct_ngrams,
    forbidden_patterns,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    group_diversity,
    ideal_length,
    language,
    required_patterns,
    token_budget,
)

FACTORIES.update(
    {
        "code_stages": CodeStages,
        "code_tests": CodeTests,
        "clipped": clipped,
        "gated": gated,
        "get_cosine_scaled_reward": get_cosine_scaled_reward,
        "get_repetition_penalty_reward": get_repetition_penalty_reward,
        "get_soft_overlong_punishment": get_soft_overlong_punishment,
        "judge": Judge,
        "normalised": normalised,
        "reasoning_gym": "podium.agents.adapters.reasoning_gym:ReasoningGym",
        "reward_model": RewardModel,
        "scheduled": scheduled,
        "weighted": weighted,
    }
)

LIBRARY.update(
    {
        function.__name__: function
        for function in (
            *(accuracy_reward, answer_correct, answer_f1, answer_format, distinct_ngrams, exact_match),
            *(forbidden_patterns, group_diversity, ideal_length, json_format, json_match, json_schema),
            *(keyword_coverage, language, math_match, multiple_choice, numeric_closeness, numeric_match),
            *(reasoning_accuracy_reward, regex_format, required_patterns, think_format, think_format_reward),
            *(text_similarity, token_budget, tool_use, worked_steps, xml_format, xml_format_partial),
        )
    },
    **FACTORIES,
)

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
    "text_similarity",
    "think_format",
    "think_format_reward",
    "token_budget",
    "tool_use",
    "weighted",
    "worked_steps",
    "xml_format",
    "xml_format_partial",
]


__getattr__ = lazy_names(
    __name__, **{".tester.rewards": "audit examine", ".agents.adapters.reasoning_gym": "ReasoningGym gym_rows"}
)
"""The tester calls rewards, and few runs need reasoning-gym, so they are imported when they are asked for."""


def __dir__() -> list[str]:
    return sorted(__all__)
