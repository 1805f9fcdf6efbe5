"""Tables of a page: configuration, environment, before and after, the proof. Rows of text; nothing here is markup."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium.errors import SEVERITIES
from podium.errors.texts import as_lines
from podium.runs.redaction import hide, is_secret

NOT_SHOWN = "(not shown)"


def flat(values: Any, prefix: str = "") -> Iterator[list[str]]:
    """Nested values as rows of `name.name` and text, without secrets.

    >>> list(flat({"a": {"b": 1, "hub_token": "x"}, "c": [1, 2]}))
    [['a.b', '1'], ['a.hub_token', '(not shown)'], ['c', '[1, 2]']]
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield [f"{prefix}{name}", NOT_SHOWN if is_secret(str(name), value) else hide(_text(value), NOT_SHOWN)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def gravest(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The findings without those that were repeated, under the same code, as graver ones.

    >>> gravest([{"code": "M141", "severity": "warning"}, {"code": "M141", "severity": "error"}])
    [{'code': 'M141', 'severity': 'error'}]
    """
    worst = {
        each["code"]: each["severity"] for level in SEVERITIES[::-1] for each in findings if each["severity"] == level
    }
    return [each for each in findings if each["severity"] == worst[each["code"]]]


def finding(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `Run.findings`: texts, a whole step or None, and the changed settings as one text.

    >>> finding({"code": "M101", "severity": "note", "what": "x", "why": None, "fix": "", "step": float("nan")})["step"]
    >>> row = {"code": "R001", "severity": "note", "what": "x", "why": "", "fix": "", "step": 1}
    >>> finding({**row, "changes": {"temperature": 1.0, "min_p": None}})["changes"]
    'temperature: 1.0; take `min_p` out'
    """
    step = row["step"]
    texts = {name: hide(str(row[name] or ""), NOT_SHOWN) for name in ("code", "severity", "what", "why", "fix")}
    changes = hide(as_lines(row.get("changes") or {}), NOT_SHOWN)
    return {**texts, "changes": changes, "step": int(step) if step is not None and step == step else None}


def evaluation(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Held-out results, a row a number and a column for each evaluation; None without any."""
    results = {when: evaluations[when] for when in ("before", "after") if when in evaluations}
    if not results:
        return None
    last = list(results.values())[-1]
    several = [f"pass_at.{k}" for k in last.get("pass_at") or {} if k != "1"]
    means = [f"means.{name}" for name in last.get("means") or {}]
    names = ["accuracy", *several, "reward", *means, "mean_tokens", "truncated"]
    labels = {name: name.removeprefix("means.").replace("pass_at.", "pass@") for name in names}
    labels |= {"mean_tokens": "mean length, tokens", "truncated": "cut off at the limit"}
    rows = [{"name": labels[name], "cells": [_cell(each, name) for each in results.values()]} for name in names]
    return {
        "columns": list(results),
        "rows": [row for row in rows if any(row["cells"])],
        "num_prompts": last.get("num_prompts"),
        "num_completions": last.get("num_completions"),
        "verdict": str(evaluations.get("comparison", {}).get("verdict") or ""),
        "baselines": str((last.get("baselines") or {}).get("line") or ""),
    }


def _cell(result: Mapping[str, Any], name: str) -> dict[str, float] | None:
    """A number with its interval, where it has one."""
    head, _, rest = name.partition(".")
    value = result.get(head)
    if rest and isinstance(value, Mapping):
        value = value.get(rest)
    if isinstance(value, Mapping):
        return {key: value[key] for key in ("value", "low", "high") if isinstance(value.get(key), int | float)} or None
    return {"value": value} if isinstance(value, int | float) else None


def proof(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checks in `proof.json` as a table; None without any.

    >>> proof({"checks": [{"result": "ok", "name": "loss", "measured": 1.2345e-7, "tolerance": 0.0}]})["rows"]
    [['ok', 'loss', '', '1.23e-07', '', '']]
    """
    columns = ["result", "name", "detail", "measured", "tolerance", "code"]
    rows = [[_measured(check.get(name)) for name in columns] for check in content.get("checks") or []]
    return {"columns": columns, "rows": rows} if rows else None


def _measured(value: Any) -> str:
    """Three digits of a number; nothing for a 0, which means that nothing was measured."""
    return "" if value in (None, 0) else f"{value:.3g}" if isinstance(value, float) else _text(value)
