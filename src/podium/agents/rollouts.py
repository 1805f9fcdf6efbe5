"""Groups of completions with all that happens between their turns: tools, environments, a program, a `rollout_func`.

    sampled = sample_groups(agents, engine, prompts, settings, builder=builder)
    sampled.groups, sampled.environments

Every completion is a rollout of its own, which goes on in a thread between its turns, so that tools of different
completions overlap with each other and with the decoding of other rows. What it is given depends on its tokens alone,
not on the order in which tools finish.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from podium.agents.chat import ChatFormat, TooManyTokens
from podium.agents.environments import EMPTY_PROMPT, refuse_silence, reset
from podium.agents.episode import Episode, EpisodeLimits, Observation
from podium.agents.plain_text import TextEnvironment
from podium.agents.rollout_func import GivenTurn, RolloutFunction, first_turns, given_completion
from podium.agents.setup import Agents, SampledGroups
from podium.agents.table import program_rollouts
from podium.agents.tools import ToolRunner, by_name
from podium.data.prompts import PromptBuilder
from podium.engines.base import Drawn, Rollout, RolloutEngine, continuation, grouped, play
from podium.engines.sampling import row_key
from podium.errors import DataError
from podium.models.candidates import of_completion
from podium.records import Completion, Finish, GivenImages, Group, Prompt, RolloutRequest, SamplingSettings, Turn

MOST_THREADS = 256
"""Turns that are answered at a time."""


def sample_groups(
    agents: Agents,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    builder: PromptBuilder,
    policy_step: int = 0,
    evaluation: bool = False,
    rollout_func: RolloutFunction | None = None,
) -> SampledGroups:
    """Groups of completions, one per prompt, with all their turns.

    Args:
        agents: what completions do besides being drawn.
        engine: draws the turns.
        prompts: with the tools rendered; with environments as the dataset has them.
        settings: of the round.
        builder: makes the prompts again after environments were reset.
        policy_step: of the sampling weights.
        evaluation: whether environments come from the pool of evaluations.
        rollout_func: called in place of the engine's first turn.
    """
    if agents.chat.images is not None:
        settings = replace(settings, never=(agents.chat.images.placeholder,))
    if agents.program is not None:
        return program_rollouts(agents, engine, prompts, settings, policy_step=policy_step, evaluation=evaluation)
    count = settings.num_completions
    own = [prompt for prompt in prompts for _ in range(count)]
    environments: list[Any] | None = None
    if agents.pools is not None:
        names = [agents.pools.name_of(prompt.columns) for prompt in own]
        environments = agents.pools.take_anew(names, evaluation=evaluation)
        own = _reset(agents, own, environments, settings, builder)
    first: list[GivenTurn] | None = None
    if rollout_func is not None:
        first = first_turns(rollout_func, own, settings, agents.chat.tokenizer)
        own = [turn.prompt for turn in first]
    elif not agents.takes_turns:
        return SampledGroups(engine.generate(prompts, settings, policy_step=policy_step))
    if first is not None and not agents.has_tools:
        tools = agents.common_schemas
        drawn = [given_completion(turn, agents.chat, tools, settings, policy_step) for turn in first]
    else:
        drawn = _conversations(agents, engine, own, environments, settings, policy_step, first)
    completions = iter(drawn)
    groups = [Group(prompt=own[i], completions=(*islice(completions, count),)) for i in range(0, len(own), count)]
    _discard_stuck(agents, groups, environments)
    return SampledGroups(groups, environments)


def _reset(
    agents: Agents,
    prompts: Sequence[Prompt],
    environments: Sequence[Any],
    settings: SamplingSettings,
    builder: PromptBuilder,
) -> list[Prompt]:
    """The prompts of completions after their environments were reset with the rows; equal ones of a group are one."""
    assert agents.pools is not None
    made: list[Prompt] = []
    for i, (prompt, environment) in enumerate(zip(prompts, environments, strict=True)):
        is_placeholder = prompt.is_chat and prompt.content[0] is EMPTY_PROMPT[0]  # `reset` is given no prompt then
        row = dict(prompt.columns) if is_placeholder else {"prompt": prompt.content, **prompt.columns}
        content = reset(
            environment,
            row,
            named=agents.pools.named,
            seed=int(row_key(settings.seed, settings.round, prompt.id, -1)) >> 33,
            index=prompt.row,
            limit=agents.call_limits.timeout,
        )
        group = made[i - i % settings.num_completions :]
        same = next((earlier for earlier in group if earlier.content == content), None)
        named = replace(builder, name=f"environment `{type(environment).__name__}`")
        made.append(same or _rebuilt(agents, prompt, content, named))
    return made


def _rebuilt(agents: Agents, prompt: Prompt, content: Any, builder: PromptBuilder) -> Prompt:
    """A prompt with the content that `reset` has given it."""
    assert agents.pools is not None
    tools = agents.schemas(agents.pools.name_of(prompt.columns))
    if not tools:
        refuse_silence(content, prompt.row)
    made = builder({**prompt.columns, "prompt": content}, id=prompt.id, row_index=prompt.row, tools=tools)
    if made is None:
        what = f"row {prompt.row}: with what its environment added the prompt is too long, and a prompt cannot be "
        raise DataError(what + "left out once sampling has begun.", fix='overlong_prompts="truncate"')
    # A checkpoint keeps such images: of the row alone they cannot be made again.
    return replace(made, images=tuple(replace(images, prompt=None) for images in made.images))


def _conversations(
    agents: Agents,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    environments: Sequence[Any] | None,
    settings: SamplingSettings,
    policy_step: int,
    drawn_first: Sequence[GivenTurn] | None,
) -> list[Completion]:
    """A conversation behind each prompt. `given`: the first turns, where they were drawn elsewhere."""
    limits = EpisodeLimits(
        max_iterations=agents.max_iterations,
        max_turns=agents.max_turns,
        max_corrections=agents.max_corrections,
        calls=agents.call_limits,
    )
    runner = ToolRunner()
    requests: list[RolloutRequest] = []
    rollouts: list[Rollout] = []
    for i, prompt in enumerate(prompts):
        g = i % settings.num_completions
        environment = None if environments is None else environments[i]
        name = None if agents.pools is None else agents.pools.name_of(prompt.columns)
        tools = by_name(agents.tools_of(name, environment))
        if not prompt.is_chat and (tools or isinstance(environment, TextEnvironment)):
            raise DataError(
                f"row {prompt.row}: the prompt is plain text, and turns and tools need a conversation.",
                fix='write it as [{"role": "user", "content": text}]',
                row=prompt.row,
            )
        request = RolloutRequest(
            token_ids=prompt.token_ids,
            prompt_id=prompt.id,
            completion=g,
            max_tokens=settings.max_tokens,
            images=prompt.images,
        )
        key = (settings.seed, settings.round, prompt.id, g)
        episode = Episode(tools, environment, limits=limits, runner=runner, key=key)
        first = None if drawn_first is None else Drawn(request, drawn_first[i].token_ids, drawn_first[i].logps)
        requests.append(request)
        rollouts.append(
            conversation(
                prompt,
                request,
                episode,
                agents.chat,
                settings,
                policy_step=policy_step,
                context_length=agents.context_length,
                first=first,
            )
        )
    try:
        completions = play(
            engine,
            settings,
            rollouts,
            grouped(requests),
            threads=min(MOST_THREADS, len(rollouts)),
            at_a_time=None if drawn_first is None else len(rollouts),
        )
    finally:
        runner.close()
    of_groups = [prompts[i - i % settings.num_completions] for i in range(len(prompts))]
    return [
        completion if prompt is of_group else replace(completion, prompt=prompt)
        for completion, prompt, of_group in zip(completions, prompts, of_groups, strict=True)
    ]


def conversation(
    prompt: Prompt,
    request: RolloutRequest,
    episode: Episode,
    chat: ChatFormat,
    settings: SamplingSettings,
    *,
    policy_step: int,
    context_length: int | None = None,
    first: Drawn | None = None,
) -> Rollout:
    """A completion whose turns an episode answers, until it is done or its tokens are used up.

    Args:
        prompt: that it begins with.
        request: for its first turn.
        episode: is closed at the end.
        chat: parses turns, and renders what follows them.
        settings: of the round. `max_tokens` are the drawn and given ones of all turns.
        policy_step: of the sampling weights.
        context_length: positions of the model, for the prompt and all turns; None: unknown.
        first: the first turn, where it was drawn elsewhere.
    """
    prefix = prompt.token_ids
    schemas = [tool.schema for tool in episode.tools.values()]
    token_ids: list[int] = []
    logps: list[float] = []
    candidates: list[np.ndarray] = []
    images: list[GivenImages] = []
    turns: list[Turn] = []
    finish: Finish | None = None
    with closing(episode):
        drawn = first or (yield [request])
        while finish is None:
            ended = time.perf_counter()
            start = len(token_ids)
            token_ids += drawn.token_ids
            logps += drawn.logps
            candidates += drawn.candidates or ()
            message = chat.parse(drawn.token_ids, prefix=(*prefix, *token_ids[:start]), tools=schemas)
            text = str(chat.tokenizer.decode(drawn.token_ids, skip_special_tokens=True))
            observation = episode.step(message, is_cut=not settings.has_ended(token_ids, text))
            context_left = None if context_length is None else context_length - len(prefix) - len(token_ids) - 1
            left = settings.max_tokens - len(token_ids)
            added, found, finish = _given(chat, observation, token_ids[-1], left, context_left)
            images += (replace(x, start=len(prefix) + len(token_ids) + x.start) for x in found)
            turns.append(
                Turn(
                    start=start,
                    stop=len(token_ids),
                    message=message,
                    calls=observation.calls,
                    replies=observation.messages if added else (),
                    reward=observation.reward,
                    seconds=drawn.seconds,
                    reply_seconds=time.perf_counter() - ended,
                )
            )
            token_ids += added
            if finish is None:
                drawn = yield [continuation(request, token_ids, images)]
    return Completion(
        token_ids=tuple(token_ids),
        logps=tuple(logps),
        candidates=of_completion(candidates, len(logps)),
        finish=finish,
        text=str(chat.tokenizer.decode(token_ids, skip_special_tokens=True)),
        policy_step=policy_step,
        turns=tuple(turns),
        images=tuple(images),
    )


def _given(
    chat: ChatFormat, observation: Observation, last: int, left: int, context_left: int | None
) -> tuple[tuple[int, ...], tuple[GivenImages, ...], Finish | None]:
    """The tokens of the replies to a turn, the images among them, and why the completion ends there; None: it goes on.

    Args:
        chat: renders them.
        observation: after the turn.
        last: the turn's last token.
        left: tokens that the completion may still have; replies that leave none to draw end it.
        context_left: those that the context has room for; None: any number.
    """
    if observation.done:
        return (), (), observation.finish
    room = left if context_left is None else min(left, context_left)
    try:
        suffix, images = chat.suffix(observation.messages, last=last, most=max(room, 0))
    except TooManyTokens:
        return (), (), "context"
    if len(suffix) > room:
        return (), (), "context"
    return suffix, images, "length" if len(suffix) == left else None


def _discard_stuck(agents: Agents, groups: Sequence[Group], environments: Sequence[Any] | None) -> None:
    """Never use an environment again of which a call has not ended."""
    if environments is None or agents.pools is None:
        return
    completions = (completion for group in groups for completion in group.completions)
    for environment, completion in zip(environments, completions, strict=True):
        names = {call.name for turn in completion.turns for call in turn.calls if call.problem == "timeout"}
        if any(hasattr(type(environment), name) for name in names):
            agents.pools.discard(environment)
