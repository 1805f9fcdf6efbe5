"""The changes of several findings as one: which setting changes, why, and what no setting cures.

prescribed = prescribe(findings)
text = apply_changes(recipe, prescribed.changes)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import Finding
from podium.isolation.user_files import IN_FILE
from podium.recipe.changes import apply_changes
from podium.recipe.document import Document, from_here, read_document
from podium.runs.monitors import flat
from podium.runs.run import CONFIG, names_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Prescription:
    """The cures of some findings together."""

    changes: Mapping[str, Any]
    """Values by dotted key."""
    reasons: Mapping[str, Finding]
    """By the same keys, the finding that a change is for."""
    by_hand: tuple[Finding, ...]
    """Findings that no setting cures."""


def prescribe(findings: Sequence[Finding]) -> Prescription:
    """Merge the changes of findings that agree (`podium.runs.monitors.agreed`)."""
    changes: dict[str, Any] = {}
    reasons: dict[str, Finding] = {}
    for finding in findings:
        for key, value in flat(finding.changes):
            if key not in changes:
                changes[key], reasons[key] = value, finding
    by_hand = [
        finding for finding in findings if not finding.changes and finding.fix and "elsewhere" not in finding.facts
    ]
    return Prescription(changes=changes, reasons=reasons, by_hand=tuple(by_hand))


def recipe_of_run(folder: Path) -> Document | None:
    """The recipe in the folder of a run; None where there is none, as of a script, or in the log of another trainer."""
    if not (folder / CONFIG).is_file():
        return None
    document = read_document(folder / CONFIG, str(folder))
    return document if names_data(document.values) else None


def wanted(findings: Sequence[Finding]) -> list[Finding]:
    """The findings whose changes are made without being asked for."""
    return [finding for finding in findings if finding.severity != "note"]


def patched(
    recipe: str | Mapping[str, Any],
    values: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    folder: Path,
    target: Path,
) -> str:
    """The recipe's text with its changes, to be stored in `target`: functions are still found, runs kept apart,
    and the new run begins at its first step.

    `values` are those of `recipe`, read from a file in `folder`. Raises `ConfigError` as `apply_changes`.
    """
    moved: dict[str, Any] = {}
    resumed = {"resume_from_checkpoint": None} if "resume_from_checkpoint" in values else {}
    if folder.resolve() != target.parent.resolve():
        moved = _moved(from_here(values, folder), target.parent) or {}
    if isinstance(output := values.get("output_dir"), str):
        moved["output_dir"] = f"{output.rstrip('/')}-{target.suffixes[-2][1:] if target.suffixes[1:] else 'cured'}"
    return apply_changes(apply_changes(recipe, {**moved, **resumed}), changes)


def _moved(value: Any, folder: Path) -> Any:
    """Changes, by key and index, that name functions in files as seen from `folder`; None where there are none."""
    if isinstance(value, str):
        found = IN_FILE.fullmatch(value)
        if not found or Path(found["file"]).is_absolute() or not Path(found["file"]).is_file():
            return None
        return f"{os.path.relpath(found['file'], folder)}{value[found.end('file') :]}"
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return {key: change for key, part in items if (change := _moved(part, folder)) is not None} or None
