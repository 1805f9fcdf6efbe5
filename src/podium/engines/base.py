"""The interface of rollout engines and of what happens between turns, and the making of groups from sampled ids."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.models.forward import Precision
from podium.models.turns import parse_turn, parses_turns
from podium.records import Completion, Finish, Group, Prompt, SamplingSettings, Turn

Sampled = tuple[list[int], list[float]]
"""Token ids of one completion, and the log-probabilities of those that were drawn."""


class Answer(NamedTuple):
    """Tokens that follow a turn of completion `completion` of prompt `prompt`, both by their places."""

    prompt: int
    completion: int
    token_ids: tuple[int, ...]
    """Replies and the beginning of the next turn, behind the last token that was drawn."""
    over: bool
    """Whether the completion ends here, without another turn."""


class Episodes(Protocol):
    """Completions of several turns between their turns: tools run, environments answer."""

    @abstractmethod
    def ended(self, prompt: int, completion: int, token_ids: Sequence[int]) -> None:
        """Begin with what follows a turn that has ended; returns at once.

        Args:
            prompt: index into the prompts given to `generate`.
            completion: index into the prompt's completions.
            token_ids: all tokens of the completion so far, given ones included.
        """

    @abstractmethod
    def answers(self, *, at_least: int) -> list[Answer]:
        """The answers that were not taken yet, by prompt and completion; waits until there are `at_least` so many."""

    @abstractmethod
    def finished(self, prompt: int, completion: int) -> tuple[tuple[Turn, ...], Finish]:
        """The turns of a completion, and why it ended."""


class RolloutEngine(Protocol):
    """Turns prompts into groups of completions; a class inherits from it what engines are and do by default."""

    name: str = ""
    """As `rollout_engine` names it."""
    own_weights: bool = False
    """Whether it samples from a copy of the policy, which only `sync` renews, so that the policy may move meanwhile."""
    processed_logps: bool = False
    """Whether its log-probabilities are those of the distribution that is drawn from, after all filters."""
    casts_weights: bool = False
    """Whether it computes in half precision whatever training does."""
    precision: Precision = contextlib.nullcontext

    tokenizer: PreTrainedTokenizerBase

    def generate(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        policy_step: int = 0,
        episodes: Episodes | None = None,
    ) -> list[Group]:
        """One group per prompt, in order, sampled from the weights as they are now.

        `episodes` continues completions after a turn; None: every completion is one turn.
        """
        if not prompts:
            return []
        sampled = self.sample(prompts, settings) if episodes is None else self.converse(prompts, settings, episodes)
        return make_groups(prompts, sampled, self.tokenizer, settings, policy_step, episodes)

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[list[Sampled]]:
        """One turn of every completion of every prompt, in order."""

    def converse(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, episodes: Episodes
    ) -> list[list[Sampled]]:
        """Completions of several turns: rounds of `sample`, each over the prompts with all tokens so far."""
        first = self.sample(prompts, settings)
        sampled = [[(list(token_ids), list(logps)) for token_ids, logps in group] for group in first]
        ended = [(p, g) for p, group in enumerate(sampled) for g in range(len(group))]
        while self.any_continues(len(ended)):
            for p, g in ended:
                episodes.ended(p, g, sampled[p][g][0])
            continued = []
            for answer in episodes.answers(at_least=len(ended)):
                token_ids, _ = sampled[answer.prompt][answer.completion]
                token_ids.extend(answer.token_ids)
                if not answer.over:
                    continued.append((answer, continuation(prompts[answer.prompt], answer.completion, token_ids)))
            turns = self.sample([prompt for _, prompt in continued], replace(settings, num_completions=1))
            for (answer, _), [(new_ids, new_logps)] in zip(continued, turns, strict=True):
                token_ids, logps = sampled[answer.prompt][answer.completion]
                token_ids += new_ids
                logps += new_logps
            ended = [(answer.prompt, answer.completion) for answer, _ in continued]
        return sampled

    def any_continues(self, count: int) -> bool:
        """Whether this process has completions to continue, `count` of them, or one that must call `sample` with it."""
        return count > 0

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take the policy's weights as they are now, after `version` optimizer steps; until the next call they stay."""
        return

    def interrupt(self) -> None:
        """Have `generate`, in another thread, raise `Interrupted` soon and until the next `sync`, if it can."""
        return


class Interrupted(Exception):
    """Sampling was given up: its completions are no longer wanted."""


def continuation(prompt: Prompt, completion: int, token_ids: Sequence[int]) -> Prompt:
    """A prompt with the tokens of one of its completions so far, to draw the next turn from."""
    return replace(
        prompt,
        token_ids=(*prompt.token_ids, *token_ids),
        completion=prompt.completion + completion,
        earlier=prompt.earlier + len(token_ids),
    )


def make_groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Sampled]],
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    policy_step: int,
    episodes: Episodes | None = None,
) -> list[Group]:
    """Groups from `sampled[p][g] = (token_ids, logps)`.

    Without `episodes` a completion that ends in an end token has stopped; else its episode says why it ended. If the
    tokenizer has a response template, an answer in a conversation is parsed, as in TRL: its content is without the
    reasoning.
    """
    ids = [token_ids for group in sampled for token_ids, _ in group]
    texts = iter(tokenizer.batch_decode(ids, skip_special_tokens=True))

    def completion(p: int, g: int, token_ids: list[int], logps: list[float]) -> Completion:
        stopped: Finish = "stop" if token_ids[-1] in settings.end_ids else "length"
        turns, finish = ((), stopped) if episodes is None else episodes.finished(p, g)
        if episodes is None and prompts[p].is_chat and parses_turns(tokenizer):
            message = parse_turn(tokenizer, token_ids, prefix=prompts[p].token_ids)
            turns = (Turn(start=0, stop=len(token_ids), message=message),)
        return Completion(
            token_ids=tuple(token_ids),
            logps=tuple(logps),
            finish=finish,
            text=next(texts),
            policy_step=policy_step,
            turns=turns,
        )

    return [
        Group(prompt=prompt, completions=tuple(completion(p, g, *each) for g, each in enumerate(group)))
        for p, (prompt, group) in enumerate(zip(prompts, sampled, strict=True))
    ]
