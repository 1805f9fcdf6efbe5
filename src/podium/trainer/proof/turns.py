"""Checks of completions of several turns: targets are the drawn tokens, and the stream is that of the chat template."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from podium.agents.chat import Difference
from podium.models.packing import pack
from podium.records import Completion, Prompt, Sample
from podium.trainer.proof.completions import sampled_by_ids
from podium.trainer.proof.evidence import (
    ONE_PACK,
    difference,
    drawn_places,
    is_no_rounding,
    sampler_tolerance,
    with_rounding,
)
from podium.trainer.proof.plain import turns_of
from podium.trainer.proof.records import Before, Check, named

COMPARED = 16
"""Conversations that are rendered again."""
SHOWN = 30
BEFORE = 10
"""Characters of two texts that differ, and how many of them are before the difference."""
LATER_COMPLETIONS = 4
LATER_TOKENS = 1024
"""Completions with the most turns whose later turns are computed again, and first tokens of each."""


def drawn_targets(x: Before) -> Check:
    """Every token that the policy drew is predicted in training, and no other, each from the token before it."""
    sampled = sampled_by_ids(x)
    problems = []
    count = 0
    for sample, places, ids in _targets(x.trained):
        completion = sampled.get((sample.prompt_ids, sample.token_ids))
        if completion is not None:  # else it is the subject of P009
            problems.append(_target_problem(x, completion, places, ids))
            count += len(places)
    problems = [problem for problem in problems if problem]
    return Check(
        name="targets are the drawn tokens",
        code="P017",
        passed=not problems if count else None,
        measured=float(len(problems)),
        tolerance=0.0,
        detail=named(problems) if problems else f"{count} tokens were drawn, and exactly these are trained on",
        fix="An action mask is shifted or incomplete: look at what makes Sample.actions from the turns.",
    )


def _targets(samples: Sequence[Sample]) -> Iterator[tuple[Sample, list[int], list[int]]]:
    """Each sample with the indices in it of the tokens that its pack trains on, and the ids of those."""
    left = iter(samples)
    for packed in pack(samples, tokens_per_pack=ONE_PACK):
        rollout_N, predict_N, target_N = (
            t.cpu().numpy() for t in (packed.rollout_N, packed.predict_N, packed.target_N)
        )
        for r, (span, sample) in enumerate(zip(packed.spans_R, left, strict=False)):
            depths = {int(position): t for t, position in enumerate(span.tokens)}
            mine = rollout_N == r
            start = len(sample.prompt_ids)
            places = [depths.get(int(p), -start) + 1 - start for p in predict_N[mine]]
            yield sample, places, target_N[mine].tolist()


def _target_problem(x: Before, completion: Completion, places: Sequence[int], ids: Sequence[int]) -> str:
    drawn = drawn_places(completion)
    wrong = next(iter(sorted(set(places) ^ set(drawn))), None)
    if wrong is not None and wrong not in places:
        return f"token {wrong}, {x.run.shown(completion.token_ids[wrong])}, was drawn and is no target"
    if wrong is not None and 0 <= wrong < len(completion.token_ids):
        return f"token {wrong}, {x.run.shown(completion.token_ids[wrong])}, was given to the policy and is a target"
    if len(places) != len(drawn) or wrong is not None:
        return f"{len(drawn)} tokens were drawn, and {len(places)} are targets"
    other = [(t, a) for t, a in zip(places, ids, strict=True) if completion.token_ids[t] != a]
    if other:
        at, token = other[0]
        return f"the target at token {at}, {x.run.shown(completion.token_ids[at])}, is {x.run.shown(token)}"
    return ""


def later_turns(x: Before) -> Check:
    """Log-probabilities of the second turn and those after it, from the engine's kept state, are training's."""
    chosen = [] if x.run.training.step.filters_logps else _with_most_turns(x.trained)
    tolerance = sampler_tolerance(x.run, exact=False)
    mine = x.run.training.step.logps(chosen, x.run.model)
    theirs = [sample.sampled_logps_A for sample in chosen]
    turns = [turns_of(sample) for sample in chosen]
    fits = all(len(a) == len(b) for a, b in zip(turns, theirs, strict=True))
    pairs = [[x[own > 0] for x in (a, b)] for own, a, b in zip(turns, mine, theirs, strict=True) if fits]
    flat = [np.concatenate(each) for each in zip(*pairs, strict=True)]
    measured = difference(flat[0], flat[1], tolerance) if flat else math.inf
    allowed = with_rounding(x, tolerance)
    passed: bool | None = None
    detail = "no trained completion has a second turn, or a filter has changed the log-probabilities"
    if chosen:
        passed = measured <= allowed or not is_no_rounding(x.run, chosen, np.concatenate(mine), measured)
        last = max((int(own.max()) + 1 for own in turns), default=0)
        count = sum(int((own > 0).sum()) for own in turns)
        detail = f"{measured:.2g} nats over {count} tokens of turns 2 to {last} ({allowed:g} allowed)"
        if measured > allowed and fits:
            detail = f"{detail}{_first_apart(turns, mine, theirs, tolerance)}"
    return Check(
        name="later turns from the kept cache",
        code="P018",
        passed=passed,
        suspect=measured > allowed,
        measured=measured if chosen else None,
        tolerance=allowed,
        detail=detail,
        fix="What the engine kept between turns is not what training computes. Set rollout_engine: transformers, which "
        "computes every turn again, and report this model.",
        changes={"rollout_engine": "transformers"},
    )


def own_rendering(x: Before) -> Check:
    """The streams of tokens are what the chat template renders of their messages; a difference is a note."""
    compared = 0
    differences = []
    for prompt, completion in _with_turns(x)[:COMPARED]:
        stream = (*prompt.token_ids, *completion.token_ids)
        agents = x.run.training.agents
        try:
            name = agents.pools.name_of(prompt.columns) if agents.pools is not None else None
            messages = [*prompt.content, *completion.messages]
            found = agents.chat.first_difference(stream, messages, agents.schemas(name))
        except Exception:  # noqa: BLE001  a template may refuse a conversation, with any exception
            continue
        if found is not None and found.position < len(prompt.token_ids):
            continue  # a prompt that was cut, or that ends in the beginning of the answer
        compared += 1
        differences += [] if found is None else [(found, len(prompt.token_ids))]
    shown = ""
    if differences:
        first, length = differences[0]
        shown = f"; token {first.position - length} of one begins {_told_apart(first)}"
    return Check(
        name="streams are the template's rendering",
        code="P019",
        passed=True if compared else None,
        note=bool(differences),
        measured=float(len(differences)),
        detail=f"{compared - len(differences)} of {compared} conversations are what the chat template renders{shown}"
        if compared
        else "no conversation that the chat template renders again",
        fix="Nothing, as a rule: the tokens that were drawn are trained on, not those of a rendering. A model that is "
        "served sees the rendering in later turns.",
    )


def _told_apart(found: Difference) -> str:
    r"""Both texts, from shortly before they part; line breaks and other invisible characters as escapes.

    >>> _told_apart(Difference(3, "9.\n", "9.\n\n", same_text=False))
    "'9.\\n', rendered is '9.\\n\\n'"
    """
    texts = (found.streamed, found.rendered)
    part = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = 0 if found.same_text else max(0, part - BEFORE)
    shown = [repr(text[begin : begin + SHOWN]) if text else "its end" for text in texts]
    same = ", the same text in other tokens" if found.same_text else ""
    return f"{shown[0]}, rendered is {shown[1]}{same}"


def _with_turns(x: Before) -> list[tuple[Prompt, Completion]]:
    """Completions of conversations that have several turns, or calls, with their prompts."""
    completions = ((each, c) for each in x.scored for own in each.group.completions for c in own.sequences)
    every = ((c.prompt or each.group.prompt, c) for each, c in completions)
    return [(prompt, c) for prompt, c in every if prompt.is_chat and len(c.messages) > 1]


def _with_most_turns(samples: Sequence[Sample]) -> list[Sample]:
    """A few samples that have several turns, the most first."""
    cut = [first_tokens(sample, LATER_TOKENS) for sample in samples]
    turns = [int(turns_of(sample).max(initial=0)) for sample in cut]
    order = sorted(range(len(cut)), key=lambda i: -turns[i])
    return [cut[i] for i in order[:LATER_COMPLETIONS] if turns[i]]


def _first_apart(
    turns: Sequence[np.ndarray], mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray], tolerance: float
) -> str:
    """The first turn whose log-probabilities differ."""
    compared = enumerate(zip(turns, mine, theirs, strict=True))
    apart = ((r, own[~(np.abs(a - b) <= tolerance)]) for r, (own, a, b) in compared)
    first = min(((int(own[0]) + 1, r) for r, own in apart if len(own)), default=None)
    return "" if first is None else f"; first in turn {first[0]} of completion {first[1]}"


def first_tokens(sample: Sample, count: int) -> Sample:
    """The first tokens behind the prompt; only what log-probabilities need."""
    actions = sample.actions[:count]
    num_drawn = int(actions.sum())
    return replace(
        sample,
        token_ids=sample.token_ids[:count],
        actions=actions,
        advantages_A=sample.advantages_A[:num_drawn],
        sampled_logps_A=sample.sampled_logps_A[:num_drawn],
        old_logps_A=None,
        ref_logps_A=None,
        penalties_A=None,
    )


OF_TURNS: tuple[Callable[[Before], Check], ...] = (drawn_targets, later_turns, own_rendering)
"""Checks before the first step of a run whose completions have several turns."""
