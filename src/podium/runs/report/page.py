"""The page: one file that sends no request to any network.

Its content security policy allows the scripts and styles whose hashes it names and nothing else: no request, no form,
no frame, and of images only those in the page, where there are thumbnails of a run's prompts. Data stand in JSON that
cannot end its own element, and the scripts put every text from a run on the page as text. Plotly travels compressed
and starts after the page has been drawn; its style rules go through the CSS object model, which a policy by hashes
allows, into an empty style element, whose hash is named too.

A page has to open in a mail program and on a phone, so it holds at most `MAX_BYTES` of completions, as columns: each
prompt once, numbers short. Beyond that some prompts are left out, at every step, so that the history of the others is
complete; the page says so. Thumbnails have `MAX_IMAGE_BYTES` of their own, the latest first. Tables (configuration,
environment, before and after, the proof) are rows of text.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.errors import ConfigError, Finding, gravest_first
from podium.errors.texts import as_lines
from podium.runs.conversations import conversation, tree_passages
from podium.runs.html import asset, policy
from podium.runs.html import render as render_template
from podium.runs.monitors import agreed
from podium.runs.redaction import hide, is_secret
from podium.runs.report.charts import charts
from podium.runs.report.summary import summary
from podium.runs.run import Run

if TYPE_CHECKING:
    import pandas


SCRIPTS = ("dom.js", "charts.js", "sections.js", "browser.js", "page.js")
"""One script on the page, in this order."""


MAX_BYTES = 24_000_000
"""Largest size of the completions in a page, compressed and in base64."""

MAX_IMAGE_BYTES = 4_000_000
"""Largest size of the thumbnails in a page, in base64: about 600 photographs."""

MAX_CHARACTERS = 20_000
"""Longest completion or prompt in a page; the rest is cut off, and a line says so."""


NOT_SHOWN = "(not shown)"

WITHOUT_CHARTS = "No curves, since Plotly is not installed: pip install 'podium[report]'"
"""On the page, and in the terminal; everything else on the page is there."""


def run_data(run: Run, *, share: int = 1, after_step: int = -1) -> dict[str, Any]:
    """All data of one run on the page, as JSON values.

    Args:
        run: the run.
        share: of how many runs on the page it is one.
        after_step: only completions of later steps.
    """
    rollouts = run.rollouts[run.rollouts["step"] > after_step]
    findings = agreed(gravest(run.reported))
    return {
        "name": run.name,
        "summary": summary(run),
        "steps": [line.step for line in run.history],
        "stages": [{"name": part.name, "first": part.offset + 1, "last": part.last_step} for part in run.parts],
        "charts": charts(run),
        "findings": [_finding(finding) for finding in findings],
        "config": list(flat(run.config)),
        "environment": list(flat({name: value for name, value in run.environment.items() if name != "settings"})),
        "evaluation": evaluation(run.evaluations),
        "proof": proof(run.proof),
        "completions": packed(rollouts, run.thumbnails, share=share),
    }


def render(runs: Sequence[Run], *, live: str = "") -> str:
    """The page of one run, or of two side by side.

    Args:
        runs: one or two.
        live: version of the data: the page polls its own server for newer ones. Empty: a file without requests.
    """
    uncharted = "" if has_charts() else WITHOUT_CHARTS
    shown = [run_data(run, share=len(runs)) for run in runs]
    _, plotly, style_ids = _plotly()
    return render_template(
        "page.html",
        title=" and ".join(run.name for run in runs),
        policy=policy_of(images=any(run["completions"]["thumbnails"] for run in shown), live=bool(live)),
        style=asset("page.css"),
        script=_script(),
        plotly=plotly,
        plotly_ids=style_ids,
        data=in_element({"live": bool(live), "version": live, "runs": shown, "uncharted": uncharted}),
    )


def policy_of(*, images: bool = False, live: bool = False) -> str:
    """The page's content security policy. `images`: whether it shows some; those of a live page may come later."""
    scripts = [_script()]
    if has_charts():
        scripts.append(_plotly()[0])
    return policy(scripts, [asset("page.css"), ""], images=images or live, live=live)


