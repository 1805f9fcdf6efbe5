"""Scores of completions that need no model: the commonest answer, the best of a few constants, the question copied.

    found = baselines(prompts, rewards, weights_K, "answer_correct", call_settings)
    found.line("accuracy")  # "Accuracy without a model: commonest answer 'positive' 0.520, question copied 0.000."

A held-out figure means little beside none of these. They are scored by the run's own rewards, once each, in seconds;
where a call of the rewards is slow or paid for, they are skipped, and `skipped` has the reason.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podium.algorithm.advantages import combine
from podium.algorithm.metrics import right
from podium.errors import PodiumError
from podium.evaluation.measured import Baseline, Baselines, key_of
from podium.isolation.functions import unwrapped
from podium.records import Completion, Group, Prompt, last_user_turn
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, Reward
from podium.rewards.score import CallSettings, StandIns, score
from podium.runs.monitors.signs import MOST_LABELS
from podium.tester.cases import GOLD_COLUMNS, ReturnFormat, forms_for, gold_of

SECONDS = 60.0
"""Most time for all baselines; estimated from the first call."""
FORM_ROWS = 12
"""Rows whose right answers are written in every form, to find the one that the rewards read."""
MOST_PROMPTS = 500
MOST_CONSTANTS = 9
"""Completions of a prompt at most: two without an answer, three answers, all of them twice, the question twice."""
CONSTANT_ANSWERS = 3
"""The commonest answers that are tried as constants."""
LONGEST = 400
"""Characters of a constant: longer answers are no label that a policy could settle for."""


def costly(rewards: Sequence[Reward]) -> str:
    """The reason why rewards are not called for baselines; empty: none."""
    for reward in rewards:
        function = unwrapped(reward.function)
        if ENVIRONMENTS in reward.needs:
            return f"`{reward.name}` is paid for an episode, in which a constant answer was not played"
        if isinstance(function, RewardModel) or reward.is_async:
            kind = "a reward model" if isinstance(function, RewardModel) else "asynchronous"
            return f"`{reward.name}` is {kind}, so its calls may be slow or paid for"
        if reason := costly(getattr(function, "parts", ())):
            return reason
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The rewards of a run as one number a completion."""

    rewards: Sequence[Reward]
    weights_K: np.ndarray
    accuracy: str | None
    """The reward that tells right from wrong."""
    settings: CallSettings
    environments: bool = False
    """Whether completions have environments, in which constants were not played."""

    def __call__(self, prompts: Sequence[Prompt], texts_PG: Sequence[Sequence[str]]) -> np.ndarray:
        """Values [P, G] of any texts: 1 or 0 where that is known, else the reward."""
        groups = [_group(prompt, texts_G) for prompt, texts_G in zip(prompts, texts_PG, strict=True)]
        played = StandIns(groups) if self.environments else None
        scored = score(groups, self.rewards, settings=self.settings, environments=played)
        if played is not None and played.asked:
            raise PodiumError("a reward looks into the environment, in which a constant answer was not played")
        if self.accuracy is None:
            return np.stack([combine(group.rewards_GK, self.weights_K) for group in scored])
        return np.stack([right(group.rewards_GK[:, group.names_K.index(self.accuracy)]) for group in scored])


def baselines(prompts: Sequence[Prompt], scoring: Scoring) -> Baselines:
    """The commonest answer, the best constant completion and the question copied, for the first 500 prompts.

    Answers are written in the form that gives right answers the highest reward.
    """
    reason = costly(scoring.rewards)
    if reason or not prompts:
        return Baselines(skipped=reason)
    try:
        return _baselines(prompts[:MOST_PROMPTS], scoring)
    except PodiumError as error:
        return Baselines(skipped=str(error).splitlines()[0].rstrip("."))


def _group(prompt: Prompt, texts: Sequence[str]) -> Group:
    # Ids stand for nothing but a length, about four characters a token.
    completions = (
        Completion(token_ids=tuple(range(len(text) // 4 + 1)), logps=(), finish="stop", text=text, policy_step=0)
        for text in texts
    )
    return Group(prompt=prompt, completions=tuple(completions))


def _baselines(prompts: Sequence[Prompt], scoring: Scoring) -> Baselines:
    golds = [_gold(prompt) for prompt in prompts]
    texts = [prompt.text for prompt in prompts[:2]]
    forms = forms_for(texts)
    seconds = _seconds(prompts[:2], scoring) * (FORM_ROWS * len(forms) + len(prompts) * MOST_CONSTANTS)
    if seconds > SECONDS:
        return Baselines(skipped=f"scoring them would take {seconds:.0f} s")
    write = _form(prompts, golds, forms, scoring)
    constants = _constants([gold for gold in golds if gold], write)
    questions = [last_user_turn(prompt.content) for prompt in prompts]
    texts_PG = [[*constants, question, write(question)] for question in questions]
    values_PG = scoring(prompts, texts_PG)
    keys = [key_of(prompt) for prompt in prompts]

    def baseline(name: str, text: str, place: int) -> Baseline:
        return Baseline(name=name, text=text, values=dict(zip(keys, values_PG[:, place].tolist(), strict=True)))

    constant = [baseline(name, text, place) for place, (text, name) in enumerate(constants.items())]
    copied = _best([baseline("question copied", "", len(constants) + place) for place in (0, 1)])
    commonest = [found for found in constant if found.name == "commonest answer"]
    best = _best(constant)
    others = [] if best in commonest else [replace(best, name="best constant")]
    return Baselines(scored=(*commonest, *others, copied))


def _best(scored: Sequence[Baseline]) -> Baseline:
    """The first of the highest, those without a value last."""
    return max(scored, key=lambda baseline: -np.inf if math.isnan(baseline.mean) else baseline.mean)


def _gold(prompt: Prompt) -> str | None:
    return next((gold for name in GOLD_COLUMNS if (gold := gold_of(prompt.columns.get(name))) is not None), None)


def _seconds(prompts: Sequence[Prompt], scoring: Scoring) -> float:
    """Time of a completion, by the second of two calls: the first may import what it needs."""
    for _ in range(2):
        begun = time.perf_counter()
        scoring(prompts, [["1"]] * len(prompts))
    return (time.perf_counter() - begun) / len(prompts)


def _form(
    prompts: Sequence[Prompt], golds: Sequence[str | None], forms: Sequence[ReturnFormat], scoring: Scoring
) -> Callable[[str], str]:
    """The form in which right answers score highest; the plain text among equals."""
    known = [(prompt, gold) for prompt, gold in zip(prompts, golds, strict=True) if gold][:FORM_ROWS]
    if not known:
        return forms[0].write
    values_PG = scoring([prompt for prompt, _ in known], [[form.write(gold) for form in forms] for _, gold in known])
    return forms[int(np.nan_to_num(values_PG).mean(axis=0).argmax())].write


def _constants(golds: Sequence[str], write: Callable[[str], str]) -> dict[str, str]:
    """Names by completion: the commonest answers, nothing, nothing in the form, every answer listed."""
    counts = Counter(golds).most_common()
    # An answer that no two rows share is no constant that pays, and of many equally common ones any stands for all.
    common = [gold for gold, _ in counts[:CONSTANT_ANSWERS] if len(gold) <= LONGEST]
    found = {write(gold): "commonest answer" if place == 0 else "an answer" for place, gold in enumerate(common)}
    listed = ", ".join(gold for gold, _ in counts)
    if 1 < len(counts) <= MOST_LABELS and len(listed) <= LONGEST:
        found |= {listed: "every answer", write(listed): "every answer"}
    return {"": "nothing", write(""): "nothing"} | found
