"""The page: one file that sends no request to any network.

Its content security policy allows the scripts and styles whose hashes it names and nothing else: no request, no image,
no form, no frame. Data stand in JSON that cannot end its own element, and the scripts put every text from a run on the
page as text. Plotly travels compressed and starts after the page has been drawn; its style rules go through the CSS
object model, which a policy by hashes allows, into an empty style element, whose hash is named too.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.runs.html import asset, policy
from podium.runs.html import render as render_template
from podium.runs.report.columns import MAX_BYTES, packed
from podium.runs.report.series import charts
from podium.runs.report.summary import summary
from podium.runs.report.tables import evaluation, finding, flat, gravest, proof
from podium.runs.run import Run

SCRIPTS = ("dom.js", "charts.js", "sections.js", "browser.js", "page.js")
"""One script on the page, in this order."""


def run_data(run: Run, *, max_bytes: int = MAX_BYTES, after_step: int = -1) -> dict[str, Any]:
    """All data of one run on the page, as JSON values; completions of the steps after `after_step` only."""
    rollouts = run.rollouts[run.rollouts["step"] > after_step]
    return {
        "name": run.name,
        "summary": summary(run),
        "steps": [line.step for line in run.history],
        "stages": [{"name": part.name, "first": part.offset + 1, "last": part.last_step} for part in run.parts],
        "charts": charts(run),
        "findings": [finding(row) for row in gravest(run.findings.to_dict("records"))],
        "config": list(flat(run.config)),
        "environment": list(flat({name: value for name, value in run.environment.items() if name != "settings"})),
        "evaluation": evaluation(run.evaluations),
        "proof": proof(run.proof),
        "completions": packed(rollouts, max_bytes=max_bytes),
    }


def render(runs: Sequence[Run], *, live: str = "") -> str:
    """The page of one run, or of two side by side.

    Args:
        runs: one or two.
        live: version of the data: the page polls its own server for newer ones. Empty: a file without requests.
    """
    shown = [run_data(run, max_bytes=MAX_BYTES // len(runs)) for run in runs]
    _, plotly, style_ids = _plotly()
    return render_template(
        "page.html",
        title=" and ".join(run.name for run in runs),
        policy=policy_of(live=bool(live)),
        style=asset("page.css"),
        script=_script(),
        plotly=plotly,
        plotly_ids=style_ids,
        data=in_element({"live": bool(live), "version": live, "runs": shown}),
    )


def policy_of(*, live: bool) -> str:
    """The page's content security policy."""
    return policy([_script(), _plotly()[0]], [asset("page.css"), ""], live=live)


def write_report(folders: Sequence[str | Path], output: str | Path) -> Path:
    """Write the page of these runs, atomically.

    Raises:
        DataError: a folder that holds no run.
        ConfigError: the file cannot be written.
    """
    output = Path(output)
    text = render([Run.load(folder) for folder in folders])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".report-") as folder:
            Path(folder, output.name).write_text(text, encoding="utf-8", newline="\n")
            os.replace(Path(folder, output.name), output)
    except OSError as error:
        raise ConfigError("runs.cannot_written", output=output, strerror=error.strerror) from error
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
    """Plotly's JavaScript: its text, its gzip form in base64, and the ids of style elements that it looks for."""
    from plotly.offline import get_plotlyjs

    text = get_plotlyjs()
    compressed = base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
    # Its maps, which no page here has, would add a style by themselves unless an element of this name is there.
    return text, compressed, sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text)))
