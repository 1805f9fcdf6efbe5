"""Checks of completions and rewards: the tokens that were sampled are scored and trained on, and no others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from podium.algorithm.advantages import combine, has_spread
from podium.data.prompts import apply_template
from podium.errors.texts import counted
from podium.models.packing import unscored
from podium.records import Completion, ScoredGroup
from podium.trainer.proof.plain import plain_logps
from podium.trainer.proof.records import Before, Check, Subject, named


def end_tokens(run: Subject) -> Check:
    """Sampling ends where the model, its tokenizer and its generation config say that a turn ends."""
    ends = run.training.step.sampling(1, 0).end_ids
    chosen = "eos_token_id" in (run.args.generation_kwargs or {})
    declared = getattr(getattr(run.model, "generation_config", None), "eos_token_id", None)
    ids = {run.training.policy.tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else declared or ())}
    missing = sorted(() if chosen else ids - ends - {None})
    turn = turn_end(run)
    unended = turn is not None and turn not in ends and not missing
    note = f"; the chat template ends a turn with {run.shown(turn)}, which does not end it" if unended else ""
    listed = ", ".join(map(run.shown, sorted(ends))) or "none: only the length does"
    return Check(
        name="end tokens",
        code="P003",
        passed=not missing,
        note=unended,
        measured=float(len(missing)),
        tolerance=0.0,
        detail=f"{', '.join(map(run.shown, missing))} does not end a completion, though the model's "
        f"generation config or tokenizer says so (ends: {listed})"
        if missing
        else f"a completion ends with {listed}{note}",
        fix="Make generation_config.eos_token_id and tokenizer.eos_token agree with the chat template.",
    )


def rewards(x: Before) -> Check:
    """One finite number or None a completion, and advantages that follow them."""
    problem = ""
    flat = 0
    counts = Counter((sample.prompt_ids, sample.token_ids) for sample in x.trained)
    keyed = {(sample.prompt_ids, sample.token_ids): sample.advantage for sample in x.trained}
    advantage = {key: value for key, value in keyed.items() if counts[key] == 1}
    names = tuple(reward.name for reward in x.run.training.scoring.rewards)
    for scored in x.scored:
        problem = problem or _reward_problem(scored, names) or _advantage_problem(x, scored, advantage)
        flat += not has_spread(combine(scored.rewards_GK, x.run.training.scoring.advantage.weights_K))
    spread = len(x.scored) - flat
    functions = counted(len(names), "function")
    return Check(
        name="rewards",
        code="P010",
        passed=None if not x.scored else not problem,
        note=not spread,
        detail=problem or f"{functions}, {spread} of {len(x.scored)} groups have spread",
        fix="Look at the completions with `podium sample`; a reward is one number or None for each of them.",
    )


def sampled_tokens(x: Before) -> Check:
    """The trained tokens are the sampled ones."""
    sampled = sampled_by_ids(x)
    settings = x.run.training.step.sampling(1, 0)
    early = bool(settings.extra) or x.run.training.agents.program is not None  # which may name its own stops and limits
    bounds = (settings.end_ids, settings.max_tokens)
    problems = [_completion_problem(x, c, *bounds, early=early) for c in sampled.values()]
    trained = [(sample.prompt_ids, sample.token_ids) for sample in x.trained]
    problems += [_unsampled(x, *key) for key in trained if key not in sampled]
    problems = [problem for problem in problems if problem]
    count = sum(
        len(c.sequences) for s in x.scored for c in s.group.completions
    )  # more than `sampled`, where two are alike
    return Check(
        name="trained tokens are the sampled ones",
        code="P009",
        passed=None if not x.scored else not problems,
        measured=float(len(problems)),
        tolerance=0.0,
        detail=named(problems) if problems else f"{len(trained)} of {count} completions are trained on",
        fix="Train on the ids that the engine sampled; never on text that is tokenized again.",
    )


def turn_ends(x: Before) -> Check:
    """No completion goes on after the token with which the chat template ends a turn."""
    end = turn_end(x.run) if any(s.group.prompt.is_chat for s in x.scored) else None
    completions = [c for s in x.scored for own in s.group.completions for c in own.sequences if c.token_ids]
    beyond = sum(any(end in ids[:-1] for ids in drawn_runs(c)) for c in completions)
    return Check(
        name="completions end with the turn",
        code="P003",
        passed=None if end is None else True,
        suspect=beyond > 0,
        measured=float(beyond),
        tolerance=0.0,
        detail="no chat template that ends a turn with a token of its own"
        if end is None
        else f"{beyond} of {len(completions)} completions go on after {x.run.shown(end)}",
        fix=f"Let it end them: generation_kwargs: {{eos_token_id: [{end}]}}, or set tokenizer.eos_token.",
        changes={} if end is None else {"generation_kwargs": {"eos_token_id": [end]}},
    )


def own_language(x: Before) -> Check:
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
    return Check(
        name="text is the model's own",
        code="P014",
        passed=None if not opened and not foreign and (known is None or untrained) else True,
        suspect=foreign or bool(opened),
        measured=surprise,
        tolerance=FOREIGN * chance,
        detail=detail,
        fix="Use the tokenizer and the chat template that came with the model (leave out processing_class, or load it "
        "from the model's own folder).",
    )


PLAIN_TEXTS = 4
PLAIN_TOKENS = 64
"""Prompts whose text is looked at, and tokens of each."""
FOREIGN = 0.75
FOREIGN_GAP = 3.0
UNTRAINED = 0.85
"""Cost of text as a share of guessing, and nats above what the model expects, from which on text is not its own;
entropy as a share of guessing above which it knows no text. SmolLM2-135M on prompts of four tasks, code, numbers and
three languages: 0.4 of guessing and 1.4 nats at most; with its vocabulary permuted 1.0 and 4.6 at least."""


def _surprise(x: Before) -> tuple[float, float, float] | None:
    """Nats a token that the text of the prompts costs without template, the model's entropy there, and log V."""
    tokenizer = x.run.training.policy.tokenizer
    contents = [s.group.prompt.content for s in x.scored]
    turns = ([c] if isinstance(c, str) else [turn.get("content") for turn in c] for c in contents)
    texts = dict.fromkeys("\n\n".join(text for text in each if isinstance(text, str)) for each in turns)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:PLAIN_TOKENS] for text in list(texts)[:PLAIN_TEXTS]]
    samples = [unscored(ids[:1], ids[1:]) for ids in rows if len(ids) > 1]
    if sum(len(sample.token_ids) for sample in samples) < PLAIN_TEXTS:
        return None
    out = plain_logps(x.run.model, samples, 1.0)
    return float(-out.logps_N.mean()), float(out.entropy_N.mean()), math.log(len(tokenizer))


