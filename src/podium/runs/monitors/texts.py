"""The form of completions: cut off, growing, empty, in another script, without their format, beyond their end."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors import Finding
from podium.errors.texts import as_lines
from podium.runs.monitors.collapse import entropy_explodes
from podium.runs.monitors.detection import correlation, mean, percent, some
from podium.runs.monitors.hacking import pays_for_length
from podium.runs.monitors.history import MetricHistory
from podium.runs.monitors.signal import FORMAT_WORDS, looks_misspelt, names_one_of
from podium.runs.monitors.signs import doubt_about

TURN = re.compile(r"<\|[a-z_]+\|>|\n\s*(?:user|human|assistant|system)\s*(?::|\n)", re.IGNORECASE)
"""The start of another turn, written out by the model."""


NO_LENGTH_BIAS = {"loss_type": "dr_grpo", "scale_rewards": "none"}
"""Dr. GRPO: a loss that does not weigh tokens by the length of their completion."""


def truncated(history: MetricHistory) -> Finding | None:
    """M141: completions are cut off at the limit."""
    share = history.series("completions/clipped_ratio", last=3)
    if len(share) < 3 or not min(share) > 0.6:
        return None
    limit = history.settings.max_completion_length
    short = limit is not None and limit <= 8
    where = f"max_completion_length: {limit}" if limit else "the limit"
    changes = {"max_completion_length": 4 * limit if limit else 1024}
    what = f"{percent(mean(share))} of completions are cut off at {where}, over {len(share)} steps"
    if pays_for_length(history) is not None or length_grows(history) is not None:
        fix = "First what M152 or M142 says of it: more tokens would be filled in the same way."
        return Finding(
            code="M141",
            severity="warning",
            what=f"{what}.",
            why="Length is paid, so completions run on to the limit.",
            fix=fix,
        )
    if _cut_off_is_paid(history):
        fix = "Give less to a completion without its end: with more room it would run on, too."
        return Finding(
            code="M141",
            severity="warning",
            what=f"{what}, and paid as the best are.",
            why="Nothing rewards an end.",
            fix=fix,
        )
    doubt = doubt_about(history)
    if doubt:  # more room would be more room for it
        fix = "First what M158, M159 or M160 says of it: more tokens would be filled in the same way."
        return Finding(
            code="M141",
            severity="warning",
            what=f"{what}. {doubt}.",
            why="Running on is paid.",
            fix=fix,
        )
    if entropy_explodes(history) is not None:
        fix = "Set what M126 names: a policy of noise does not end its text, however long it may be."
        return Finding(
            code="M141", severity="warning", what=f"{what}.", why="The policy dissolves into noise.", fix=fix
        )
    why = "A completion without its end rarely gets a reward, so the policy is told that nothing it writes is good."
    return Finding(
        code="M141",
        severity="warning",
        what=f"{what}.",
        why=f"{why} So few tokens hold no answer." if short else why,
        fix=f"Set {as_lines(changes)}; see mask_truncated_completions.",
        changes=changes,
    )


def _cut_off_is_paid(history: MetricHistory) -> bool:
    """Whether completions that are cut off have a reward in the upper half of all so far."""
    low, high = history.extremes
    cut = [view.reward_PG[view.truncated_PG] for view in history.rounds[-3:]]
    return high - low > FLAT and mean(np.concatenate(cut or [np.zeros(0)])) >= low + 0.5 * (high - low)


def _lengths(history: MetricHistory) -> tuple[float, float, float]:
    """Mean length at first and lately, and its correlation with the reward: within groups, where they are recorded."""
    if history.rounds:
        length = history.pooled(lambda view: view.within(view.tokens_PG), last=6)
        reward = history.pooled(lambda view: view.within(view.reward_PG), last=6)
    else:
        length = history.series("completions/mean_length")
        reward = history.series("reward")
    count = min(len(length), len(reward))
    pays = correlation(length[len(length) - count :], reward[len(reward) - count :])
    return *history.change("completions/mean_length", 3, least=10), pays


def length_grows(history: MetricHistory) -> Finding | None:
    """M142: completions become longer and longer, and longer ones are paid more."""
    early, late, pays = _lengths(history)
    if not (late >= 1.5 * early and late >= early + 16 and pays >= 0.5):
        return None
    return Finding(
        code="M142",
        severity="warning",
        what=f"Completions grew from {early:.0f} to {late:.0f} tokens, and length is paid: correlation {pays:.2f} with "
        "the reward.",
        why="Where longer means better paid, the policy learns to write more, not better.",
        fix="Take length out of the reward, add a length penalty beyond what answers need, or set "
        f"{as_lines(NO_LENGTH_BIAS)}.",
        changes=NO_LENGTH_BIAS,
    )


def length_collapses(history: MetricHistory) -> Finding | None:
    """M143: completions become shorter and shorter, and shorter ones are paid more."""
    early, late, pays = _lengths(history)
    if not (late <= 0.4 * early and pays <= -0.5):
        return None
    return Finding(
        code="M143",
        severity="warning",
        what=f"Completions shrank from {early:.0f} to {late:.0f} tokens, and shortness is paid: correlation {pays:.2f} "
        "with the reward.",
        why="Where shorter means better paid, the policy learns to say less and less.",
        fix="Check the sign of a length reward; pay for the answer first, and for brevity only where it is right.",
    )


def _shares(history: MetricHistory, holds: Callable[[str], bool]) -> list[float]:
    """Share of completions for which something holds, in each of the last three rounds; empty before the third."""
    rounds = history.rounds[-3:]
    return [float(np.mean([holds(text) for text in view.texts])) for view in rounds] if len(rounds) == 3 else []


def empty(history: MetricHistory) -> Finding | None:
    """M144: completions without text."""
    shares = _shares(history, lambda text: not text.strip())
    if min(shares, default=0.0) < 0.2:
        return None
    return Finding(
        code="M144",
        severity="warning",
        what=f"{percent(float(np.mean(shares)))} of completions are empty, over {len(shares)} rounds.",
        why="The model ends at once: the chat template already closes the turn, or saying nothing is paid best.",
        fix="Look at a prompt's end (`podium sample RECIPE`); give empty completions less than wrong ones.",
    )


def script_of(text: str) -> str:
    """The script of most letters, by the first word of their Unicode names.

    >>> script_of("привет x"), script_of("12")
    ('CYRILLIC', '')
    """
    names = Counter(unicodedata.name(c, "?").split()[0] for c in text[:400] if c.isalpha())
    return names.most_common(1)[0][0] if names else ""


def wrong_language(history: MetricHistory) -> Finding | None:
    """M145: completions are in a script that their prompt is not in."""
    shares = []
    example = ""
    for view in history.rounds[-3:]:
        others = []
        for prompt, texts in zip(view.prompts_P, view.texts_PG, strict=True):
            own = {script_of(line) for line in prompt.splitlines()} - {""}
            others += [script for text in texts if (script := script_of(text)) and own and script not in own]
        shares.append(len(others) / max(len(view.texts), 1))
        example = some([name for name, _ in Counter(others).most_common(2)])
    if len(shares) < 3 or min(shares) < 0.3:
        return None
    return Finding(
        code="M145",
        severity="warning",
        what=f"{percent(float(np.mean(shares)))} of completions are in another script than their prompt ({example}).",
        why="Nothing in the reward asks for the prompt's language, and the policy drifts to where it is surest.",
        fix="Add a reward for the language (weight 0.1 to 0.5), or set beta: 0.04.",
        changes={"beta": 0.04},
    )


def format_ignored(history: MetricHistory) -> Finding | None:
    """M146: a reward for the format is silent; completions have another one, or none."""
    for k, name in enumerate(history.names_K if len(history.rounds) >= 4 else ()):
        values = history.rewards(k)
        if names_one_of(FORMAT_WORDS, name) and len(values) >= 64 and np.abs(values).max() <= FLAT:
            return _no_format(history, name, len(values))
    return None


def _no_format(history: MetricHistory, name: str, count: int) -> Finding:
    total = sum(len(view.texts) for view in history.rounds)
    counts: Counter[str] = sum((view.tags for view in history.rounds), Counter())
    seen = some([f"{tag} in {percent(number / total)}" for tag, number in counts.most_common(3)])
    if looks_misspelt(history, name):
        return Finding(
            code="M146",
            severity="warning",
            what=f"{name} gave 0 to all of {count} completions, although they do have tags: {seen}.",
            why="The tag in the reward's pattern is spelt otherwise than in the prompt.",
            fix=f"Compare the pattern in {name} with the tags above, letter by letter.",
        )
    changes = history.settings.more_examples()
    more = f", with worked examples ({as_lines(changes)})" if changes else ""
    return Finding(
        code="M146",
        severity="warning",
        what=f"{name} gave 0 to all of {count} completions; few have any tag{': ' if seen else ''}{seen}.",
        why="The model does not know the format, so it never gets the reward that would teach it.",
        fix=f"Show the format in the system prompt{more}; partial credit for each tag.",
        changes=changes,
    )


def beyond_the_end(history: MetricHistory) -> Finding | None:
    """M147: the model writes on after its answer: another turn. A `rollout_func` is judged by its mask instead."""
    if history.settings.rollout_func:
        return None
    shares = _shares(history, lambda text: TURN.search(text) is not None)
    if min(shares, default=0.0) < 0.2:
        return None
    plain = not any(TURN.search(prompt) for view in history.rounds[-3:] for prompt in view.prompts_P)
    return Finding(
        code="M147",
        severity="warning",
        what=f"{percent(float(np.mean(shares)))} of completions go on with another turn after their answer.",
        why="Prompts are plain text, which the model continues as a dialogue."
        if plain
        else "The end token is not the one that ends the model's turns, so generation does not stop there.",
        fix="Set chat: true, for a model with a chat template; else a reward that takes the text up to the next turn."
        if plain
        else "Use the model's own chat template; put its end of turn into generation_config.eos_token_id.",
        changes={"chat": True} if plain else {},
    )
