"""Folders of runs as training leaves them, made in a second."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml

RunFolder = Callable[..., Path]

WORDS = ["so", "the", "sum", "of", "these", "two", "is", "what", "we", "add", "first", "then", "carry", "one", "over"]
EVALUATIONS = {
    "before": {"accuracy": {"value": 0.02, "low": 0.0, "high": 0.05}, "mean_tokens": 15.2, "truncated": 0.9},
    "after": {"accuracy": {"value": 0.8, "low": 0.72, "high": 0.86}, "mean_tokens": 9.9, "truncated": 0.01},
}
VERDICT = "Better: accuracy rose from 0.020 (before) to 0.800 (after)."
FINDINGS = [
    {
        "code": "M999",
        "severity": "warning",
        "what": "61 % of groups had equal rewards",
        "why": "They are solved.",
        "fix": "Harder prompts.",
        "step": 12,
    },
    {"code": "M998", "severity": "note", "what": "a note without a step", "why": "", "fix": "", "step": None},
]


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """`run_folder("name", num_steps=20)`: see `make`."""
    return functools.partial(make, tmp_path)


@pytest.fixture(scope="session")
def make_folder() -> RunFolder:
    """`make_folder(parent, "name", ...)`: the same where a test's own folder is too short-lived."""
    return make


def make(parent: Path, name: str = "sums", *, num_steps: int = 20, seed: int = 0, **given: Any) -> Path:
    """Sums with a format reward and a correctness reward, learnt on the way.

    `texts`: completions to use in turn instead of the sums' answers. `words`: words that pad every completion.
    """
    folder = parent / name
    (folder / "rollouts").mkdir(parents=True)
    table = rollouts(num_steps, seed=seed, **given)
    table.to_parquet(folder / "rollouts" / "rollouts-0.parquet", compression="zstd")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(table)))
    (folder / "findings.jsonl").write_text("".join(json.dumps(finding) + "\n" for finding in FINDINGS))
    config = {"model": "builtin:sums", "max_steps": num_steps, "learning_rate": 1e-5, "hub_token": "hf_" + "x" * 30}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))
    (folder / "environment.json").write_text(json.dumps({"versions": {"podium": "0.1.0"}, "host": {"cores": 2}}))
    (folder / "evaluation").mkdir()
    for when, result in EVALUATIONS.items():
        numbers = {"num_prompts": 80, "num_completions": 320, "reward": {"value": 1.0, "low": 0.9, "high": 1.1}}
        (folder / "evaluation" / f"{when}.json").write_text(json.dumps({**numbers, **result}))
    (folder / "evaluation" / "comparison.json").write_text(json.dumps({"verdict": VERDICT}))
    proof = {
        "checks": [{"result": "ok", "name": "loss", "detail": "as TRL computes it", "measured": 1e-8, "code": "P001"}]
    }
    (folder / "proof.json").write_text(json.dumps(proof))
    return folder


def rollouts(
    num_steps: int,
    *,
    prompts: int = 8,
    completions: int = 8,
    seed: int = 0,
    words: int = 0,
    texts: tuple[str, ...] = (),
) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    steps = np.repeat(np.arange(1, num_steps + 1), prompts * completions)
    count = len(steps)
    asked = np.repeat(rng.integers(1, 7, size=(count // completions, 2)), completions, axis=0)
    skill = 1 / (1 + np.exp(-6 * (steps / num_steps - 0.5)))
    right, tagged = rng.random(count) < 0.9 * skill, rng.random(count) < 0.3 + 0.7 * skill
    answers = np.where(right, asked.sum(axis=1), rng.integers(2, 40, count))
    vocabulary = np.array(WORDS)
    padding = [" ".join(row) for row in rng.choice(vocabulary, (count, words))] if words else [""] * count
    written = [f"<answer>{a}</answer>" if tag else f"It is {a}" for a, tag in zip(answers, tagged, strict=True)]
    written = [f"{pad} {text}".strip() for pad, text in zip(padding, written, strict=True)]
    if texts:
        written = [texts[i % len(texts)] for i in range(count)]
    reward = tagged + 2.0 * right
    grouped = reward.reshape(-1, completions)
    spread = grouped.std(axis=1, ddof=1, keepdims=True)
    advantage = ((grouped - grouped.mean(axis=1, keepdims=True)) / (spread + 1e-4)).ravel()
    return pandas.DataFrame(
        {
            "step": steps.astype(np.int32),
            "policy_step": (steps - 1).astype(np.int32),
            "prompt_id": np.repeat(np.tile(np.arange(prompts), num_steps), completions),
            "row": asked[:, 0] * 10 + asked[:, 1],
            "completion_index": np.tile(np.arange(completions), count // completions).astype(np.int16),
            "prompt": [f"<|user|>\nWhat is {a} + {b}?\n<|assistant|>\n" for a, b in asked],
            "completion": written,
            "num_prompt_tokens": np.int32(24),
            "num_tokens": (6 + rng.integers(0, 10, count)).astype(np.int32),
            "finish": np.where(tagged, "stop", "length"),
            "mean_logp": rng.normal(-1, 0.2, count).astype(np.float32),
            "reward/format": tagged.astype(float),
            "reward/correct": np.where(rng.random(count) < 0.02, np.nan, right.astype(float)),
            "reward": reward.astype(float),
            "advantage": advantage.astype(np.float32),
            "trained": (spread > 0).repeat(completions, axis=1).ravel(),
        }
    )


def metrics(table: pandas.DataFrame) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    lines = []
    tokens = 0
    for step, rows in table.groupby("step"):
        tokens += int(rows["num_tokens"].sum() + rows["num_prompt_tokens"].sum())
        values = {
            "loss": float(rng.normal(0, 0.01)),
            "grad_norm": float(rng.lognormal(-1, 0.3)),
            "learning_rate": 3e-5 * (1 - step / len(table)),
            "reward": float(rows["reward"].mean()),
            "reward_std": float(rows["reward"].std()),
            "rewards/format/mean": float(rows["reward/format"].mean()),
            "rewards/format/std": float(rows["reward/format"].std()),
            "rewards/correct/mean": float(rows["reward/correct"].mean()),
            "frac_reward_zero_std": float(1 - rows["trained"].mean()),
            "completions/mean_length": float(rows["num_tokens"].mean()),
            "completions/min_length": float(rows["num_tokens"].min()),
            "completions/max_length": float(rows["num_tokens"].max()),
            "completions/clipped_ratio": float((rows["finish"] == "length").mean()),
            "entropy": 2.5 / (1 + step / 20),
            "kl": 0.0005 * step if step % 7 else None,
            "clip_ratio/region_mean": float(rng.random() * 0.02),
            "step_time": 3.4,
            "time/generate_seconds": 1.9,
            "time/reward_seconds": 0.1,
            "time/train_seconds": 1.2,
            "num_tokens": tokens,
            "memory/peak_gb": 2.0,
        }
        lines.append({"step": int(step), "time": 1.79e9 + 3.4 * int(step), "values": values})
    return lines
