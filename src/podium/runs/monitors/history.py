"""Input of every detector: the numbers of all steps, the latest generation rounds completion by completion, settings.

Made from the contents of a run's folder, so it is the same during a run, after it, and for the log of another trainer
(which has numbers only). Shape letters: P prompts, G completions per prompt, K reward functions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from podium.algorithm.advantages import has_spread
from podium.algorithm.metrics import accuracy_name, right
from podium.records import StepMetrics, Turn
from podium.runs.conversations import read, text_of

T = TypeVar("T")

NGRAM = 4
"""Words in a row that count as a repetition."""

PREFIX = "reward/"

LOW_ENTROPY = 0.3
"""Nats a token, below which a higher temperature makes completions differ."""

COLD = 0.3
"""Temperatures below this hardly sample."""


MORE_IS_STRONGER = ("examples", "beta", "epsilon_high")
"""Settings of which a larger value does more of what it is advised for."""


def usual_rate(num_parameters: float, *, adapter: bool) -> float:
    """The usual learning rate of a model: for all weights, or ten times that for an adapter.

    >>> usual_rate(135e6, adapter=True), usual_rate(7e9, adapter=False)
    (0.0002, 4e-06)
    """
    return float(f"{(4e-6 if num_parameters >= 1e9 else 2e-5) * (10 if adapter else 1):g}")


class Visit(NamedTuple):
    """One group: its question, and the lowest and the highest reward of its completions."""

    question: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundView:
    """A generation round as arrays. Costly properties are computed once, when first read."""

    step: int
    names_K: tuple[str, ...]
    prompts_P: tuple[str, ...]
    questions_P: tuple[str, ...]
    """The last user turn of each, without its template; in older records the prompt."""
    answers_P: tuple[str | None, ...]
    """The row's right answer; None: it has none."""
    rows_P: tuple[int, ...]
    texts_PG: tuple[tuple[str, ...], ...]
    rewards_PGK: np.ndarray
    """NaN: no opinion."""
    reward_PG: np.ndarray
    advantages_PG: np.ndarray
    tokens_PG: np.ndarray
    digests_PG: tuple[tuple[int | None, ...], ...]
    """Of the tokens; None in older records."""
    truncated_PG: np.ndarray
    contains_answer_PG: np.ndarray
    """1, 0, or NaN where the dataset has no answers."""
    turns_PG: tuple[tuple[tuple[Turn, ...], ...], ...] = ()
    """Turns of completions that have several, or tools; empty tuples for others."""
    finish_PG: tuple[tuple[str, ...], ...] = ()
    prompts_differ_P: tuple[bool, ...] = ()
    """Whether completions of the group answer different prompts."""

    @cached_property
    def texts(self) -> list[str]:
        """All completions."""
        return [text for texts_G in self.texts_PG for text in texts_G]

    @cached_property
    def is_flat_P(self) -> np.ndarray:
        """bool: all completions of the group have the same reward."""
        return np.array([not has_spread(reward_G) for reward_G in self.reward_PG])

    @property
    def visits(self) -> list[Visit]:
        """Every group that has a reward."""
        known = [reward_G[~np.isnan(reward_G)] for reward_G in self.reward_PG]
        pairs = zip(self.questions_P, known, strict=True)
        return [Visit(question, float(x_G.min()), float(x_G.max())) for question, x_G in pairs if len(x_G)]

    @property
    def is_played(self) -> bool:
        """Whether an environment in plain text answered turns: it has rewarded them."""
        return any(turn.reward is not None for of_G in self.turns_PG for turns in of_G for turn in turns)

    @cached_property
    def comparable_PG(self) -> np.ndarray:
        """Rewards; where completions have turns, NaN for one that has not as many as most of its group, or has ended
        otherwise: such completions differ by more than their texts."""
        if not any(turns for turns_G in self.turns_PG for turns in turns_G):
            return self.reward_PG
        kinds_PG = [
            [(len(turns), finish) for turns, finish in zip(*of_group, strict=True)]
            for of_group in zip(self.turns_PG, self.finish_PG, strict=True)
        ]
        usual = [[kind == Counter(kinds_G).most_common(1)[0][0] for kind in kinds_G] for kinds_G in kinds_PG]
        return np.where(usual, self.reward_PG, math.nan)

    @cached_property
    def repetition(self) -> float:
        """Mean share of n-grams that occurred earlier in the same completion; texts under 12 words do not count."""
        shares = [_repeated_ngrams(words) for text in self.texts if len(words := text.split()) >= 12]
        return float(np.mean(shares)) if shares else 0.0

    @cached_property
    def tags(self) -> Counter[str]:
        """Number of completions that contain each tag such as `<answer>`."""
        return Counter(tag for text in self.texts for tag in set(re.findall(r"<[a-z_]{2,20}>", text)))

    def within(self, x_PG: np.ndarray) -> np.ndarray:
        """Distances to the group's mean, flattened over all completions; NaN stays."""
        known = ~np.isnan(x_PG)
        mean_P1 = np.where(known, x_PG, 0).sum(1, keepdims=True) / np.maximum(known.sum(1, keepdims=True), 1)
        return (x_PG - mean_P1).reshape(-1)