def _opened_by_the_model(x: Before) -> str:
    """A warning where most completions begin with a special token that begins the prompt's turns, too."""
    special = set(x.run.training.policy.tokenizer.all_special_ids) - x.run.training.policy.end_ids
    first = [
        (c.token_ids[0], c.token_ids[0] in special and c.token_ids[0] in s.group.prompt.token_ids)
        for s in x.scored
        for c in s.group.completions
        if c.token_ids
    ]
    opened = [token for token, opens in first if opens]
    if len(opened) <= len(first) / 2:
        return ""
    token = x.run.shown(opened[0])
    count = f"{len(opened)} of {len(first)} completions"
    return f"{count} begin with {token}: the prompt leaves the assistant's turn to them"


# ---- shared by checks ----


def sampled_by_ids(x: Before) -> dict[tuple[tuple[int, ...], tuple[int, ...]], Completion]:
    """The sampled completions, by the tokens of their prompt and their own."""
    every = ((c.prompt or s.group.prompt, c) for s in x.scored for own in s.group.completions for c in own.sequences)
    return {(prompt.token_ids, c.token_ids): c for prompt, c in every if c.token_ids}


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


def _reward_problem(scored: ScoredGroup, names: tuple[str, ...]) -> str:
    if scored.rewards_GK.shape != (scored.num_completions, len(names)):
        return f"{scored.rewards_GK.shape} rewards for {scored.num_completions} completions and {len(names)} functions"
    if np.isinf(scored.rewards_GK).any():
        return f"{names[int(np.isinf(scored.rewards_GK).any(0).argmax())]} gave an infinite reward"
    return ""


def _advantage_problem(x: Before, scored: ScoredGroup, advantage: Mapping[Any, float]) -> str:
    """An advantage that is not finite, or lower for the better completion."""
    settings = x.run.training.scoring.advantage
    reward_G = combine(scored.rewards_GK, settings.weights_K)
    alike = Counter(((c.prompt or scored.group.prompt).token_ids, c.token_ids) for c in scored.group.completions)
    pairs = [
        (reward, advantage[key])
        for c, reward in zip(scored.group.completions, reward_G.tolist(), strict=True)
        if (key := ((c.prompt or scored.group.prompt).token_ids, c.token_ids)) in advantage and alike[key] == 1
    ]
    if any(not math.isfinite(a) for _, a in pairs):
        return f"an advantage of prompt {scored.group.prompt.id} is not finite"
    best = max(pairs, default=(0.0, 0.0))
    worst = min(pairs, default=(0.0, 0.0))
    as_given = settings.aggregation == "sum_then_normalize" and not x.run.args.adaptive_rewards
    if as_given and best[0] > worst[0] and best[1] < worst[1]:
        return f"prompt {scored.group.prompt.id}: the better completion has the lower advantage"
    return ""


def _completion_problem(
    x: Before, c: Completion, end_ids: frozenset[int], max_tokens: int, *, early: bool = False
) -> str:
    """A contradiction in a sampled completion; empty: there is none.

    `early`: whether more than end tokens may end one, such as `stop_strings`.
    """
    total = len(c.token_ids)
    drawn = drawn_runs(c)
    problem = _turn_problem(c, drawn, None if early else end_ids)
    if problem:
        return problem
    ends = early or c.finish in ("turns", "context") or drawn[-1][-1] in end_ids
    if total > max_tokens or (total < max_tokens and not ends):
        return f"a completion of {total} tokens neither ends with an end token nor is {max_tokens} long"
    inside = [i for ids in drawn for i in ids[:-1] if i in end_ids]
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
    """The place where a trained completion that was not sampled leaves the nearest one that was."""
    sampled = [c.token_ids for (prompt, _), c in sampled_by_ids(x).items() if prompt == prompt_ids]
    if not sampled:
        return "a trained prompt was never sampled from"

    def common(other: tuple[int, ...]) -> int:
        return next((t for t, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))

    nearest = max(sampled, key=common)
    at = common(nearest)
    tokens = [x.run.shown(side[at]) if at < len(side) else "its end" for side in (ids, nearest)]
    return f"token {at} of a trained completion is {tokens[0]}, but {tokens[1]} was sampled"
