"""Explanations of findings: one page a code, `pages/CODE.md` beside this file.

Codes: D data, C configuration, M001-M099 model, W rewards, E tools and environments, K checkpoints,
P proof on the first batch, M101 and up the health of a run. A page starts with `# CODE: title` and has the sections
`What it means`, `Usual causes`, `What to do`.
"""

from __future__ import annotations

from importlib import resources

from podium.errors import ConfigError
from podium.errors.texts import nearest

RETIRED = frozenset(["M106", "M143", "M145", "M147", "M154", "M162", "M173", "M174", "M178", "M179", "M181"])
"""Codes of detectors that are gone: records of runs have them, and `on_finding` may name them."""


def codes() -> tuple[str, ...]:
    """Every code that has a page, in order."""
    folder = resources.files("podium.runs") / "pages"
    return tuple(sorted(page.name.removesuffix(".md") for page in folder.iterdir() if page.name.endswith(".md")))


def page(code: str) -> str:
    """The page of a code, as markdown. Raises `ConfigError` for a code that has none."""
    known = codes()
    code = code.strip().upper()
    if code not in known:
        near = nearest(code, known)
        raise ConfigError(
            f"no rule `{code}`. `podium explain` lists them.",
            fix=f"Did you mean `{near}`?" if near else "the code, a setting or a metric as it is spelled",
            rule=code,
            near=near,
        )
    return (resources.files("podium.runs") / "pages" / f"{code}.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """The first line of a code's page, without the code."""
    return page(code).splitlines()[0].removeprefix(f"# {code}:").strip()
