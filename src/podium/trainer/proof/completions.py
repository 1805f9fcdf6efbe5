"""Checks of completions and rewards: the tokens that were sampled are scored and trained on, and no others.

Those of several turns: targets are the drawn tokens, and the stream is that of the chat template.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from podium.agents.chat import TemplateDifference
from podium.algorithm.advantages import combine, has_spread
from podium.data.prompts import apply_template
from podium.errors.texts import counted
from podium.models.packing import pack, unscored
from podium.records import Completion, Prompt, Sample, SamplingSettings, ScoredGroup
from podium.trainer.proof.evidence import (
    ONE_PACK,
    Before,
    Reading,
    Subject,
    difference,
    drawn_places,
    first_tokens,
    is_no_rounding,
    plain_logps,
    problems_in,
    sampler_tolerance,
    turns_of,
    with_rounding,
)

Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt, and those of a completion."""

PLAIN_TEXTS = 4
PLAIN_TOKENS = 64
"""Prompts whose text is looked at, and tokens of each."""
FOREIGN = 0.75
FOREIGN_GAP = 3.0
UNTRAINED = 0.85
"""Cost of text as a share of guessing, and nats above what the model expects, from which on text is not its own;
entropy as a share of guessing above which it knows no text. SmolLM2-135M on prompts of four tasks, code, numbers and
three languages: 0.4 of guessing and 1.4 nats at most; with its vocabulary permuted 1.0 and 4.6 at least."""

COMPARED = 16
"""Conversations that are rendered again."""
SHOWN = 30
BEFORE = 10
"""Characters of two texts that differ, and how many of them are before the difference."""
LATER_COMPLETIONS = 4
LATER_TOKENS = 1024
"""Completions with the most turns whose later turns are computed again, and first tokens of each."""


# ---- tokens ----


def end_tokens(run: Subject) -> Reading:
    """Sampling ends where the model, its tokenizer and its generation config say that a turn ends."""
    ends = run.training.step.sampling(1, 0).end_ids
    listed = ", ".join(map(run.shown, sorted(ends))) or "none: only the length does"
    missing: list[int] = []
    if "eos_token_id" not in (run.args.generation_kwargs or {}):
        declared = getattr(getattr(run.model, "generation_config", None), "eos_token_id", None) or []
        ids = {run.training.policy.tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else declared)}
        missing = sorted(ids - ends - {None})
    turn = turn_end(run)
    unended = turn is not None and turn not in ends and not missing
    detail = f"a completion ends with {listed}"
    if missing:
        detail = (
            f"{', '.join(map(run.shown, missing))} does not end a completion, though the model's generation config or "
            f"tokenizer says so (ends: {listed})"
        )
    elif unended:
        detail = f"{detail}; the chat template ends a turn with {run.shown(turn)}, which does not end it"
    return Reading(detail, passed=not missing, measured=float(len(missing)), note=unended)


def sampled_tokens(x: Before) -> Reading:
    """The trained tokens are the sampled ones."""
    sampled = sampled_by_ids(x)
    trained = [(sample.prompt_ids, sample.token_ids) for sample in x.trained]
    settings = x.run.training.step.sampling(1, 0)
    # Stop strings and other settings of an engine may end one, too, and a program names its own stops and limits.
    ends_early = bool(settings.extra) or x.run.training.agents.program is not None
    problems = [_completion_problem(x, c, settings, ends_early=ends_early) for c in sampled.values()]
    problems += [_unsampled(x, *key) for key in trained if key not in sampled]
    count = sum(1 for _ in completions_of(x))  # more than `sampled`, if two are alike
    return problems_in(problems, f"{len(trained)} of {count} completions are trained on", checked=bool(x.scored))


def turn_ends(x: Before) -> Reading:
    """No completion goes on after the token with which the chat template ends a turn."""
    end = turn_end(x.run) if any(s.group.prompt.is_chat for s in x.scored) else None
    if end is None:
        return Reading("no chat template that ends a turn with a token of its own", passed=None, measured=0.0)
    completions = [c for _, c in completions_of(x) if c.token_ids]
    beyond = sum(any(end in ids[:-1] for ids in drawn_runs(c)) for c in completions)
    return Reading(
        f"{beyond} of {len(completions)} completions go on after {x.run.shown(end)}",
        suspect=beyond > 0,
        measured=float(beyond),
        fix=f"Let it end them: generation_kwargs: {{eos_token_id: [{end}]}}, or set tokenizer.eos_token.",
        changes={"generation_kwargs": {"eos_token_id": [end]}},
    )


