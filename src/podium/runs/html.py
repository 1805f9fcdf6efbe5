"""HTML of reports, samples and notebooks: one template language, and a policy that names what may run.

Templates are in `report/assets`. Jinja2 escapes every value; `| text` takes out control characters and secrets as
well, for text that a model or a user wrote.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from podium.errors.texts import clean
from podium.runs.redaction import hide


def render(template: str, **values: Any) -> str:
    """A template of `report/assets` with these values."""
    return str(_environment().get_template(template).render(values))


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    environment.filters["text"] = lambda value: clean(hide(str(value)))
    environment.filters["points"] = points
    return environment


def asset(name: str) -> str:
    """The text of a file in `report/assets`."""
    return (resources.files("podium.runs") / "report" / "assets" / name).read_text(encoding="utf-8")


def points(values: Sequence[float], width: float, height: float) -> str:
    """A curve as the points of an SVG polyline.

    >>> points([0.0, 1.0, 0.5], 100, 10)
    '0.0,10.0 50.0,0.0 100.0,5.0'
    """
    known = [(i, value) for i, value in enumerate(values) if value == value]
    low = min((y for _, y in known), default=0.0)
    high = max((y for _, y in known), default=0.0)
    across = width / max(len(values) - 1, 1)
    up = height / ((high - low) or 1.0)
    return " ".join(f"{i * across:.1f},{height - (value - low) * up:.1f}" for i, value in known)


def policy(scripts: Sequence[str], styles: Sequence[str], *, images: bool = False, live: bool = False) -> str:
    """A content security policy that names these and forbids the rest; `images`: those that the page itself holds.

    >>> policy([], [""]).split("; ")[-3]
    "style-src 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    rules = {
        "default-src": ["'none'"],
        "script-src": [digest(script) for script in scripts],
        "style-src": [digest(style) for style in styles],
        **({"img-src": ["data:"]} if images else {}),
        **({"connect-src": ["'self'"]} if live else {}),
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(f"{name} {' '.join(values)}" for name, values in rules.items() if values)


def digest(text: str) -> str:
    """The name of an inline script or style in a policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
