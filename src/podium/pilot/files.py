"""Files that a pilot leaves: `pilot.json` and `pilot.html` in its folder, and the recipe with the settings chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.pilot.records import Entry, PilotResult
from podium.recipe.changes import apply_changes, differences
from podium.recipe.document import Document, open_document, shipped_recipes
from podium.runs.html import asset, policy, render

JSON, HTML = "pilot.json", "pilot.html"
WIDTH, ROW = 420, 26
"""Size of the picture: pixels from 0 to 1, and of a candidate."""


def write(result: PilotResult, folder: Path) -> None:
    """Numbers and picture of a pilot, finished or not."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.loads(json.dumps(result.as_dict()), parse_constant=lambda _: None)  # NaN becomes null
    text = json.dumps(numbers, indent=2, ensure_ascii=False)
    for name, content in ((JSON, text + "\n"), (HTML, page(result))):
        beside = folder / f".{name}.tmp"
        beside.write_text(content, encoding="utf-8")
        beside.replace(folder / name)


def page(result: PilotResult) -> str:
    """One page that runs nothing: a line from before to after for each candidate, and the range expected."""
    style, expects = asset("groups.css"), result.expected
    return render(
        "pilot.html",
        title=f"Pilot of {result.name}",
        policy=policy([], [style]),
        style=style,
        sentences=result.sentences(),
        noun=result.noun,
        rows=[_drawn(i, each, chosen=each is result.winner) for i, each in enumerate(in_order(result))],
        expected=None if expects is None else (expects.low * WIDTH, expects.high * WIDTH),
        width=WIDTH,
        height=ROW * len(result.entries),
    )


def _drawn(index: int, entry: Entry, *, chosen: bool) -> dict[str, Any]:
    signal = entry.signal
    return {
        "name": entry.candidate.name,
        "y": ROW * (index + 0.5),
        "chosen": chosen,
        "before": None if signal is None else signal.before * WIDTH,
        "after": None if signal is None else signal.after * WIDTH,
        "note": entry.dropped or ("" if signal is None else f"{signal.before:.2f} to {signal.after:.2f}"),
    }


def in_order(result: PilotResult) -> list[Entry]:
    """The candidates, the best first: by rung, then by score."""
    return sorted(
        result.entries,
        key=lambda each: (
            each is not result.winner,
            -each.rung,
            -(each.score if each.rung else each.promise if each.promise == each.promise else -1.0),
            each.candidate.number,
        ),
    )


def patched(result: PilotResult, text: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """The text of the recipe with flags and the winner's settings in it, and comments that say why."""
    wanted = {**overrides, **result.winner.changes}
    found = differences(text, wanted)
    keys = dict.fromkeys(change.key.partition(".")[0] for change in found)
    body = apply_changes(text, {key: wanted[key] for key in wanted if key in keys}, name=result.name)
    lines = [f"From {result.name}, by `podium pilot`.", *result.sentences()]
    lines += [f"{change}" for change in found]
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return f"{head}\n{body}"


def write_recipe(
    result: PilotResult, path: str | Path | Document, overrides: Mapping[str, Any], given: Mapping[str, Any]
) -> Path:
    """Write `run.pilot.yaml` beside `run.yaml`; in the working folder for a recipe of Podium's or a dataset alone.

    Args:
        path: the recipe, as the pilot got it.
        overrides: flags, which become keys.
        given: all keys and values, for a pilot of a dataset alone.
    """
    if isinstance(path, Document) and not path.is_file:
        target, text = Path(f"{Path(path.name).stem}.pilot.yaml"), patched(result, given, {})
    else:
        file = Path(str(path)).expanduser()
        if file.is_file():
            target = file.with_name(f"{file.stem}.pilot.yaml")
        else:
            file = shipped_recipes()[open_document(path).name.removesuffix(".yaml")]
            target = Path(f"{file.stem}.pilot.yaml")
        text = patched(result, file.read_text(encoding="utf-8-sig"), overrides)
    target.write_text(text, encoding="utf-8")
    return target
