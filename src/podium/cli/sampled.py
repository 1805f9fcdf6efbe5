"""Groups that are sampled and scored without training, in numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.algorithm.advantages import combine, has_spread
from podium.algorithm.metrics import RIGHT, accuracy_name
from podium.console.terminal import console, table
from podium.data.images import has_images
from podium.data.selection import asked_about, fingerprint, sampled_rows
from podium.data.sources import undecoded
from podium.errors import ConfigError
from podium.records import ScoredGroup, last_user_turn
from podium.trainer.rollouts import EVALUATION, make_prompt

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer


def sample_groups(
    trainer: GRPOTrainer, rows: Sequence[tuple[int, Any]]
) -> tuple[list[ScoredGroup], Mapping[str, float]]:
    """Groups of rows, each with its number, by the run's own settings; and seconds.

    Seconds are those of sampling and of each reward, by the names of training's metrics.
    """
    prompts = [make_prompt(trainer.run, row, number, number) for number, row in rows]
    settings = trainer.step.sampling(trainer.run.plan.num_generations, EVALUATION)
    groups, measured = trainer.rollouts.sample_and_score(prompts, settings, trainer.state)
    return groups, measured.times()


def drawn_rows(trainer: GRPOTrainer, dataset: Any, num_prompts: int) -> list[tuple[int, Any]]:
    """Rows with their numbers, drawn from the whole set; of a stream the first."""
    return list(sampled_rows(undecoded(dataset), num_prompts, trainer.args.seed))


def numbers(
    groups: Sequence[ScoredGroup], seconds: Mapping[str, float], trainer: GRPOTrainer, accuracy: str | None
) -> dict[str, Any]:
    """Counts and means of sampled groups as plain values. `accuracy` names the reward that tells right from wrong."""
    names = groups[0].names_K
    completions = [completion for group in groups for completion in group.group.completions]
    lengths_R = [len(completion.token_ids) for completion in completions]
    weights_K = trainer.run.scoring.advantage.weights_K
    found = {
        "prompts": len(groups),
        "completions": len(completions),
        "groups_with_spread": sum(_differ(combine(group.rewards_GK, weights_K)) for group in groups),
        "accuracy": accuracy or accuracy_name(names),
        "judged_prompts": None,
        "always_solved": None,
        "never_solved": None,
        "tokens": np.quantile(lengths_R, [0.05, 0.5, 0.95]).round().astype(int).tolist(),
        "max_completion_length": trainer.args.max_completion_length,
        "cut_off": sum(completion.finish in ("length", "context") for completion in completions),
        "rewards": [_of_reward(groups, k, seconds[f"time/reward/{name}_seconds"]) for k, name in enumerate(names)],
        "sampling_seconds": seconds["time/generate_seconds"],
        "sampled_tokens": sum(len(completion.logps) for completion in completions),
    }
    if found["accuracy"] is not None:
        rates = [rate for group in groups if (rate := _share_right(group, found["accuracy"])) is not None]
        found["judged_prompts"] = len(rates)
        found["always_solved"] = rates.count(1.0)
        found["never_solved"] = rates.count(0.0)
    return found


def _differ(values_G: np.ndarray) -> bool:
    return bool(has_spread(values_G[~np.isnan(values_G)]))


def _of_reward(groups: Sequence[ScoredGroup], k: int, seconds: float) -> dict[str, Any]:
    values_R = np.concatenate([group.rewards_GK[:, k] for group in groups])
    known = values_R[~np.isnan(values_R)]
    return {
        "name": groups[0].names_K[k],
        "mean": float(known.mean()) if known.size else None,
        "low": float(known.min()) if known.size else None,
        "high": float(known.max()) if known.size else None,
        "groups_with_spread": sum(_differ(group.rewards_GK[:, k]) for group in groups),
        "none": int(np.isnan(values_R).sum()),
        "seconds": seconds,
    }


def _share_right(scored: ScoredGroup, accuracy: str) -> float | None:
    """The share of right completions; None where the reward judged none of them."""
    values_G = scored.rewards_GK[:, scored.names_K.index(accuracy)]
    known = values_G[~np.isnan(values_G)]
    return float((known >= RIGHT).mean()) if known.size else None


def print_numbers(found: Mapping[str, Any]) -> None:
    """A table of the rewards, one a row, and one of everything else."""
    prompts = found["prompts"]
    completions = found["completions"]
    rewards = [
        (
            reward["name"],
            *("-" if reward[key] is None else f"{reward[key]:.2f}" for key in ("mean", "low", "high")),
            f"{reward['groups_with_spread']} of {prompts}",
            f"{reward['none']} of {completions}",
            f"{reward['seconds']:.2f}",
        )
        for reward in found["rewards"]
    ]
    columns = dict.fromkeys(("reward", "mean", "lowest", "highest", "differs in", "none", "seconds"), "right whole")
    console.print(table({**columns, "reward": "left whole"}, rows=rewards, title="Rewards"))
    solved = "not known: no reward says right or wrong (accuracy: NAME)"
    if found["accuracy"] is not None:
        judged = found["judged_prompts"]
        solved = f"{found['always_solved']} of {judged} always, {found['never_solved']} of {judged} never"
        solved += f" (by {found['accuracy']})"
    low, middle, high = found["tokens"]
    rate = found["sampled_tokens"] / max(found["sampling_seconds"], 1e-9)
    lines = [
        ("groups with spread", f"{found['groups_with_spread']} of {prompts}"),
        ("solved prompts", solved),
        ("tokens of a completion", f"{low} / {middle} / {high} (5, 50 and 95 % of {completions})"),
        (
            "cut off at the limit",
            f"{found['cut_off']} of {completions} (max_completion_length: {found['max_completion_length']})",
        ),
        ("sampling", f"{found['sampling_seconds']:.1f} s, {rate:,.0f} tokens a second"),
    ]
    console.print(table((("", "left"), ("", "left")), lines, title="Groups", show_header=False))


def check_accuracy(names: Sequence[str], accuracy: str | None) -> None:
    """Raise `ConfigError` where none of the rewards is known to say right or wrong, so that no prompt is solved."""
    if accuracy is None and accuracy_name(names) is None:
        raise ConfigError(
            f"none of the rewards {', '.join(names)} is known to say right or wrong.",
            fix="accuracy: NAME",
            names=names,
        )


def save_rates(
    file: Path, rows: Sequence[tuple[int, Any]], groups: Sequence[ScoredGroup], accuracy: str | None
) -> None:
    """Write how often each prompt was solved, one a line, for the recipe's key `pass_rates`.

    A stopped measurement keeps the older file.

    Args:
        file: where to write.
        rows: those of the groups, whose images are as they are stored.
        groups: the scored completions.
        accuracy: the reward that tells right from wrong; None: the first known to.
    """
    names = groups[0].names_K
    name = accuracy or accuracy_name(names)
    assert name is not None, "`check_accuracy` refuses it"
    lines = []
    for (_, row), group in zip(rows, groups, strict=True):
        values_G = group.rewards_GK[:, names.index(name)]
        right_G = values_G[~np.isnan(values_G)] >= RIGHT
        if right_G.size:
            content = group.group.prompt.content
            line = {
                "fingerprint": fingerprint(asked_about(row) if has_images(row) else content),
                "pass_rate": round(float(right_G.mean()), 6),
                "right": int(right_G.sum()),
                "completions": int(right_G.size),
                "reward": name,
                "prompt": last_user_turn(content),
            }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_text("".join(lines).encode("utf-8", "replace").decode("utf-8"), encoding="utf-8")
    beside.replace(file)