def _repeated_ngrams(words: Sequence[str]) -> float:
    grams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def duplicate_share(groups: Iterable[Sequence[str]]) -> float:
    """Share of completions that repeat an earlier one of their group: 0 all differ, 1 one text each."""
    groups = list(groups)
    repeated = sum(len(texts) - len({" ".join(text.split()).casefold() for text in texts}) for texts in groups)
    return repeated / max(sum(len(texts) - 1 for texts in groups), 1)


def round_view(columns: Mapping[str, Sequence[Any]]) -> RoundView:
    """A round from its table: the columns of the run folder, the completions of a prompt one after the other."""
    starts = [i for i, number in enumerate(columns["completion_index"]) if i == 0 or number == 0]
    count = min(b - a for a, b in zip(starts, [*starts[1:], len(columns["step"])], strict=True))
    index_PG = np.array([[start + g for g in range(count)] for start in starts])
    names = tuple(name.removeprefix(PREFIX) for name in columns if name.startswith(PREFIX))
    blank = [None] * len(columns["step"])
    turns = [read(text) for text in columns.get("turns", blank)]

    def first(name: str, default: Sequence[Any] = blank) -> tuple[Any, ...]:
        return tuple(columns.get(name, default)[start] for start in starts)

    def nested(values: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        return tuple(tuple(values[i] for i in index_G) for index_G in index_PG)

    def array(name: str) -> np.ndarray:
        return np.array([math.nan if x is None else float(x) for x in columns.get(name, blank)])[index_PG]

    return RoundView(
        step=int(columns["step"][0]),
        names_K=names,
        prompts_P=first("prompt"),
        questions_P=first("question", columns["prompt"]),
        answers_P=first("answer"),
        rows_P=tuple(map(int, first("row"))),
        texts_PG=nested([text_of(turn) or text for turn, text in zip(turns, columns["completion"], strict=True)]),
        rewards_PGK=np.stack([array(PREFIX + name) for name in names], 2) if names else np.zeros((*index_PG.shape, 0)),
        reward_PG=array("reward"),
        advantages_PG=array("advantage"),
        tokens_PG=array("num_tokens"),
        digests_PG=nested(columns.get("token_digest", blank)),
        truncated_PG=np.array([finish == "length" for finish in columns["finish"]])[index_PG],
        contains_answer_PG=array("contains_answer"),
        turns_PG=nested(turns),
        finish_PG=nested(columns["finish"]),
        prompts_differ_P=tuple(len(set(prompts_G)) > 1 for prompts_G in nested(columns["prompt"])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that detectors compare with or suggest to change; None: unknown (the log of another trainer)."""

    learning_rate: float | None = None
    temperature: float | None = None
    max_completion_length: int | None = None
    beta: float | None = None
    adapter: bool = False
    """Whether a LoRA or other adapter is trained instead of all weights."""
    num_parameters: int = 0
    """The model's; 0: unknown."""
    rounds: bool = False
    """Whether the weights that are trained are in half precision, which rounds small updates away."""
    dropout: float = 0.0
    """The largest probability of a dropout in the model that is trained."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward functions, by name."""
    accuracy: str | None = None
    """The reward function that tells right from wrong; None: there is none."""
    adaptive: bool = False
    """Whether weights of rewards change by the step, so that the metric `reward` is no measure of progress."""
    narrowed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that keep sampling from the whole distribution, as `{"top_k": 1}`."""
    num_generations: int | None = None
    generation_batch_size: int | None = None
    """Completions of a generation round."""
    max_tool_calling_iterations: int | None = None
    max_turns: int | None = None
    max_tool_result_tokens: int | None = None
    agent: bool = False
    """Whether a program plays episodes: it writes the prompts, and what it does between requests is no tool's."""
    environment: bool = False
    """Whether environments answer the calls of a completion: each may hold a task of its own behind the same prompt."""
    rollout_func: bool = False
    """Whether the user's own function samples: texts of completions may hold tokens that the policy did not draw."""
    best_kept: Mapping[str, Any] = field(default_factory=dict)
    """Settings that end the run with the weights of its best evaluation; empty where there is none."""
    present: Mapping[str, Any] = field(default_factory=dict)
    """All settings of the run, those of its recipe too; empty: unknown."""

    def has(self, key: str, value: Any) -> bool:
        """Whether the run has this value already, or one that does more of the same.

        >>> settings = RunSettings(present={"examples": [{}, {}, {}], "max_grad_norm": 0.1})
        >>> settings.has("examples", 2), settings.has("max_grad_norm", 0.2), settings.has("beta", 0.04)
        (True, True, False)
        """
        now = self.present.get(key)
        now = len(now) if key == "examples" and isinstance(now, list) else now
        if key in MORE_IS_STRONGER and isinstance(now, (int, float)):
            return bool(now >= value)
        if key == "max_grad_norm" and isinstance(now, (int, float)):
            return 0 < now <= value
        return key in self.present and bool(now == value)

    @property
    def clips(self) -> bool:
        """Whether a round gives several optimizer steps: in the first the ratio is 1, and nothing is clipped."""
        steps, parts = (self.present.get(key) or 1 for key in ("steps_per_generation", "gradient_accumulation_steps"))
        return bool((self.present.get("num_iterations") or 1) > 1 or steps > parts)

    def more_examples(self) -> dict[str, Any]:
        """Worked examples in the prompt, as changes.

        Empty where it has as many, in a script, which has no key, where a program writes the prompts, and in an
        environment, whose rows have no answers.

        >>> RunSettings().more_examples(), RunSettings(present={"learning_rate": 1e-6}).more_examples()
        ({'examples': 2}, {})
        >>> RunSettings(agent=True).more_examples(), RunSettings(environment=True).more_examples()
        ({}, {})
        """
        is_script = bool(self.present) and "model" not in self.present
        takes_none = is_script or self.agent or self.environment
        return {} if takes_none or self.has("examples", 2) else {"examples": 2}

    def slower(self, factor: float) -> dict[str, Any]:
        """The learning rate divided by `factor`, as changes; empty where it is unknown."""
        return {} if not self.learning_rate else {"learning_rate": float(f"{self.learning_rate / factor:.1g}")}

    def larger_groups(self) -> dict[str, Any]:
        """Twice as many completions a prompt at the same number a round, as changes; empty where that leaves less than
        two prompts."""
        group = self.num_generations
        batch = self.generation_batch_size
        fits = group is not None and batch is not None and batch % (2 * group) == 0 and batch >= 4 * group
        return {"num_generations": 2 * group} if fits and group is not None else {}

    def tempered(self, entropy: float) -> dict[str, Any]:
        """The temperature for a policy with this entropy in nats a token, as changes; empty where it is right.

        Above 1 it goes back to 1, unless the policy is so sure that more makes completions differ.
        """
        now = self.temperature
        if now is None or math.isnan(entropy):
            return {}
        cooler = 1.0 if now > 1 or now < COLD else now
        wanted = max(1.0, min(now + 0.3, 1.5)) if entropy < LOW_ENTROPY else cooler
        return {"temperature": round(wanted, 2)} if wanted != now else {}


def run_settings(environment: Mapping[str, Any], recipe: Mapping[str, Any] | None = None) -> RunSettings:
    """The settings in the contents of `environment.json`, and of `config.yaml`: the recipe, or a script's settings."""
    settings = environment.get("settings", {})
    numbers: dict[str, Any] = {name: x for name, x in settings.items() if isinstance(x, (int, float))}
    generation = settings.get("generation_kwargs")
    drawn = {**settings, **(generation if isinstance(generation, Mapping) else {})}
    narrow = {
        "top_k": 0 < _number(drawn.get("top_k")) < 20,
        "top_p": 0 < _number(drawn.get("top_p")) < 0.9,
        "min_p": _number(drawn.get("min_p")) > 0.1,
    }
    model = environment.get("model", {})
    weights = environment.get("reward_weights", {})
    code = environment.get("agents") or {}
    return RunSettings(
        learning_rate=numbers.get("learning_rate"),
        temperature=numbers.get("temperature"),
        max_completion_length=numbers.get("max_completion_length"),
        beta=numbers.get("beta"),
        num_generations=numbers.get("num_generations"),
        generation_batch_size=numbers.get("generation_batch_size"),
        max_tool_calling_iterations=numbers.get("max_tool_calling_iterations"),
        max_turns=numbers.get("max_turns"),
        max_tool_result_tokens=numbers.get("max_tool_result_tokens"),
        adapter=bool(model.get("adapter")),
        num_parameters=int(_number(model.get("parameters"))),
        rounds=environment.get("trained_dtype") in ("bfloat16", "float16"),
        dropout=_number(environment.get("dropout")),
        weights={name: _number(weight) for name, weight in weights.items()},
        accuracy=environment.get("accuracy") or accuracy_name(list(weights)),
        adaptive=bool(settings.get("adaptive_rewards")),
        agent="agent" in code,
        environment=any(name.partition(" ")[0] == "environment" for name in code),
        rollout_func=bool(environment.get("rollout_func")),
        narrowed={name: drawn[name] for name, narrows in narrow.items() if narrows},
        best_kept=_best_kept(settings),
        present={**settings, **(recipe or {})},
    )


def _best_kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that keep the weights of the best evaluation; empty where nothing is evaluated."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    if settings.get("eval_strategy") == "epoch":
        return {**best, "save_strategy": "epoch"}
    if settings.get("eval_strategy") == "steps":
        return {**best, "save_strategy": "steps", "save_steps": settings.get("eval_steps")}
    return {}


def _number(x: Any) -> float:
    """A number of a file that somebody may have edited; 0 for anything else."""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else 0.0


def fixed_reward(steps: Sequence[StepMetrics], weights: Mapping[str, float]) -> np.ndarray:
    """The reward under the initial weights, of every step that has each part: the progress that adaptive weights hide.

    >>> fixed_reward([StepMetrics(step=1, values={"rewards/a/mean": 0.5, "reward": 9.0})], {"a": 2.0}).tolist()
    [1.0]
    """
    names = {f"rewards/{name}/mean": weight for name, weight in weights.items()}
    rows = [step.values for step in steps if names and all(name in step.values for name in names)]
    return np.array([sum(weight * row[name] for name, weight in names.items() if weight) for row in rows], float)


class Activity(NamedTuple):
    """Means over the turns of one generation round."""

    calls: float
    """Calls per completion."""
    turns: float
    """Turns per completion."""
    failures: float
    """Share of calls that failed, calls of unknown names aside; NaN without calls."""
    reward: float
    """Mean over all completions."""
    spread: float
    """Mean standard deviation within a group."""


def activity(view: RoundView) -> Activity | None:
    """The numbers of a round; None where no completion has turns."""
    episodes = [turns for turns_G in view.turns_PG for turns in turns_G]
    if not any(episodes):
        return None
    calls = [call for turns in episodes for turn in turns for call in turn.calls]
    known = [call.failed for call in calls if call.problem != "unknown"]
    finite = np.isfinite(view.reward_PG)
    return Activity(
        calls=len(calls) / len(episodes),
        turns=sum(map(len, episodes)) / len(episodes),
        failures=float(np.mean(known)) if known else math.nan,
        reward=float(view.reward_PG[finite].mean()) if finite.any() else math.nan,
        spread=float(np.mean([x[ok].std() if ok.any() else 0.0 for x, ok in zip(view.reward_PG, finite, strict=True)])),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricHistory:
    """The argument of every detector, a new one for each step that is looked at."""

    steps: Sequence[StepMetrics]
    """All steps so far; the last is the current one."""
    columns: Mapping[str, Sequence[float]] | None = None
    """By metric, its values over these steps; None: they are read from the steps."""
    rounds: tuple[RoundView, ...] = ()
    """The latest generation rounds, the newest last. Empty for logs of numbers."""
    first: RoundView | None = None
    """The first of all rounds, which the model before training has written."""
    visits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By question: the group's lowest and highest reward at each visit, `low, high, low, high, ...`."""
    extremes: tuple[float, float] = (math.nan, math.nan)
    """The lowest and the highest reward of any completion so far; NaN for logs of numbers."""
    settings: RunSettings = field(default_factory=RunSettings)
    activity: Sequence[Activity] = ()
    """One entry for every generation round so far that has turns, the newest last."""

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self.steps[-1].step

    @property
    def names_K(self) -> tuple[str, ...]:
        """Reward functions of the newest round."""
        return self.rounds[-1].names_K if self.rounds else ()

    @property
    def has_new_round(self) -> bool:
        """Whether this step drew a new generation round."""
        return bool(self.rounds) and self.rounds[-1].step == self.step

    def series(self, name: str, last: int | None = None) -> np.ndarray:
        """A metric over the steps that have it, oldest first; NaN where it was not finite."""
        rows = self.steps if last is None else self.steps[-last:]
        if name == "reward" and self.settings.adaptive:
            return fixed_reward(rows, self.settings.weights)
        if last is None and self.columns is not None:
            return np.array(self.columns.get(name, ()), float)
        return np.array([step.values[name] for step in rows if name in step.values], float)

    def numbers(self, name: str, last: int, *, least: int | None = None) -> np.ndarray:
        """A metric of the last steps; empty where fewer than `least` of them have it (None: than all)."""
        x = self.series(name, last)
        return x if len(x) >= (last if least is None else least) else x[:0]

    def shares(self, measure: Callable[[RoundView], float], last: int) -> np.ndarray:
        """A number of each of the last rounds; empty before there are as many."""
        rounds = self.rounds[-last:]
        return np.array([measure(view) for view in rounds] if len(rounds) == last else [], float)

    def change(self, name: str, width: int, least: int = 1) -> tuple[float, float]:
        """Means of a metric's first and last `width` steps; NaN where fewer than `least` steps have it."""
        x = self.series(name)
        known = [part[np.isfinite(part)] for part in (x[:width], x[-width:])]
        first, last = (float(part.mean()) if len(part) and len(x) >= least else math.nan for part in known)
        return first, last

    def pooled(self, get: Callable[[RoundView], np.ndarray], last: int = 0) -> np.ndarray:
        """An array of every round (of the `last` ones), flattened and joined."""
        return np.concatenate([get(view).reshape(-1) for view in self.rounds[-last:]])

    def right_PG(self, view: RoundView) -> np.ndarray | None:
        """1, 0 or NaN by the reward that tells right from wrong; None where there is none."""
        if self.settings.accuracy not in view.names_K:
            return None
        return right(view.rewards_PGK[:, :, view.names_K.index(str(self.settings.accuracy))])

    def rewards(self, k: int, last: int = 0) -> np.ndarray:
        """All values of one reward function that are not NaN."""
        values = self.pooled(lambda view: view.rewards_PGK[:, :, k], last)
        return values[np.isfinite(values)]

    def rewards_within(self, k: int) -> np.ndarray:
        """Distances of one reward function's values to their group's mean; NaN stays."""
        return self.pooled(lambda view: view.within(view.rewards_PGK[:, :, k]))