def _completion_problem(x: Before, c: Completion, settings: SamplingSettings, *, ends_early: bool = False) -> str:
    """A contradiction in a sampled completion; empty: there is none.

    `ends_early`: whether more than end tokens may end one, such as `stop_strings`.
    """
    total = len(c.token_ids)
    drawn = drawn_runs(c)
    if problem := _turn_problem(c, drawn, None if ends_early else settings.end_ids):
        return problem
    ends = ends_early or c.finish in ("turns", "context") or drawn[-1][-1] in settings.end_ids
    if total > settings.max_tokens or (total < settings.max_tokens and not ends):
        return f"a completion of {total} tokens neither ends with an end token nor is {settings.max_tokens} long"
    inside = [token for ids in drawn for token in ids[:-1] if token in settings.end_ids]
    if inside:
        return f"a completion goes on after {x.run.shown(inside[0])}"
    if x.run.training.policy.tokenizer.decode(c.token_ids, skip_special_tokens=True) != c.text:
        return f"the text that was scored is not that of its {total} tokens: {c.text[:30]!r}"
    return ""


def _turn_problem(c: Completion, drawn: list[tuple[int, ...]], end_ids: frozenset[int] | None) -> str:
    """A contradiction between the turns of a completion, its tokens and its log-probabilities.

    `end_ids`: one of which ends every turn but the last; None: anything may.
    """
    total = len(c.token_ids)
    num_drawn = sum(map(len, drawn))
    bounds = [(0, 0), *((turn.start, turn.stop) for turn in c.turns), (total, total)]
    if not all(drawn) or any(stop > start for (_, stop), (start, _) in pairwise(bounds)):
        return f"turns of a completion of {total} tokens are empty or overlap: {bounds[1:-1]}"
    if len(c.logps) != num_drawn:
        return f"a completion of {num_drawn} drawn tokens came with {len(c.logps)} log-probabilities"
    if end_ids is not None and any(ids[-1] not in end_ids for ids in drawn[:-1]):
        return f"a completion of {total} tokens goes on after a turn without an end token"
    return ""


def _unsampled(x: Before, prompt_ids: tuple[int, ...], ids: tuple[int, ...]) -> str:
    """The place at which a trained completion that was not sampled leaves the nearest one that was."""
    sampled = [c.token_ids for (prompt, _), c in sampled_by_ids(x).items() if prompt == prompt_ids]
    if not sampled:
        return "a trained prompt was never sampled from"

    def common(other: tuple[int, ...]) -> int:
        return next((t for t, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))

    nearest = max(sampled, key=common)
    at = common(nearest)
    tokens = [x.run.shown(side[at]) if at < len(side) else "its end" for side in (ids, nearest)]
    return f"token {at} of a trained completion is {tokens[0]}, but {tokens[1]} was sampled"


# ---- rewards ----


def rewards(x: Before) -> Reading:
    """One finite number or None a completion, and advantages that follow them."""
    counts = Counter((sample.prompt_ids, sample.token_ids) for sample in x.trained)
    keyed = {(sample.prompt_ids, sample.token_ids): sample.advantage for sample in x.trained}
    advantage = {key: value for key, value in keyed.items() if counts[key] == 1}
    scoring = x.run.training.scoring
    names = tuple(reward.name for reward in scoring.rewards)
    problems = (_reward_problem(s, names) or _advantage_problem(x, s, advantage) for s in x.scored)
    problem = next(filter(None, problems), "")
    spread = sum(has_spread(combine(s.rewards_GK, scoring.advantage.weights_K)) for s in x.scored)
    return Reading(
        problem or f"{counted(len(names), 'function')}, {spread} of {len(x.scored)} groups have spread",
        passed=not problem if x.scored else None,
        note=not spread,
    )


def _reward_problem(scored: ScoredGroup, names: tuple[str, ...]) -> str:
    if scored.rewards_GK.shape != (scored.num_completions, len(names)):
        return f"{scored.rewards_GK.shape} rewards for {scored.num_completions} completions and {len(names)} functions"
    if np.isinf(scored.rewards_GK).any():
        return f"{names[int(np.isinf(scored.rewards_GK).any(0).argmax())]} gave an infinite reward"
    return ""


def _advantage_problem(x: Before, scored: ScoredGroup, advantage: Mapping[Ids, float]) -> str:
    """An advantage that is not finite, or lower for the better completion."""
    settings = x.run.training.scoring.advantage
    reward_G = combine(scored.rewards_GK, settings.weights_K)
    keys = [((c.prompt or scored.group.prompt).token_ids, c.token_ids) for c in scored.group.completions]
    alike = Counter(keys)
    scores = zip(keys, reward_G.tolist(), strict=True)
    pairs = [(reward, advantage[key]) for key, reward in scores if key in advantage and alike[key] == 1]
    if any(not math.isfinite(value) for _, value in pairs):
        return f"an advantage of prompt {scored.group.prompt.id} is not finite"
    best = max(pairs, default=(0.0, 0.0))
    worst = min(pairs, default=(0.0, 0.0))
    follows = settings.aggregation == "sum_then_normalize" and not x.run.args.adaptive_rewards
    if follows and best[0] > worst[0] and best[1] < worst[1]:
        return f"prompt {scored.group.prompt.id}: the better completion has the lower advantage"
    return ""