def has_charts() -> bool:
    """Whether a page written now has curves: whether Plotly is installed."""
    return bool(_plotly()[0])


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Write the page of one run, or of two, atomically. Raises `ConfigError` where the file cannot be written."""
    text = render(runs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".report-") as folder:
            Path(folder, output.name).write_text(text, encoding="utf-8", newline="\n")
            os.replace(Path(folder, output.name), output)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written ({error.strerror}).",
            fix="Give another file: -o report.html",
            output=output,
            strerror=error.strerror,
        ) from error
    return output


def in_element(value: Any) -> str:
    r"""JSON that can stand inside a script element: nothing in it ends the element or opens a comment.

    >>> in_element("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n"


@functools.cache
def _plotly() -> tuple[str, str, list[str]]:
    """Plotly's JavaScript: its text, its gzip form in base64, and the ids of style elements that it looks for.

    All are empty where Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return "", "", []
    text = get_plotlyjs()
    compressed = base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
    # Its maps, which no page here has, would add a style by themselves unless an element of this name is there.
    return text, compressed, sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text)))


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


def gravest(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without those that were repeated, under the same code, as graver ones.

    >>> both = [Finding(code="M141", severity=severity, what="") for severity in ("warning", "error")]
    >>> [finding.severity for finding in gravest(both)]
    ['error']
    """
    worst = {finding.code: finding.severity for finding in reversed(gravest_first(findings))}
    return [finding for finding in findings if finding.severity == worst[finding.code]]


def _finding(finding: Finding) -> dict[str, Any]:
    """A finding on the page: its texts without secrets, its step, and the changed settings as one text.

    >>> found = Finding(code="M101", severity="note", what="x", changes={"temperature": 1.0, "min_p": None})
    >>> _finding(found)["changes"]
    'temperature: 1.0; take `min_p` out'
    """
    texts = {
        "code": finding.code,
        "severity": finding.severity,
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
        "changes": as_lines(finding.changes),
    }
    return {**{name: hide(text, NOT_SHOWN) for name, text in texts.items()}, "step": finding.step}


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
    rows = [{"name": labels[name], "cells": [_cell(result, name) for result in results.values()]} for name in names]
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
    if value in (None, 0):
        return ""
    return f"{value:.3g}" if isinstance(value, float) else _text(value)


def packed(rollouts: pandas.DataFrame, jpegs: Mapping[str, bytes], *, share: int = 1) -> dict[str, Any]:
    """`columns`, compressed: base64 of gzip of JSON, with the number of completions in it and in all; and thumbnails.

    Args:
        rollouts: completions of a run.
        jpegs: thumbnails by name.
        share: of how many runs on the page it is one.
    """
    if rollouts.empty:
        return {"total": 0, "kept": 0, "gzip": "", "thumbnails": {}}
    kept = rollouts
    max_bytes = MAX_BYTES // share
    total = len(rollouts)
    encoded = _encode(columns(kept))
    while len(encoded) > max_bytes and len(kept) > 1:
        kept = fewer(kept, 0.9 * max_bytes / len(encoded))
        encoded = _encode(columns(kept))
    shown = latest(kept, jpegs, max_bytes=MAX_IMAGE_BYTES // share)
    return {"total": total, "kept": len(kept), "gzip": encoded, "thumbnails": shown}


def latest(rollouts: pandas.DataFrame, jpegs: Mapping[str, bytes], *, max_bytes: int) -> dict[str, str]:
    """Thumbnails of prompts in base64, by name: those of the latest steps, as many as the size allows."""
    found: dict[str, str] = {}
    size = 0
    for prompt in reversed(_images(rollouts.drop_duplicates("prompt", keep="last"))):
        for name in prompt:
            if name in found or name not in jpegs:
                continue
            encoded = base64.b64encode(jpegs[name]).decode()
            size += len(encoded)
            if size > max_bytes:
                return found
            found[name] = encoded
    return found


def _images(rollouts: pandas.DataFrame) -> list[list[str]]:
    """Names of the thumbnails of each completion's prompt; runs of earlier versions have none."""
    if "images" not in rollouts:
        return [[]] * len(rollouts)
    return [json.loads(names) if isinstance(names, str) else [] for names in rollouts["images"]]


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

    def texts(name: str) -> list[str | None]:
        """A column that runs of earlier versions need not have; null is NaN where a column has no text at all."""
        values = rollouts[name] if name in rollouts else [None] * len(rollouts)
        return [x if isinstance(x, str) and x else None for x in values]

    trees: list[list[dict[str, Any]]] = [json.loads(found) if found else [] for found in texts("branches")]
    number, prompts = pandas.factorize(rollouts["prompt"])
    names = [name.removeprefix("reward/") for name in rollouts.columns if name.startswith("reward/")]
    integers = {
        **{name: name for name in ("step", "policy_step", "row", "trained")},
        **{"group": "prompt_id", "index": "completion_index", "tokens": "num_tokens"},
    }
    return {
        "prompts": [_cut(prompt) for prompt in prompts],
        "images": _images(rollouts.drop_duplicates("prompt")),
        "prompt": number.tolist(),
        **{name: rollouts[column].astype(int).tolist() for name, column in integers.items()},
        "cut_off": (rollouts["finish"] == "length").astype(int).tolist(),
        "logp": _short(rollouts["mean_logp"]),
        **{name: _short(rollouts[name]) for name in ("reward", "advantage")},
        "rewards": {name: _short(rollouts[f"reward/{name}"]) for name in names},
        "answer": texts("answer"),
        "text": [_cut(text) for text in rollouts["completion"]],
        "turns": [*map(_turns, texts("turns"), trees)],
        "branches": [*map(len, trees)],
        "failed": texts("program_failed"),
        "log": texts("program_log"),
    }


def _turns(turns: str | None, branches: Sequence[Mapping[str, Any]]) -> list[list[Any]] | None:
    """Passages of an episode: how it came about, head, text and depth of each; None for a single answer."""
    made = []
    for passage in tree_passages(conversation(turns), branches):
        kind = "drawn" if passage.drawn else "given"
        if passage.begins:
            kind = "branch"
        made.append([kind, passage.head, _cut(passage.text), passage.depth])
    return made or None


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n[... {len(text) - MAX_CHARACTERS:,} more characters are in rollouts/]"


def _short(values: pandas.Series) -> list[float | None]:
    """Four digits, None for what is not a number."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.astype(float)]
