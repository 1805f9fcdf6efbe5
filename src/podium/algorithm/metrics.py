"""Measurements of a step as numbers under TRL's metric names.

`rollout_metrics` and `loss_metrics` are pure: records in, one number per name out. Both look at everything at once, all
ranks and all packs together: gather `rollout_rows` and `LossSums.stack()` first. `MetricsBuffer`, the one thing
here with a memory, averages what came in since the last log. `METRICS` says what every name means.

Shape letters: R rollouts of a generation round over all ranks, K reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np

from podium.algorithm.advantages import Advantages
from podium.algorithm.losses import OBJECTIVES, LossSettings, LossSums
from podium.records import ScoredGroup, is_void

Mode: TypeAlias = Literal["train", "eval", "step"]
"""`step`: numbers of training that the Trainer logs itself; they go into the run's folder alone."""


class Mean(float):
    """A statistic of `count` values of a round, by which those of several rounds are weighted."""

    count: float

    def __new__(cls, mean: float, count: float = 1.0) -> Self:
        made = super().__new__(cls, mean)
        made.count = count
        return made


class Metric(NamedTuple):
    """One row of `METRICS`."""

    unit: str
    meaning: str


METRICS: Mapping[str, Metric] = {
    "num_tokens": Metric("tokens", "Prompt and completion tokens of the run so far; a prompt counts per completion."),
    "step_time": Metric("seconds", "Time of one optimizer step, with its share of sampling and scoring."),
    "time/generate_seconds": Metric("seconds", "Sampling one generation round."),
    "time/sync_seconds": Metric(
        "seconds", "Weights on their way to an engine that has its own; only with such an engine."
    ),
    "time/reward_seconds": Metric("seconds", "The reward functions of one generation round."),
    "time/reward/<name>_seconds": Metric("seconds", "One reward function of one generation round."),
    "time/wait_seconds": Metric("seconds", "Training waited for the round ahead; only with `async_rollouts`."),
    "time/idle_seconds": Metric(
        "seconds", "Sampling waited for training, and for its weights; only with `async_rollouts`."
    ),
    "rollouts/candidates": Metric(
        "tokens", "Mean number of tokens that `top_p`, `top_k` and `min_p` left to draw from (`sampling_replay`)."
    ),
    "rollouts/staleness": Metric(
        "steps", "Optimizer steps the policy had taken since it sampled what is trained on; only with `async_rollouts`."
    ),
    "time/compare_seconds": Metric("seconds", "Log-probabilities under the sampling policy and the reference."),
    "time/train_seconds": Metric("seconds", "Forward and backward of one micro-step."),
    "time/monitor_seconds": Metric("seconds", "Recording the step before and looking at its health."),
    "health/update_ratio": Metric(
        "share", "RMS of an optimizer step's change of the weights over that of the weights."
    ),
    "health/moved_share": Metric("share", "Weights that an optimizer step changed at all."),
    "health/logp_gap_mean": Metric(
        "nats", "Mean difference of a token's log-probability between sampling and training, on the first process."
    ),
    "health/logp_gap_max": Metric(
        "nats", "Largest difference of a token's log-probability between sampling and training, on the first process."
    ),
    "health/resident_bytes": Metric("bytes", "Memory of the process."),
    "health/device_bytes": Metric("bytes", "Memory of tensors on the GPU."),
    "health/tokens_per_second": Metric(
        "tokens/s", "Prompt and completion tokens of a round over the time of its steps; at its last."
    ),
    "finding/<code>": Metric("count", "1 in the log after a finding was said; `findings.jsonl` has its words."),
    "accuracy": Metric("share", "Completions that are right, by the reward that counts as accuracy; only with one."),
    "resampled_prompts": Metric("prompts", "Prompts replaced for want of spread; only with `dynamic_sampling`."),
    "tools/call_frequency": Metric("calls", "Calls of tools per completion; only with tools."),
    "tools/failure_frequency": Metric("share", "Calls of tools that failed; 0 if there were none."),
    "tools/unknown_frequency": Metric("share", "Calls of a tool that does not exist."),
    "tools/cut_frequency": Metric("share", "Calls whose result was cut; only with `max_tool_result_tokens`."),
    "tools/lost_frequency": Metric(
        "share", "Calls during which an MCP server ended, which is started again; only where there are any."
    ),
    "tools/<name>/calls": Metric("calls", "Calls of one tool per completion."),
    "tools/<name>/failures": Metric("share", "Calls of one tool that failed."),
    "tools/<name>/seconds": Metric("seconds", "Mean time of a call of one tool."),
    "turns/mean": Metric("turns", "Turns of the policy per completion; only with tools or environments."),
    "turns/max": Metric("turns", "Turns of the policy in the completion with most."),
    "turns/reply_seconds": Metric(
        "seconds", "Mean time from the end of a turn to the answer of its tools or environment."
    ),
    "turns/cut_off_ratio": Metric(
        "share", "Completions that a limit of turns ended, or an answer of a tool or an environment that did not fit."
    ),
    "programs/seconds": Metric(
        "seconds", "Mean time of a program by itself, without waiting for answers; only with an `agent`."
    ),
    "programs/seconds_max": Metric(
        "seconds", "Time of the slowest program of the latest round, without waiting for answers."
    ),
    "programs/slowest_row": Metric(
        "row", "Position in the dataset of the row of the slowest program; none with a stream."
    ),
    "programs/failed": Metric("share", "Programs that crashed, took too long, or ended without a usable reward."),
    "programs/rejected": Metric(
        "requests", "Requests of a program that were answered with an error other than 429 (a limit), on average."
    ),
    "programs/rejected_row": Metric(
        "row",
        "Position in the dataset of the row whose program had most rejected requests, in the latest round with any.",
    ),
    "programs/given_up": Metric(
        "requests", "Requests of a program whose client went before the answer, as at its timeout, on average."
    ),
    "programs/requests": Metric("requests", "Answers that a program got, on average."),
    "programs/calls": Metric(
        "calls", "Calls of tools that a program was answered with, on average; only where its requests offer tools."
    ),
    "programs/forks": Metric("branches", "Conversations per program that did not go on with an earlier one."),
    "programs/realigned": Metric(
        "share", "Requests that continued earlier messages, but whose tokens had to be rendered again."
    ),
    "programs/capped": Metric("share", "Programs that reached `max_turns` or `max_completion_length`."),
    "turns/differing_prompts": Metric("share", "Groups whose prompts differ; only with environments."),
    "completions/mean_length": Metric("tokens", "Mean length of the completions, with their end token."),
    "completions/min_length": Metric("tokens", "Shortest completion."),
    "completions/max_length": Metric("tokens", "Longest completion."),
    "completions/clipped_ratio": Metric("share", "Completions cut off at `max_completion_length`."),
    "completions/mean_terminated_length": Metric("tokens", "Mean length of completions with an end token; 0: none."),
    "completions/min_terminated_length": Metric("tokens", "Shortest completion with an end token; 0: none."),
    "completions/max_terminated_length": Metric("tokens", "Longest completion with an end token; 0: none."),
    "rewards/<name>/mean": Metric("reward", "Mean of what one reward function returned, where it did not say None."),
    "rewards/<name>/std": Metric("reward", "Standard deviation of one reward function over all completions."),
    "rewards/<name>/failed": Metric(
        "share", "Completions on which one reward function failed; only with `on_reward_error`."
    ),
    "rewards/<name>/success_rate": Metric(
        "share", "Completions that succeed in one reward; only where its weight adapts."
    ),
    "reward_weights/<name>": Metric("weight", "Weight of one reward; only where it adapts."),
    "reward": Metric("reward", "Mean weighted sum of all reward functions."),
    "reward_std": Metric("reward", "Standard deviation of the weighted sum over all completions."),
    "frac_reward_zero_std": Metric(
        "share", "Completions in groups with equal rewards, or fewer than two: nothing can be learnt there."
    ),
    "entropy": Metric("nats", "Mean entropy of the next-token distribution over the tokens trained on."),
    "kl": Metric("nats", "Mean estimated KL divergence from the reference model; only with `beta`."),
    "teacher/kl": Metric(
        "nats", "Mean of log pi - log pi_teacher over the drawn tokens, an estimate of the KL; only with a teacher."
    ),
    "time/teacher_seconds": Metric("seconds", "Log-probabilities under the teacher; only with one."),
    "observation_cross_entropy": Metric(
        "nats", "Mean of -log pi over the tokens that tools or an environment gave; only with `observation_coef`."
    ),
    "policy_loss": Metric("loss", "The loss without the entropy bonus; only with that bonus. No sign of progress."),
    "entropy_coef": Metric("weight", "Weight of the entropy bonus; only with that bonus."),
    "aux_loss": Metric("loss", "Load-balancing loss of the router; only for mixtures of experts."),
    "clip_ratio/low_mean": Metric("share", "Ratios clipped from below: the token is already less likely than allowed."),
    "clip_ratio/low_min": Metric("share", "Ratios clipped from below, in the rollout with fewest."),
    "clip_ratio/high_mean": Metric("share", "Ratios clipped from above: the token is already likelier than allowed."),
    "clip_ratio/high_max": Metric("share", "Ratios clipped from above, in the rollout with most."),
    "clip_ratio/region_mean": Metric("share", "Ratios clipped from either side."),
    "cispo_clip_ratio": Metric("share", "Ratios above the cap, with a positive advantage; only for `cispo`."),
    "vespo/phi_seq_mean": Metric("weight", "Mean weight of the rollouts; 1 on policy; only for `vespo`."),
    "sampling/sampling_logp_difference/mean": Metric(
        "nats", "Mean difference of a trained token's log-probability between vLLM and training; only with `use_vllm`."
    ),
    "sampling/sampling_logp_difference/max": Metric(
        "nats", "Largest difference of a trained token's log-probability between vLLM and training."
    ),
    "sampling/importance_sampling_ratio/min": Metric(
        "weight",
        "Smallest weight by which the loss corrects for vLLM's log-probabilities; 0: masked. Only with `use_vllm`.",
    ),
    "sampling/importance_sampling_ratio/mean": Metric(
        "weight", "Mean weight by which the loss corrects for vLLM's log-probabilities."
    ),
    "sampling/importance_sampling_ratio/max": Metric(
        "weight", "Largest weight by which the loss corrects for vLLM's log-probabilities."
    ),
}


