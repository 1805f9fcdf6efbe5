"""Metric names, their meanings and the window between two logs; their values against TRL's are in tests/parity."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import trl
from trl.trainer.utils import nanstd as trl_nanstd

from podium.algorithm.advantages import AdvantageSettings, advantages
from podium.algorithm.losses import OBJECTIVES, LossInputs, LossSettings, policy_loss
from podium.algorithm.metrics import (
    LOSS_METRICS,
    METRICS,
    Counted,
    MetricsBuffer,
    RolloutTable,
    describe,
    loss_metrics,
    nanmean,
    nanstd,
    rollout_metrics,
    rollout_rows,
    turn_metrics,
)
from podium.records import Completion, Group, Prompt, ScoredGroup

NAMES = ("a", "b")


def scored(prompt_length: int, rows: list[tuple[int, str, float, float]]) -> ScoredGroup:
    """A group of completions given as (length, finish, reward a, reward b)."""
    prompt = Prompt(id=0, row=0, token_ids=(1,) * prompt_length, text="", content="")
    completions = tuple(
        Completion(token_ids=(2,) * length, logps=(0.0,) * length, finish=finish, text="", policy_step=0)
        for length, finish, *_ in rows
    )
    rewards = np.array([row[2:] for row in rows], dtype=float).reshape(-1, 2)
    return ScoredGroup(group=Group(prompt=prompt, completions=completions), names_K=NAMES, rewards_GK=rewards)


GROUPS = [
    scored(3, [(2, "stop", 1.0, math.nan), (8, "length", 0.0, 0.5)]),
    scored(5, [(4, "stop", 0.0, math.nan), (6, "stop", 0.0, math.nan)]),
]


def rollout_table(*groups: ScoredGroup) -> RolloutTable:
    return RolloutTable.of(NAMES, np.concatenate([rollout_rows(group) for group in groups]))


def test_rollout_metrics_by_hand() -> None:
    table = rollout_table(*GROUPS)
    got = rollout_metrics(table, advantages(table.rewards_RK.reshape(2, 2, 2), AdvantageSettings(weights_K=np.ones(2))))
    assert got == pytest.approx(
        {
            "completions/mean_length": 5.0,
            "completions/min_length": 2.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 4.0,
            "completions/min_terminated_length": 2.0,
            "completions/max_terminated_length": 6.0,
            "rewards/a/mean": 0.25,
            "rewards/a/std": 0.5,
            "rewards/b/mean": 0.5,
            "rewards/b/std": math.nan,
            "reward": 0.375,
            "reward_std": 0.47871355,
            "frac_reward_zero_std": 0.5,
        },
        nan_ok=True,
    )
    assert table.num_tokens == 2 * 3 + 2 * 5 + 20


def test_terminated_lengths_are_zero_where_nothing_ended() -> None:
    table = rollout_table(scored(1, [(4, "length", 0, 0), (4, "length", 1, 0)]))
    got = rollout_metrics(table, advantages(table.rewards_RK[None], AdvantageSettings(weights_K=np.ones(2))))
    assert {got[f"completions/{which}_terminated_length"] for which in ("mean", "min", "max")} == {0.0}
    assert got["completions/clipped_ratio"] == 1.0


def test_ranks_are_put_together_from_their_rows() -> None:
    """Two ranks with a group each gather the table that one rank with both would have; one may have none."""
    rows = [rollout_rows(group) for group in GROUPS]
    nothing = rollout_rows(scored(1, []))
    together = RolloutTable.of(NAMES, np.concatenate([*rows, nothing]))
    whole = rollout_table(*GROUPS)
    assert together.num_tokens == whole.num_tokens
    assert together.truncated_R.dtype == bool
    for name in ("tokens_R", "truncated_R", "void_R", "rewards_RK"):
        np.testing.assert_array_equal(getattr(together, name), getattr(whole, name))


def output_of(loss_type: str):
    x = LossInputs(
        logps_N=torch.tensor([-1.0, -1.0, -1.0]),
        entropy_N=torch.tensor([1.0, 2.0, 6.0]),
        advantages_R=torch.tensor([1.0, -1.0]),
        rollout_N=torch.tensor([0, 0, 1]),
        num_rollouts=2,
        num_tokens=3,
        old_logps_N=torch.tensor([-2.0, -1.0, -0.5]),
        ref_logps_N=torch.tensor([-1.0, -1.0, 0.0]),
    )
    return policy_loss(x, LossSettings(loss_type=loss_type, beta=0.1, use_bias_correction_kl=False))


def test_loss_metrics_by_hand() -> None:
    """The first token is clipped from above, half of its rollout; the third from below, all of its rollout."""
    output = output_of("grpo")
    got = loss_metrics(output.sums, LossSettings(loss_type="grpo", beta=0.1), has_entropy_bonus=True, entropy_coef=0.3)
    assert got == pytest.approx(
        {
            "entropy": 3.0,
            "kl": (math.e - 2) / 3,
            "policy_loss": output.loss.item(),
            "clip_ratio/low_mean": 1 / 3,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 3,
            "clip_ratio/high_max": 0.5,
            "clip_ratio/region_mean": 2 / 3,
            "entropy_coef": 0.3,
        }
    )


EPISODES = [
    Counted(turns=3, cut_off=False, reply_seconds=0.5, calls=(("add", "", True, 0.1), ("add", "error", False, 0.3))),
    Counted(turns=1, cut_off=True, reply_seconds=0.1, calls=(("fly", "unknown", False, 0.0),)),
]


def test_turn_metrics_by_hand() -> None:
    turns = {"turns/mean": 2.0, "turns/max": 3.0, "turns/reply_seconds": 0.15, "turns/cut_off_ratio": 0.5}
    tools = {"call_frequency": 1.5, "failure_frequency": 2 / 3, "unknown_frequency": 1 / 3, "cut_frequency": 1 / 3}
    tools |= {"add/calls": 1.0, "add/failures": 0.5, "add/seconds": 0.2}
    got = turn_metrics(EPISODES, ["add"], cuts=True)
    assert got == pytest.approx(turns | {f"tools/{name}": value for name, value in tools.items()})
    assert turn_metrics(EPISODES, [], cuts=True).keys() == turns.keys()
    assert turn_metrics([], ["add"], cuts=False)["tools/failure_frequency"] == 0.0


def test_names_that_do_not_apply_are_left_out() -> None:
    got = loss_metrics(output_of("sapo").sums, LossSettings(loss_type="sapo"))
    assert set(got) == {"entropy"}


def test_every_metric_is_declared_with_unit_and_meaning() -> None:
    """Whatever the reductions can produce has a row, and nothing but the trainer's own rows is unused."""
    produced = set(LOSS_METRICS) | {"entropy_coef"}
    table = rollout_table(*GROUPS)
    settings = AdvantageSettings(weights_K=np.ones(2))
    produced |= set(rollout_metrics(table, advantages(table.rewards_RK.reshape(2, 2, 2), settings)))
    produced |= set(turn_metrics(EPISODES, ["add"], cuts=True))
    for name in produced:
        row = describe(name)
        assert row is not None, name
        assert row.unit
        assert row.meaning.endswith(".")
        assert describe(f"eval_{name}") == row
    for objective in OBJECTIVES.values():
        assert set(objective.metrics) <= set(LOSS_METRICS)
    unused = {name for name in METRICS if "<name>" not in name} - produced
    clocks = ("generate", "sync", "wait", "idle", "reward", "compare", "train", "monitor")
    times = {f"time/{part}_seconds" for part in clocks}
    own = {name for name in unused if name.startswith(("health/", "finding/"))}
    elsewhere = {"num_tokens", "step_time", "aux_loss", "accuracy", "resampled_prompts", "rollouts/staleness"}
    elsewhere |= {"rollouts/candidates"}  # tests/invariants/test_sampling_replay.py
    elsewhere |= {"tools/lost_frequency"}  # tests/agents/test_mcp.py
    elsewhere |= {"turns/differing_prompts", "teacher/kl", "time/teacher_seconds"}
    parts = ("seconds", "seconds_max", "slowest_row", "failed", "requests", "forks", "realigned", "capped")
    parts += ("rejected", "rejected_row", "given_up")
    elsewhere |= {"programs/calls"}  # tests/agents/test_dialects.py
    elsewhere |= {f"programs/{part}" for part in parts}  # tests/agents/test_programs.py
    assert unused - own == elsewhere | times
    assert describe("my_own_metric") is None