# ---- text ----


def own_language(x: Before) -> Reading:
    """The tokenizer is the model's own, and the prompt opens the assistant's turn."""
    known = _surprise(x)
    opened = _opened_by_the_model(x)
    surprise, entropy, chance = known or (0.0, 0.0, 1.0)
    untrained = entropy > UNTRAINED * chance
    strange = surprise > FOREIGN * chance and surprise > entropy + FOREIGN_GAP
    foreign = strange or (surprise > chance and not untrained)
    if opened:
        detail = opened
    elif foreign:
        detail = (
            f"the prompts' plain text costs {surprise:.1f} nats a token where the model expects {entropy:.1f}, and "
            f"{chance:.1f} is guessing: the tokenizer is another model's, or the weights never learnt text"
        )
    elif known is None:
        detail = "too little text"
    elif untrained:
        detail = "the model has not learnt any language: it is at chance"
    else:
        detail = f"plain text costs {surprise:.1f} nats a token, {chance:.1f} is guessing"
    suspect = foreign or bool(opened)
    unknown = not suspect and (known is None or untrained)
    passed = None if unknown else True
    return Reading(detail, passed=passed, suspect=suspect, measured=surprise, tolerance=FOREIGN * chance)


def _surprise(x: Before) -> tuple[float, float, float] | None:
    """Nats a token that the text of the prompts costs without template, the model's entropy there, and log V."""
    tokenizer = x.run.training.policy.tokenizer
    contents = [s.group.prompt.content for s in x.scored]
    turns = ([c] if isinstance(c, str) else [turn.get("content") for turn in c] for c in contents)
    texts = dict.fromkeys("\n\n".join(text for text in parts if isinstance(text, str)) for parts in turns)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:PLAIN_TOKENS] for text in list(texts)[:PLAIN_TEXTS]]
    samples = [unscored(ids[:1], ids[1:]) for ids in rows if len(ids) > 1]
    if sum(len(sample.token_ids) for sample in samples) < PLAIN_TEXTS:
        return None
    out = plain_logps(x.run.model, samples, 1.0)
    return float(-out.logps_N.mean()), float(out.entropy_N.mean()), math.log(len(tokenizer))


def _opened_by_the_model(x: Before) -> str:
    """A warning where most completions begin with a special token that begins the prompt's turns, too."""
    special = set(x.run.training.policy.tokenizer.all_special_ids) - x.run.training.policy.end_ids
    begun = [(c.token_ids[0], s.group.prompt) for s in x.scored for c in s.group.completions if c.token_ids]
    opened = [token for token, prompt in begun if token in special and token in prompt.token_ids]
    if len(opened) <= len(begun) / 2:
        return ""
    return (
        f"{len(opened)} of {len(begun)} completions begin with {x.run.shown(opened[0])}: the prompt leaves the "
        "assistant's turn to them"
    )


# ---- several turns ----


def drawn_targets(x: Before) -> Reading:
    """Every token that the policy drew is predicted in training, and no other, each from the token before it."""
    sampled = sampled_by_ids(x)
    compared = [
        (completion, places, ids)
        for sample, places, ids in _targets(x.trained)
        if (completion := sampled.get((sample.prompt_ids, sample.token_ids))) is not None  # else it is for P009
    ]
    count = sum(len(places) for _, places, _ in compared)
    problems = [_target_problem(x, *targets) for targets in compared]
    detail = f"{count} tokens were drawn, and exactly these are trained on"
    return problems_in(problems, detail, checked=bool(count))


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
    other = [(t, token) for t, token in zip(places, ids, strict=True) if completion.token_ids[t] != token]
    if other:
        at, token = other[0]
        return f"the target at token {at}, {x.run.shown(completion.token_ids[at])}, is {x.run.shown(token)}"
    return ""