def describe(name: str) -> Metric | None:
    """The row of `METRICS` for a logged name, `eval_` and reward names included; None for a user's own metric.

    >>> describe("eval_rewards/accuracy/mean").unit
    'reward'
    """
    name = name.removeprefix("eval_")
    for start, end in _NAMED:
        if name.startswith(start) and name.endswith(end):
            name = f"{start}<name>{end}"
    if name.startswith("finding/"):
        name = "finding/<code>"
    return METRICS.get(name)


_NAMED = (
    *(("rewards/", f"/{what}") for what in ("mean", "std", "failed", "success_rate")),
    *(("tools/", f"/{what}") for what in ("calls", "failures", "seconds")),
    ("reward_weights/", ""),
    ("time/reward/", "_seconds"),
)
"""The parts of a metric's name before and after that of a reward function or a tool."""


# ---- rollouts ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """The completions of a generation round in numbers: all that the metrics need of them."""

    names_K: tuple[str, ...]
    num_tokens: int
    """Prompt and drawn tokens; a prompt counts per completion."""
    tokens_R: np.ndarray
    """int: drawn tokens of each completion, with the end token."""
    truncated_R: np.ndarray
    """bool: ended by reaching its token limit."""
    void_R: np.ndarray
    """bool: has a turn that is neither a call nor an answer."""
    rewards_RK: np.ndarray
    """float64, NaN for None."""

    @classmethod
    def of(cls, names_K: tuple[str, ...], rows: np.ndarray) -> Self:
        """The table of rows [R, 4 + K] that `rollout_rows` made, of all ranks."""
        return cls(
            names_K=names_K,
            num_tokens=int(rows[:, :2].sum()),
            tokens_R=rows[:, 1].astype(int),
            truncated_R=rows[:, 2].astype(bool),
            void_R=rows[:, 3].astype(bool),
            rewards_RK=rows[:, 4:],
        )