def test_reward_names_may_hold_slashes() -> None:
    assert describe("rewards/models/judge/mean") == METRICS["rewards/<name>/mean"]


def test_nan_aware_statistics_are_torchs() -> None:
    for values in ([1.0, 2.0, 4.0], [1.0, math.nan, 4.0], [1.0, math.nan], [math.nan], []):
        x = torch.tensor(values, dtype=torch.float64)
        assert nanmean(x.numpy()) == pytest.approx(x.nanmean().item(), nan_ok=True)
        assert nanstd(x.numpy()) == pytest.approx(trl_nanstd(x).item(), nan_ok=True)


def trl_log(mode: str, window: dict[str, list[float]], patch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What TRL's own `log` hands to transformers for a window of values."""
    logged: dict[str, float | None] = {}
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    trainer._metrics = {mode: window}
    trainer.model = torch.nn.Linear(1, 1).train(mode == "train")
    trainer.log_completions = False
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    patch.setattr(transformers.Trainer, "log", lambda _self, logs, _start: logged.update(logs))
    trainer.log({})
    return logged


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_buffer_is_trls_window(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"reward": [1.0, math.nan, 4.0], "rewards/a/mean": [math.nan, math.nan], "kl": [0.25]}
    buffer = MetricsBuffer()
    for name, several in values.items():
        for value in several:
            buffer.add(mode, {name: value})
    assert buffer.flush(mode) == trl_log(mode, values, monkeypatch)
    assert buffer.flush(mode) == {}


def test_buffer_keeps_modes_apart_and_what_counts_up() -> None:
    buffer = MetricsBuffer()
    buffer.add("train", {"reward": 1.0})
    buffer.add("eval", {"reward": 3.0})
    buffer.replace("train", {"num_tokens": 10})
    buffer.replace("train", {"num_tokens": 30})
    assert buffer.flush("eval") == {"eval_reward": 3.0}
    assert buffer.flush("train") == {"reward": 1.0, "num_tokens": 30.0}
    buffer.add("train", {"reward": 2.0})
    assert buffer.flush("train") == {"reward": 2.0}


def test_of_some_numbers_the_last_stands_for_the_window() -> None:
    buffer = MetricsBuffer()
    for seconds, row in ((9.0, 3), (5.0, 7)):
        buffer.add("train", {"programs/seconds_max": seconds, "programs/slowest_row": row, "programs/seconds": seconds})
    expected = {"programs/seconds_max": 5.0, "programs/slowest_row": 7.0, "programs/seconds": 7.0}
    assert buffer.take_step() == expected
    assert buffer.flush("train") == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[], [14, 10]], (12.0, 10.0, 14.0)),
        ([[20], [14, 10, 12]], (14.0, 10.0, 20.0)),
        ([[], []], (0.0, 0.0, 0.0)),
    ],
)
def test_a_step_of_several_rounds_has_the_lengths_of_all(rounds: list[list[int]], expected: tuple[float, ...]) -> None:
    """Of those that ended by themselves: a round in which nothing ended has no length."""
    buffer = MetricsBuffer()
    for lengths in rounds:
        ended = [(length, "stop", 1.0, math.nan) for length in lengths]
        table = rollout_table(scored(1, [*ended, *[(30, "length", 0.0, 0.5)] * (4 - len(ended))]))
        found = advantages(table.rewards_RK[None], AdvantageSettings(weights_K=np.ones(2)))
        buffer.add("train", rollout_metrics(table, found))
    step, window = buffer.take_step(), buffer.flush("train")
    for values in (step, window):
        names = [f"completions/{which}_terminated_length" for which in ("mean", "min", "max")]
        assert tuple(values[name] for name in names) == expected
        assert values["completions/min_length"] == min(*itertools.chain(*rounds), 30, 30)


def test_means_count_by_what_they_are_of() -> None:
    """Rewards that are not None, calls of a tool."""
    buffer = MetricsBuffer()
    for values in ([1.0, math.nan, math.nan, math.nan], [0.0, 0.0, 0.0, 0.0]):
        table = rollout_table(scored(1, [(2, "stop", value, 0.0) for value in values]))
        found = advantages(table.rewards_RK[None], AdvantageSettings(weights_K=np.ones(2)))
        buffer.add("train", rollout_metrics(table, found, "a"))
    for completions in (EPISODES, EPISODES[1:], []):
        buffer.add("train", turn_metrics(completions, ["add"], cuts=False))
    got = buffer.flush("train")
    assert got["rewards/a/mean"] == got["accuracy"] == 0.2
    assert got["tools/failure_frequency"] == pytest.approx(3 / 4)
    assert got["turns/max"] == 3.0


def test_two_buffers_share_nothing() -> None:
    first, second = MetricsBuffer(), MetricsBuffer()
    first.add("train", {"reward": 1.0})
    assert second.flush("train") == {}
