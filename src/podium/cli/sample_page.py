"""`podium sample --html`: groups of completions as one page that needs nothing else, and runs nothing.

What a model wrote is text and nothing but text: Jinja2 escapes it, control characters are taken out, and the page's
own policy forbids scripts, forms, and everything from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from podium.algorithm.advantages import advantages
from podium.cli.terminal import clean
from podium.records import ScoredGroup

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2.5rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.45 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.up { background: #e5f4e8; } td.down { background: #fbe9e7; } details { margin: .4rem 0 1rem; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd; } th, td { border-color: #3a3f47; }
  td.up { background: #1d3a26; } td.down { background: #43241f; }
}
"""

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{{ style_hash }}';
 base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for group in groups %}
<h2>Row {{ group.row }}</h2>
<details{% if loop.first %} open{% endif %}>
<summary>what the model sees</summary><pre>{{ group.prompt }}</pre></details>
<table>
<thead><tr>{% for name in names %}<th class="number" scope="col">{{ name }}</th>{% endfor %}
<th scope="col">ended</th><th scope="col">completion</th></tr></thead>
<tbody>
{% for row in group.rows %}
<tr>{% for number in row.numbers %}<td class="number">{{ number }}</td>{% endfor %}
<td class="number {{ row.sign }}">{{ row.advantage }}</td>
<td>{{ row.finish }}</td><td><pre>{{ row.text }}</pre></td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
</body>
</html>
"""


def page(scored: Sequence[ScoredGroup], settings: Any, name: str) -> str:
    """The page. `settings` are those of the advantages."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    result = advantages(np.stack([group.rewards_GK for group in scored]), settings)
    return environment.from_string(_TEMPLATE).render(
        title=f"Completions of {name}",
        style=Markup(STYLE),
        style_hash=base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode(),
        names=[*scored[0].names_K, "reward", "advantage"],
        groups=[
            {
                "row": each.group.prompt.row,
                "prompt": clean(each.group.prompt.text),
                "rows": [
                    _row(each, g, float(result.reward_PG[p, g]), float(result.advantages_PG[p, g]))
                    for g in range(each.num_completions)
                ],
            }
            for p, each in enumerate(scored)
        ],
    )


def _row(each: ScoredGroup, g: int, reward: float, advantage: float) -> dict[str, Any]:
    completion = each.group.completions[g]
    return {
        "numbers": [_number(value) for value in (*each.rewards_GK[g].tolist(), reward)],
        "advantage": _number(advantage),
        "sign": "up" if advantage > 0 else "down" if advantage < 0 else "",
        "finish": completion.finish,
        "text": clean(completion.text),
    }


def _number(value: float) -> str:
    return "none" if value != value else f"{value:.2f}"