def rollout_rows(scored: ScoredGroup) -> np.ndarray:
    """A float64 row for each completion of a group [G, 4 + K], to be gathered from all ranks: tokens of its prompt,
    tokens that were drawn, whether it was cut off, whether a turn is void, rewards."""
    rows = [
        [
            len((completion.prompt or scored.group.prompt).token_ids),
            completion.num_drawn,
            completion.finish == "length",
            any(is_void(turn.message) for turn in completion.turns),
        ]
        for completion in scored.group.completions
    ]
    return np.column_stack([np.array(rows, np.float64).reshape(-1, 4), scored.rewards_GK])


RIGHT = 1.0
"""Least reward with which a function that tells right from wrong means right."""


def right(rewards: np.ndarray) -> np.ndarray:
    """1 or 0; NaN stays."""
    return np.where(np.isnan(rewards), np.nan, (rewards >= RIGHT).astype(float))


def accuracy_name(names: Sequence[str]) -> str | None:
    """The reward function whose name suggests right or wrong.

    >>> accuracy_name(["answer_format", "answer_correct"]), accuracy_name(["brevity"])
    ('answer_correct', None)
    """
    words = ("accuracy", "correct", "match", "answer")
    return next((name for word in words for name in names if word in name and "format" not in name), None)


def rollout_metrics(table: RolloutTable, advantages: Advantages, accuracy: str | None = None) -> dict[str, float]:
    """`completions/*`, `rewards/*`, `reward`, `reward_std`, `frac_reward_zero_std` of a whole round.

    `accuracy`: the reward function whose share of right completions is a metric, too.
    """
    known = table.names_K.index(accuracy) if accuracy in table.names_K else None
    rewards = {
        f"rewards/{name}/{what}": of(table.rewards_RK[:, k])
        for k, name in enumerate(table.names_K)
        for what, of in (("mean", _mean), ("std", nanstd))
    }
    return {
        **_lengths(table.tokens_R, "length"),
        "completions/clipped_ratio": nanmean(table.truncated_R),
        **_lengths(table.tokens_R[~table.truncated_R], "terminated_length"),
        **rewards,
        **({} if known is None else {"accuracy": _mean(right(table.rewards_RK[:, known]))}),
        "reward": _mean(advantages.reward_PG),
        "reward_std": nanstd(advantages.reward_PG),
        "frac_reward_zero_std": nanmean(advantages.zero_std_PG),
    }


