"""Completions as columns for the page's browser: each prompt once, numbers short, all of it below a size.

A page has to open in a mail program and on a phone, so it holds at most `MAX_BYTES` of completions. Beyond that some
prompts are left out, at every step, so that the history of the others is complete; the page says so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.runs.conversations import conversation, passages

if TYPE_CHECKING:
    import pandas

MAX_BYTES = 24_000_000
"""Largest size of the completions in a page, compressed and in base64."""

MAX_CHARACTERS = 20_000
"""Longest completion or prompt in a page; the rest is cut off, and a line says so."""


def packed(rollouts: pandas.DataFrame, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """`columns`, compressed: base64 of gzip of JSON, with the number of completions in it and in all."""
    if rollouts.empty:
        return {"total": 0, "kept": 0, "gzip": ""}
    kept, total = rollouts, len(rollouts)
    encoded = _encode(columns(kept))
    while len(encoded) > max_bytes and len(kept) > 1:
        kept = fewer(kept, 0.9 * max_bytes / len(encoded))
        encoded = _encode(columns(kept))
    return {"total": total, "kept": len(kept), "gzip": encoded}


def _encode(table: dict[str, Any]) -> str:
    text = json.dumps(table, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def fewer(rollouts: pandas.DataFrame, share: float) -> pandas.DataFrame:
    """About this share of the completions: whole prompts by their digest, steps only where one prompt is left."""
    sizes = rollouts.groupby("prompt", sort=False).size()
    order = sorted(sizes.index, key=lambda prompt: hashlib.sha256(str(prompt).encode("utf-8", "replace")).digest())
    most = int(share * len(rollouts))
    if len(order) > 1:
        count = max(1, int((sizes[order].cumsum() <= most).sum()))
        return rollouts[rollouts["prompt"].isin(set(order[: min(count, len(order) - 1)]))]
    steps = np.unique(rollouts["step"])
    if len(steps) == 1:
        return rollouts.iloc[: max(1, min(most, len(rollouts) - 1))]
    count = max(1, min(int(share * len(steps)), len(steps) - 1))
    places = np.unique(np.linspace(0, len(steps) - 1, count, dtype=int))
    return rollouts[rollouts["step"].isin(steps[places])]


def columns(rollouts: pandas.DataFrame) -> dict[str, Any]:
    """One list a column, in the order of the rows; prompts by their number in `prompts`."""
    import pandas

    number, prompts = pandas.factorize(rollouts["prompt"])
    names = [name.removeprefix("reward/") for name in rollouts.columns if name.startswith("reward/")]
    integers = {
        **{name: name for name in ("step", "policy_step", "row", "trained")},
        **{"group": "prompt_id", "index": "completion_index", "tokens": "num_tokens"},
    }
    return {
        "prompts": [_cut(prompt) for prompt in prompts],
        "prompt": number.tolist(),
        **{name: rollouts[column].astype(int).tolist() for name, column in integers.items()},
        "cut_off": (rollouts["finish"] == "length").astype(int).tolist(),
        "logp": _short(rollouts["mean_logp"]),
        **{name: _short(rollouts[name]) for name in ("reward", "advantage")},
        "rewards": {name: _short(rollouts[f"reward/{name}"]) for name in names},
        "answer": [_known(x) for x in rollouts["answer"]] if "answer" in rollouts else [None] * len(rollouts),
        "text": [_cut(text) for text in rollouts["completion"]],
        "turns": [_turns(turns) for turns in rollouts["turns"]] if "turns" in rollouts else [None] * len(rollouts),
    }


def _known(text: Any) -> str | None:
    """A text that is there; null is NaN in a column without any."""
    return text if isinstance(text, str) and text else None


def _turns(turns: str | None) -> list[list[Any]] | None:
    """Passages of an episode: whether it was drawn (1), head and text of each; None for a single answer."""
    if not isinstance(turns, str):
        return None
    return [[int(each.drawn), each.head, _cut(each.text)] for each in passages(conversation(turns))] or None


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n[... {len(text) - MAX_CHARACTERS:,} more characters are in rollouts/]"


def _short(values: pandas.Series) -> list[float | None]:
    """Four digits, None for what is not a number."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.astype(float)]