def later_turns(x: Before) -> Reading:
    """Log-probabilities of the second turn and those after it, from the engine's kept state, are training's."""
    chosen = [] if x.run.training.step.filters_logps else _with_most_turns(x.trained)
    tolerance = sampler_tolerance(x.run, exact=False)
    allowed = with_rounding(x, tolerance)
    if not chosen:
        detail = "no trained completion has a second turn, or a filter has changed the log-probabilities"
        return Reading(detail, passed=None, tolerance=allowed)
    mine = x.run.training.step.logps(chosen, x.run.model)
    theirs = [sample.sampled_logps_A for sample in chosen]
    turns = [turns_of(sample) for sample in chosen]
    fits = all(len(own) == len(logps_A) for own, logps_A in zip(turns, theirs, strict=True))
    measured = math.inf
    if fits:
        later = [own > 0 for own in turns]
        mine_N, theirs_N = (
            np.concatenate([logps_A[own] for logps_A, own in zip(side, later, strict=True)]) for side in (mine, theirs)
        )
        measured = difference(mine_N, theirs_N, tolerance)
    last = max(int(own.max()) + 1 for own in turns)
    count = sum(int((own > 0).sum()) for own in turns)
    detail = f"{measured:.2g} nats over {count} tokens of turns 2 to {last} ({allowed:g} allowed)"
    if measured > allowed and fits:
        detail = f"{detail}{_first_apart(turns, mine, theirs, tolerance)}"
    return Reading(
        detail,
        passed=measured <= allowed or not is_no_rounding(x.run, chosen, np.concatenate(mine), measured),
        suspect=measured > allowed,
        measured=measured,
        tolerance=allowed,
    )


def own_rendering(x: Before) -> Reading:
    """The streams of tokens are what the chat template renders of their messages; a difference is a note."""
    agents = x.run.training.agents
    several = [(p, c) for p, c in completions_of(x) if p.is_chat and len(c.messages) > 1]
    compared = 0
    differences: list[tuple[TemplateDifference, int]] = []
    for prompt, completion in several[:COMPARED]:
        stream = (*prompt.token_ids, *completion.token_ids)
        try:
            name = agents.pools.name_of(prompt.columns) if agents.pools is not None else None
            messages = [*prompt.content, *completion.messages]
            found = agents.chat.first_difference(stream, messages, agents.schemas(name))
        except Exception:  # noqa: BLE001  a template may refuse a conversation, with any exception
            continue
        if found is not None and found.position < len(prompt.token_ids):
            continue  # a prompt that was cut, or that ends in the beginning of the answer
        compared += 1
        if found is not None:
            differences.append((found, len(prompt.token_ids)))
    detail = "no conversation that the chat template renders again"
    if compared:
        detail = f"{compared - len(differences)} of {compared} conversations are what the chat template renders"
    if differences:
        first, length = differences[0]
        detail = f"{detail}; token {first.position - length} of one begins {_both_texts(first)}"
    passed = True if compared else None
    return Reading(detail, passed=passed, note=bool(differences), measured=float(len(differences)))


def _both_texts(found: TemplateDifference) -> str:
    r"""Both texts, from shortly before they part; line breaks and other invisible characters as escapes.

    >>> _both_texts(TemplateDifference(3, "9.\n", "9.\n\n", same_text=False))
    "'9.\\n', rendered is '9.\\n\\n'"
    """
    texts = (found.streamed, found.rendered)
    part = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = 0 if found.same_text else max(0, part - BEFORE)
    shown = [repr(text[begin : begin + SHOWN]) if text else "its end" for text in texts]
    same = ", the same text in other tokens" if found.same_text else ""
    return f"{shown[0]}, rendered is {shown[1]}{same}"


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


# ---- shared by checks ----


def completions_of(x: Before) -> Iterator[tuple[Prompt, Completion]]:
    """Every sampled sequence with its prompt."""
    for scored in x.scored:
        for completion in scored.group.completions:
            for sequence in completion.sequences:
                yield sequence.prompt or scored.group.prompt, sequence


def sampled_by_ids(x: Before) -> dict[Ids, Completion]:
    """The sampled completions, by the tokens of their prompt and their own."""
    return {(prompt.token_ids, c.token_ids): c for prompt, c in completions_of(x) if c.token_ids}


def drawn_runs(c: Completion) -> list[tuple[int, ...]]:
    """The drawn tokens of each turn."""
    return [c.token_ids[turn.start : turn.stop] for turn in c.turns] or [c.token_ids]


def turn_end(run: Subject) -> int | None:
    """The special token with which the chat template ends an assistant's turn; None: there is none."""
    tokenizer = run.training.policy.tokenizer
    mark = "podium-turn"
    if not run.training.rows.builder.chat_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = apply_template(tokenizer, turns, settings=run.args.chat_template_kwargs or {})
    except Exception:  # noqa: BLE001  a template may refuse any conversation, with any exception
        return None
    ids = tokenizer(text.partition(mark)[2], add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder) else None