def _lengths(tokens: np.ndarray, which: str) -> dict[str, float]:
    count = len(tokens)
    if not count:
        tokens = np.zeros(1)  # TRL says 0 where no completion ended by itself
    return {
        f"completions/{name}_{which}": Mean(float(getattr(tokens, name)()), count) for name in ("mean", "min", "max")
    }


def _mean(x: np.ndarray) -> Mean:
    return Mean(nanmean(x), float((~np.isnan(x)).sum()))


def nanmean(x: np.ndarray) -> float:
    """Mean of what is not NaN; NaN when nothing is left."""
    known = np.asarray(x, dtype=np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


def nanstd(x: np.ndarray) -> float:
    """Standard deviation (n - 1) of what is not NaN; NaN when fewer than two are left."""
    known = np.asarray(x, dtype=np.float64)
    known = known[~np.isnan(known)]
    return float(known.std(ddof=1)) if known.size > 1 else math.nan


# ---- turns ----


class Counted(NamedTuple):
    """Turns and calls of one completion: all that metrics, and other ranks, need of them."""

    turns: int
    cut_off: bool
    """Whether a limit of turns or tokens ended it before its turn was answered."""
    reply_seconds: float
    calls: tuple[tuple[str, str, bool, float], ...]
    """Name, problem, whether its result was cut, seconds."""


def counted(scored: ScoredGroup) -> list[Counted]:
    """The counts of a group's completions."""
    return [
        Counted(
            turns=sum(len(x.turns) for x in completion.sequences),
            cut_off=completion.finish in ("turns", "context"),
            reply_seconds=sum(turn.reply_seconds for turn in completion.turns),
            calls=tuple(
                (x.name, x.problem if x.failed else "", x.cut > 0, x.seconds) for t in completion.turns for x in t.calls
            ),
        )
        for completion in scored.group.completions
    ]


def turn_metrics(completions: Sequence[Counted], tools: Sequence[str], *, cuts: bool) -> dict[str, float]:
    """`turns/*` and `tools/*` of a whole round.

    Args:
        completions: of all ranks.
        tools: names of the tools; calls of other names are counted together.
        cuts: whether results may be cut.
    """
    turns = np.array([float(completion.turns) for completion in completions] or [math.nan])
    values = {
        "turns/mean": float(turns.mean()),
        "turns/max": float(turns.max()),
        "turns/reply_seconds": _ratio(sum(completion.reply_seconds for completion in completions), float(turns.sum())),
        "turns/cut_off_ratio": nanmean(np.array([completion.cut_off for completion in completions])),
    }
    if not tools:
        return values
    calls = [call for completion in completions for call in completion.calls]
    values |= {
        "tools/call_frequency": len(calls) / max(len(completions), 1),
        "tools/failure_frequency": _ratio(sum(bool(problem) for _, problem, _, _ in calls), len(calls)),
        "tools/unknown_frequency": _ratio(sum(problem == "unknown" for _, problem, _, _ in calls), len(calls)),
    }
    if cuts:
        values["tools/cut_frequency"] = _ratio(sum(cut for _, _, cut, _ in calls), len(calls))
    if lost := sum(problem == "lost" for _, problem, _, _ in calls):
        values["tools/lost_frequency"] = lost / len(calls)
    for name in tools:
        own = [call for call in calls if call[0] == name]
        values[f"tools/{name}/calls"] = len(own) / max(len(completions), 1)
        if own:
            values[f"tools/{name}/failures"] = _ratio(sum(bool(problem) for _, problem, _, _ in own), len(own))
            values[f"tools/{name}/seconds"] = _ratio(sum(seconds for *_, seconds in own), len(own))
    return values


def _ratio(part: float, whole: float) -> Mean:
    """0 of nothing, as in TRL."""
    return Mean(part / whole if whole else 0.0, whole)


# ---- losses ----


def loss_metrics(
    sums: LossSums, settings: LossSettings, *, has_entropy_bonus: bool = False, entropy_coef: float | None = None
) -> dict[str, float]:
    """TRL's loss metrics of an optimizer step (TRL averages micro-batches; here every token counts the same).

    NaN where nothing was trained on. The only copy from the device to the host is here. `sums` are of all packs of all
    ranks; with an entropy bonus `policy_loss` is something else than the loss.
    """
    names = ["entropy", *(["kl"] if settings.beta else []), *(["policy_loss"] if has_entropy_bonus else [])]
    names += ["observation_cross_entropy"] if settings.observation_coef else []
    names += [name for name in LOSS_METRICS if name.startswith("sampling/")] if settings.correction is not None else []
    total = dict(zip(LossSums.__dataclass_fields__, sums.stack().tolist(), strict=True))
    values = {name: LOSS_METRICS[name](total) for name in (*names, *OBJECTIVES[settings.loss_type].metrics)}
    return values if entropy_coef is None else {**values, "entropy_coef": entropy_coef}


def mean_kept_entropy(sums: LossSums) -> float:
    """Mean entropy over the tokens that the policy term keeps: what `EntropyControl` steers by."""
    return float(sums.kept_entropy) / max(float(sums.kept_tokens), 1.0)


def _share(*parts: str) -> Callable[[Mapping[str, float]], float]:
    *summed, count = parts
    return lambda total: sum(total[part] for part in summed) / total[count] if total[count] else math.nan


def _finite(name: str) -> Callable[[Mapping[str, float]], float]:
    return lambda total: total[name] if math.isfinite(total[name]) else math.nan


LOSS_METRICS: Mapping[str, Callable[[Mapping[str, float]], float]] = {
    "entropy": _share("entropy", "tokens"),
    "kl": _share("kl", "tokens"),
    "observation_cross_entropy": _share("observed_nats", "observed"),
    "policy_loss": lambda total: total["policy_loss"],
    "clip_ratio/low_mean": _share("low_clipped", "ratios"),
    "clip_ratio/low_min": _finite("low_min"),
    "clip_ratio/high_mean": _share("high_clipped", "ratios"),
    "clip_ratio/high_max": _finite("high_max"),
    "clip_ratio/region_mean": _share("low_clipped", "high_clipped", "ratios"),
    "cispo_clip_ratio": _share("cap_clipped", "ratios"),
    "vespo/phi_seq_mean": _share("phi", "ratios"),
    "sampling/sampling_logp_difference/mean": _share("gap", "gap_tokens"),
    "sampling/sampling_logp_difference/max": _finite("gap_max"),
    "sampling/importance_sampling_ratio/min": _finite("weight_min"),
    "sampling/importance_sampling_ratio/mean": _share("weight", "weights"),
    "sampling/importance_sampling_ratio/max": _finite("weight_max"),
}


# ---- the window between two logs ----


LATEST = ("programs/seconds_max", "programs/slowest_row", "programs/rejected_row")
"""Numbers of which a mean says nothing: the last one stands for the window."""


@dataclass(slots=True)
class MetricsBuffer:
    """Numbers since the last log, training and evaluation apart.

    A log takes the mean of what is not NaN, or the smallest or largest number where the metric is that: a reward
    function that had nothing to say for one batch does not spoil the window. Values left at the end of a run go into
    its summary.
    """

    _windows: dict[Mode, dict[str, list[Mean]]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    _step: dict[str, list[Mean]] = field(default_factory=dict)
    """The same of training since the last optimizer step, for the run's folder."""

    def add(self, mode: Mode, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in LATEST:
                self.replace(mode, {name: value})
                continue
            counted = value if isinstance(value, Mean) else Mean(value)
            if mode != "step":
                self._windows[mode].setdefault(name, []).append(counted)
            if mode != "eval":
                self._step.setdefault(name, []).append(counted)

    def replace(self, mode: Mode, values: Mapping[str, float]) -> None:
        """Values that count up, such as `num_tokens`: the last one stands for the window."""
        self._windows[mode].update({name: [Mean(value)] for name, value in values.items()})
        if mode == "train":
            self._step.update({name: [Mean(value)] for name, value in values.items()})

    def take_step(self) -> dict[str, float]:
        """The numbers of the optimizer step that has ended; NaN where all was NaN."""
        step = self._step
        self._step = {}
        return {name: _of_all(name, values) for name, values in step.items()}

    def flush(self, mode: Mode) -> dict[str, float | None]:
        """The numbers, under `eval_` names in evaluation; None where all was NaN. Empties the window."""
        window = self._windows[mode]
        self._windows[mode] = {}
        prefix = "eval_" if mode == "eval" else ""
        whole = {prefix + name: _of_all(name, values) for name, values in window.items()}
        return {name: None if math.isnan(value) else value for name, value in whole.items()}


def _of_all(name: str, values: Sequence[Mean]) -> float:
    """A metric of several rounds or steps from the metric of each; NaN where all are."""
    known = [value for value in values if not math.isnan(value)]
    known = [value for value in known if value.count] or known[:1]
    words = name.rpartition("/")[2].split("_") if name in METRICS else []
    if not known:
        return math.nan
    if "min" in words:
        return float(min(known))
    if "max" in words:
        return float(max(known))
    return float(np.average(known, weights=[value.count or 1.0 for value in known]))
