"""Generation rounds: the prompts that each draws, the records kept of it, and the part that each micro-step trains on.

TRL's arithmetic (B = per-device batch, S = steps per generation, mu = iterations, W ranks): a round draws B W S / G
prompts and is trained on for S mu micro-steps, each with the share of B W completions. The order of prompts is a pure
function of (seed, epoch).

Shape letters: P prompts of a round over all ranks, G completions per prompt, R = P G rollouts, S shares of a round.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from podium.algorithm.losses import LossInputs
from podium.errors import ConfigError, DataError, Finding
from podium.errors.texts import named_list
from podium.models.forward import TokenLogps
from podium.models.packing import Pack
from podium.records import Sample, ScoredGroup


class RoundKey(NamedTuple):
    """Which round: number `number` of epoch `epoch`."""

    epoch: int
    number: int


class MicroStep(NamedTuple):
    """One micro-step: share number `share` of a round."""

    round: RoundKey
    share: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arithmetic of batches."""

    prompts_per_round: int
    num_generations: int
    shares: int
    """S: micro-steps that go once through a round."""
    iterations: int
    """mu: how often they do."""
    accumulation: int
    """Micro-steps of an optimizer step."""
    ranks: int
    rank: int

    @property
    def micro_steps_per_round(self) -> int:
        """S mu."""
        return self.shares * self.iterations

    @property
    def reuses_rollouts(self) -> bool:
        """Whether the policy moves while a round is trained on, so that its ratios are not all 1."""
        return self.accumulation % self.micro_steps_per_round != 0

    def num_steps(self, args: Any, num_micro_steps: int) -> int:
        """Optimizer steps of a run with so many micro-steps in an epoch, as the Trainer counts them."""
        of_epoch = max(-(-num_micro_steps // self.accumulation), 1)
        return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)

    def micro_step(self, epoch: int, index: int) -> MicroStep:
        """Micro-step number `index` of an epoch. Raises `ConfigError` for what an own loader yields in its place."""
        try:
            number, step = divmod(operator.index(index), self.micro_steps_per_round)
        except TypeError:
            raise ConfigError(
                f"get_train_dataloader gave a loader that yields an object of type {type(index).__name__}, "
                "and training takes numbers of micro-steps: rows are looked up in train_dataset when a "
                "round is drawn.",
                fix="set train_dataset to the rows, with shuffle_dataset=False for their own order; return "
                "what super().get_train_dataloader() yields, in any order",
                kind=type(index).__name__,
            ) from None
        return MicroStep(RoundKey(epoch, number), step % self.shares)

    def assign_to_ranks(self, num_tokens_P: Sequence[int]) -> list[list[int]]:
        """The prompts of a round that each rank samples, from the P prompts' lengths; the same on every rank.

        Every share is assigned by itself, its longest prompts first, each to the rank that has fewest prompts of the
        share, then of the round, then fewest tokens (Graham 1969, "longest processing time"). Lengths of completions
        are not known yet.

        >>> plan = Plan(prompts_per_round=4, num_generations=2, shares=1, iterations=1, accumulation=1, ranks=2, rank=0)
        >>> plan.assign_to_ranks([100, 90, 20, 10])
        [[0, 3], [1, 2]]
        """
        assigned: list[list[int]] = [[] for _ in range(self.ranks)]
        tokens = [0] * self.ranks
        for share in range(self.shares):
            here = [p for p in range(self.prompts_per_round) if self.share_of(p, 0) == share]
            in_share = [0] * self.ranks
            for prompt in sorted(here, key=lambda p: (-num_tokens_P[p], p)):
                rank = min(range(self.ranks), key=lambda r: (in_share[r], len(assigned[r]), tokens[r], r))
                assigned[rank].append(prompt)
                in_share[rank] += 1
                tokens[rank] += num_tokens_P[prompt]
        return [sorted(prompts) for prompts in assigned]

    def deal(self, tokens: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """Decide which rank trains on each group, by its tokens; the same on every rank.

        The groups of every share are dealt by themselves, the largest first, each to the rank with fewest tokens of the
        share, then of the round (Graham 1969, "longest processing time").

        Args:
            tokens: of the part of each group that is trained on, by share and place in the round.

        Returns:
            Ranks, by the same keys.

        >>> plan = Plan(prompts_per_round=4, num_generations=2, shares=1, iterations=1, accumulation=1, ranks=2, rank=0)
        >>> plan.deal({(0, 0): 900, (0, 1): 400, (0, 2): 300, (0, 3): 100})
        {(0, 0): 0, (0, 1): 1, (0, 2): 1, (0, 3): 1}
        """
        ranks: dict[tuple[int, int], int] = {}
        of_round = [0] * self.ranks
        for share in range(self.shares):
            of_share = [0] * self.ranks
            here = [key for key in tokens if key[0] == share]
            for key in sorted(here, key=lambda key: (-tokens[key], key)):
                rank = min(range(self.ranks), key=lambda r: (of_share[r], of_round[r], r))
                ranks[key] = rank
                of_share[rank] += tokens[key]
                of_round[rank] += tokens[key]
        return ranks

    def share_of(self, prompt: int, completion: int) -> int:
        """The share that completion g of prompt p of a round belongs to: consecutive, groups whole where they fit."""
        rollouts = self.prompts_per_round * self.num_generations
        return (prompt * self.num_generations + completion) * self.shares // rollouts


class PromptOrder:
    """Rows of the training set in the order they are drawn. A stream is read on and on; a set is permuted per epoch.

    With a column to balance, each round draws its rows by weight instead.
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, shuffle: bool, seed: int, max_steps: int, balance: str | None = None
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.shuffle = shuffle
        self.seed = seed
        self.is_stream = not hasattr(dataset, "__len__")
        assert max_steps > 0 or not self.is_stream, "refused before: a stream's epochs cannot be counted"
        self.num_micro_steps = (
            max_steps * plan.accumulation
            if self.is_stream
            else len(dataset) // plan.prompts_per_round * plan.micro_steps_per_round
        )
        self._balance_N = None if balance is None or self.is_stream else balanced(dataset, balance)
        self._stream: Iterator[Mapping[str, Any]] | None = None
        self._read = 0

    def after(self, key: RoundKey, max_steps: int) -> RoundKey | None:
        """The round after `key` in a run of `max_steps` optimizer steps; None: it is the last.

        An epoch ends with a step, which may have fewer micro-steps than others.
        """
        plan = self.plan
        micro_steps = self.num_micro_steps
        epoch, step = divmod(max_steps - 1, -(-micro_steps // plan.accumulation))
        last = plan.micro_step(epoch, min((step + 1) * plan.accumulation, micro_steps) - 1).round
        ends = (key.number + 1) * plan.micro_steps_per_round >= micro_steps
        following = RoundKey(key.epoch + 1, 0) if ends else RoundKey(key.epoch, key.number + 1)
        return following if following <= last else None

    def rows(self, key: RoundKey, prompts: Sequence[int]) -> list[tuple[int, Mapping[str, Any]]]:
        """(position in the dataset, row) of the given prompts of a round; -1 for the rows of a stream."""
        first = key.number * self.plan.prompts_per_round
        if self.is_stream:
            window = self._next(first, self.plan.prompts_per_round)
            return [(-1, window[prompt]) for prompt in prompts]
        count = len(self.dataset)
        if self._balance_N is not None:
            rng = np.random.default_rng([self.seed, key.epoch, key.number, 2])
            chosen = weighted_draw(rng, self._balance_N, self.plan.prompts_per_round)[list(prompts)]
        else:
            rng = np.random.default_rng([self.seed, key.epoch])
            order = rng.permutation(count) if self.shuffle else np.arange(count)
            chosen = order[[first + prompt for prompt in prompts]]
        return [(i, self.dataset[i]) for i in chosen.tolist()]

    def fresh(self, key: RoundKey, attempt: int, prompts: Sequence[int]) -> list[tuple[int, Mapping[str, Any]]]:
        """Rows to replace the given prompts of a round with, from the whole dataset: a pure function of the place."""
        order = np.random.default_rng([self.seed, key.epoch, key.number, 1]).permutation(len(self.dataset))
        first = attempt * self.plan.prompts_per_round
        return [(i, self.dataset[i]) for i in order[[(first + p) % len(order) for p in prompts]].tolist()]

    def _next(self, first: int, count: int) -> list[Mapping[str, Any]]:
        """Rows `first` to `first + count` of the endless stream; going back means reading it again from its start."""
        if self._stream is None or first < self._read:
            self._stream = self._endless()
            self._read = 0
        for _ in range(first - self._read):
            next(self._stream)
        window = [next(self._stream) for _ in range(count)]
        self._read = first + count
        return window

    def _endless(self) -> Iterator[Mapping[str, Any]]:
        dataset = self.dataset
        if self.shuffle and hasattr(dataset, "shuffle"):
            dataset = dataset.shuffle(seed=self.seed)
        for epoch in range(1 << 30):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            empty = True
            for row in dataset:
                empty = False
                yield row
            if empty:
                raise DataError("The streamed train_dataset has no rows.")


def no_column_to_balance(column: str, names: Sequence[str]) -> ConfigError:
    """The error of a `balance_column` that is none of the names of columns."""
    return ConfigError(
        f"balance_column: {column}, and the rows have no such column; they have {named_list(names)}.",
        code="C064",
        fix="Name one of them, such as the one with the labels.",
        settings=("balance_column",),
        column=column,
        columns=names,
    )


def balanced(rows: Iterable[Mapping[str, Any]], column: str) -> np.ndarray:
    """Weights of the rows that make every value of a column equally likely, float64 [N], the largest 1.

    >>> balanced([{"answer": "no"}, {"answer": "yes"}, {"answer": "no"}], "answer")
    array([0.5, 1. , 0.5])

    Raises:
        ConfigError: a row has no such column.
    """
    values = []
    for row in rows:
        if column not in row:
            raise no_column_to_balance(column, list(row))
        values.append(str(row[column]))
    counts = Counter(values)
    least = min(counts.values(), default=1)
    return np.array([least / counts[value] for value in values])


def weighted_draw(rng: np.random.Generator, weights_N: np.ndarray, count: int) -> np.ndarray:
    """`count` different rows, each next one with a chance in proportion to its weight among those that are left
    (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    >>> sorted(weighted_draw(np.random.default_rng(0), np.array([1.0, 1e-9, 1.0]), 2).tolist())
    [0, 2]
    """
    return np.argsort(rng.exponential(size=len(weights_N)) / weights_N, kind="stable")[:count]


# ---- records of a round ----

NOT_SAVED = {"saved": False}
"""Metadata of a field that a checkpoint leaves out."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Numbers that a function has measured, with their names, for its caller to log."""

    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def add(self, values: Mapping[str, float]) -> None:
        self.metrics.extend(values.items())

    def extend(self, other: Measurements) -> None:
        self.metrics.extend(other.metrics)
        self.seconds.extend(other.seconds)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Seconds inside this context."""
        start = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - start))

    def times(self) -> dict[str, float]:
        """The metrics of seconds: what was done several times, such as sampling for other groups, counts as a whole."""
        whole: dict[str, float] = {}
        for name, value in self.seconds:
            whole[f"time/{name}"] = whole.get(f"time/{name}", 0.0) + value
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRound:
    """A round as this process sampled and scored it, before processes compare."""

    key: RoundKey
    policy_step: int
    """Optimizer steps the sampling weights had taken."""
    places: tuple[int, ...]
    """Positions of this process's prompts in the round."""
    scored: tuple[ScoredGroup, ...]
    measured: Measurements
    """By reward functions and clocks."""
    num_fresh: int
    """Prompts that were drawn to replace groups of equal rewards."""
    written: bool = field(default=False, metadata=NOT_SAVED)
    """Whether the weights changed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass, with the counts that its loss is divided by.

    A round has them with counts of their own; `micro_batches` gives them those of their optimizer step.
    """

    samples: tuple[Sample, ...]
    """This rank's, without those that provably change nothing; the counts are with them."""
    num_rollouts: float
    num_tokens: float
    """Loss tokens of all ranks."""
    local_tokens: int = 0
    """Loss tokens of this micro-batch on this rank."""
    step_tokens: int = 0
    """Loss tokens of the optimizer step over all ranks; `num_tokens` is the same but for `bnpo`."""
    num_observed: float = 0
    """Given tokens of all ranks that are to be predicted; 0 without `observation_coef`."""
    micro_steps: int = 1
    is_last: bool = True
    """Whether it is the last of its optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A generation round: what was sampled and scored, its advantages, and the micro-batches that train on it.

    A checkpoint has `key` and `micro_batches` alone: everything else is recorded when the round is drawn.
    """

    key: RoundKey
    micro_batches: tuple[MicroBatch, ...]
    """Number s is trained on in micro-steps s, s + S, ... of the round."""
    scored: tuple[ScoredGroup, ...] = field(default=(), metadata=NOT_SAVED)
    """This process's groups."""
    advantages: Sequence[np.ndarray] = field(default=(), metadata=NOT_SAVED)
    """[G] of each of them."""
    kept: Sequence[np.ndarray] = field(default=(), metadata=NOT_SAVED)
    """bool [G] of each: the completions that are trained on."""
    num_tokens: int = field(default=0, metadata=NOT_SAVED)
    """Tokens of all processes."""
    measured: Measurements = field(default_factory=Measurements, metadata=NOT_SAVED)
    findings: tuple[Finding, ...] = field(default=(), metadata=NOT_SAVED)


def micro_batches(batches: Sequence[MicroBatch], *, per_micro_batch: bool, ranks: int) -> list[MicroBatch]:
    """The micro-batches of one optimizer step with its counts.

    With `per_micro_batch` (TRL's `bnpo`) tokens are those of the micro-batch on this rank, times the number of
    micro-batches that the step sums.
    """
    rollouts = sum(batch.num_rollouts for batch in batches)
    tokens = sum(int(batch.num_tokens) for batch in batches)
    observed = sum(batch.num_observed for batch in batches)
    return [
        replace(
            batch,
            num_rollouts=rollouts,
            num_tokens=max(batch.local_tokens, 1) * len(batches) * ranks if per_micro_batch else tokens,
            step_tokens=tokens,
            num_observed=observed,
            micro_steps=len(batches),
            is_last=i == len(batches) - 1,
        )
        for i, batch in enumerate(batches)
    ]


def loss_inputs(
    out: TokenLogps,
    packed: Pack,
    batch: MicroBatch,
    keep_N: Tensor | None = None,
    num_entropy_tokens: float | None = None,
    *,
    other_sampler: bool,
) -> LossInputs:
    """Inputs of the loss. `other_sampler`: see `settings.has_other_sampler`."""
    return LossInputs(
        logps_N=out.logps_N,
        entropy_N=out.entropy_N,
        advantages_R=packed.advantages_R,
        token_advantages_N=packed.advantages_N,
        token_penalties_N=packed.penalties_N,
        rollout_N=packed.rollout_N,
        num_rollouts=batch.num_rollouts,
        num_tokens=batch.num_tokens,
        old_logps_N=packed.old_logps_N,
        ref_logps_N=packed.ref_logps_N,
        sampled_logps_N=packed.sampled_logps_N if other_sampler else None,
        keep_N=keep_N,
        num_entropy_tokens=batch.step_tokens if num_entropy_tokens is None else num_entropy_tokens,
        observed_logps_M=out.observed_logps_M,
        num_observed=batch.num_observed,
    )


def cut_round(
    samples: Sequence[Sample],
    prompts: Sequence[int],
    counted_PG: np.ndarray,
    plan: Plan,
    *,
    rollouts_PG: np.ndarray | None = None,
    observed_PG: np.ndarray | None = None,
) -> tuple[MicroBatch, ...]:
    """Cut a round into its S micro-batches.

    Args:
        samples: those of this rank that are trained on.
        prompts: places in the round of all prompts of this rank.
        counted_PG: loss tokens of every completion of every rank; 0 where it is masked.
        plan: the arithmetic.
        rollouts_PG: samples of every completion of every rank; None: one each.
        observed_PG: given tokens of every completion of every rank that are to be predicted; None: none.
    """
    rollouts_PG = np.ones(counted_PG.shape, int) if rollouts_PG is None else rollouts_PG
    observed_PG = np.zeros(counted_PG.shape, int) if observed_PG is None else observed_PG
    share_PG = np.array([[plan.share_of(p, g) for g in range(counted_PG.shape[1])] for p in range(len(counted_PG))])
    mine = np.zeros(counted_PG.shape[0], bool)
    mine[list(prompts)] = True
    return tuple(
        MicroBatch(
            samples=tuple(sample for sample in samples if share_PG[sample.rollout] == s),
            num_rollouts=int(rollouts_PG[share_PG == s].sum()),
            num_tokens=int(counted_PG[share_PG == s].sum()),
            num_observed=int(observed_PG[share_PG == s].sum()),
            local_tokens=int(counted_PG[mine][share_PG[mine] == s].sum()),
        )
        for s in range(plan.shares)
    )
