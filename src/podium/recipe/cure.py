"""The changes of several findings as one: which setting changes, why, and what no setting cures.

prescribed = prescribe(findings)
text = apply_changes(recipe, prescribed.changes)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import Finding
from podium.recipe.changes import STAGES, apply_changes
from podium.recipe.document import Document, read_document
from podium.runs.agreement import flat
from podium.runs.doctor import names_data
from podium.runs.run import CONFIG


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
    """Merge the changes of findings that agree (`podium.runs.agreement.agreed`)."""
    changes: dict[str, Any] = {}
    reasons: dict[str, Finding] = {}
    for finding in findings:
        for key, value in flat(finding.changes):
            if key not in changes:
                changes[key], reasons[key] = value, finding
    by_hand = [each for each in findings if not each.changes and each.fix and "elsewhere" not in each.facts]
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
    """The recipe's text with its changes, to be stored in `target`: reward files are still found, runs kept apart.

    `values` are those of `recipe`, whose file lies in `folder`. Raises `ConfigError` as `apply_changes`.
    """
    moved: dict[str, Any] = {}
    if folder.resolve() != target.parent.resolve():
        moved = _moved_files(values, lambda file: _seen_from(file, folder, target.parent))
    if isinstance(output := values.get("output_dir"), str):
        moved["output_dir"] = f"{output.rstrip('/')}-{target.suffixes[-2][1:] if target.suffixes[1:] else 'cured'}"
    return apply_changes(apply_changes(recipe, moved), changes)


def _moved_files(values: Mapping[str, Any], see: Callable[[str], str | None]) -> dict[str, Any]:
    """Changes of the reward files that are named relative to the recipe, of all stages."""
    changes: dict[str, Any] = {}
    rewards = values.get("rewards")
    for number, entry in enumerate(rewards if isinstance(rewards, list) else ()):
        named = {"function": entry} if isinstance(entry, str) else entry
        name = named.get("function") or named.get("name") if isinstance(named, Mapping) else None
        file, colon, function = str(name or "").rpartition(":")
        if colon and file.endswith(".py") and (path := see(file)):
            moved = f"{path}:{function}"
            key = "function" if isinstance(named, Mapping) and named.get("function") else "name"
            changes.setdefault("rewards", {})[number] = moved if isinstance(entry, str) else {key: moved}
    stages = values.get(STAGES)
    inner = {
        number: each
        for number, stage in enumerate(stages if isinstance(stages, list) else ())
        if isinstance(stage, Mapping) and (each := _moved_files(stage, see))
    }
    return {**changes, **({STAGES: inner} if inner else {})}


def _seen_from(file: str, before: Path, after: Path) -> str | None:
    """The path of a file beside the old recipe, for the new one; None where it is not there, or the path is whole."""
    path = before / file
    return os.path.relpath(path, after) if not Path(file).is_absolute() and path.is_file() else None
